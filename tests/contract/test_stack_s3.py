"""The embedded object store, against a real client: what blobs and checkpoints rely on."""

from __future__ import annotations

import stat
import threading
import uuid
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from odradek.infra.errors import StackError, Unreachable
from odradek.infra.stack.s3 import S3Access, S3Keys, check_s3, s3_client
from odradek.infra.stack.seaweed import Seaweed
from odradek.infra.stack.state import state_path
from odradek.infra.stack.testing import running, scratch

pytestmark = pytest.mark.contract


def test_a_conditional_put_has_one_winner(s3_access: S3Access, s3_prefix: str) -> None:
    """Checkpoint manifests are put with If-None-Match: the second writer is refused, the first bytes stay."""
    client = s3_client(s3_access)
    key = f"{s3_prefix}manifest"
    client.put_object(Bucket=s3_access.bucket, Key=key, Body=b"first", IfNoneMatch="*")
    with pytest.raises(ClientError) as refused:
        client.put_object(Bucket=s3_access.bucket, Key=key, Body=b"second", IfNoneMatch="*")
    assert refused.value.response["Error"]["Code"] == "PreconditionFailed"
    assert client.get_object(Bucket=s3_access.bucket, Key=key)["Body"].read() == b"first"


def test_wrong_keys_are_refused_with_a_hint(s3_access: S3Access) -> None:
    """The store is not open to whoever finds its port."""
    stranger = S3Access(s3_access.endpoint, s3_access.bucket, s3_access.region, S3Keys("nobody", "nothing"))
    with pytest.raises(StackError, match="check the credentials"):
        check_s3(stranger, 5.0)


def test_a_store_holds_objects_of_many_buckets(s3_access: S3Access) -> None:
    """Each bucket takes volumes of its own, of which there are only so many."""
    client = s3_client(s3_access)
    buckets = [f"many-{uuid.uuid4().hex[:12]}" for _ in range(40)]
    for bucket in buckets:
        client.create_bucket(Bucket=bucket)
        client.put_object(Bucket=bucket, Key="k", Body=bucket.encode())
    assert [client.get_object(Bucket=name, Key="k")["Body"].read().decode() for name in buckets] == buckets
    for bucket in buckets:
        client.delete_object(Bucket=bucket, Key="k")
        client.delete_bucket(Bucket=bucket)


def test_a_missing_bucket_is_named(s3_access: S3Access) -> None:
    """A typo in s3.bucket must be found before work starts."""
    wrong = S3Access(s3_access.endpoint, "no-such-bucket", s3_access.region, s3_access.keys)
    with pytest.raises(StackError, match=r"bucket no-such-bucket at .* refused"):
        check_s3(wrong, 5.0)


def test_an_unreachable_store_is_one_line_within_its_deadline() -> None:
    """Nothing listens on the discard port."""
    with pytest.raises(
        Unreachable, match=r"^s3: bucket b at http://127\.0\.0\.1:9 gave no answer within 2 s"
    ) as caught:
        check_s3(S3Access("http://127.0.0.1:9", "b", "us-east-1", S3Keys("a", "b")), 2.0)
    assert "\n" not in str(caught.value)


def test_keys_never_print() -> None:
    """Log lines and errors may show the struct, never what it holds."""
    keys = S3Keys("visible-access", "visible-secret")
    shown = f"{keys!r} {keys!s} {S3Access(None, 'b', 'r', keys)!r}"
    assert "visible" not in shown


class _FrontAlone(BaseHTTPRequestHandler):
    """A store whose front knows its buckets, while the disks behind it are not there yet."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(500)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_a_store_is_ready_when_it_reads_not_when_its_front_answers() -> None:
    with HTTPServer(("127.0.0.1", 0), _FrontAlone) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        access = S3Access(f"http://127.0.0.1:{server.server_port}", "b", "us-east-1", S3Keys("a", "b"))
        check_s3(access, 5.0)
        with pytest.raises(Unreachable, match="answers 500"):
            check_s3(access, 5.0, holds="odradek-ready")
        server.shutdown()


def test_objects_survive_down_and_up_on_other_ports_and_keys_stay_private() -> None:
    """`down` ends the process; the next `up` serves the same objects under the same keys, wherever it listens, in a
    folder of any name: `weed` takes an absolute one with a comma for two."""
    with scratch() as folder:
        data = folder / "d, é"
        data.mkdir()
        store = Seaweed(data)
        with running(data, store) as stack:
            access = store.access(stack.address("s3"))
            s3_client(access).put_object(Bucket=access.bucket, Key="kept", Body=b"bytes")
        state_path(data).unlink()  # forgets the ports, so that others are chosen
        with running(data, store) as stack:
            moved = store.access(stack.address("s3"))
            body = s3_client(moved).get_object(Bucket=moved.bucket, Key="kept")["Body"].read()
            assert _secret_places(data, store) == {store.keys_file, data / "s3" / "identities.json"}
        assert body == b"bytes"
        assert (data / "s3" / "data" / "vol_dir.uuid").exists()
        assert moved.keys == access.keys
        assert {stat.S_IMODE(path.stat().st_mode) for path in (store.keys_file, data / "s3" / "identities.json")} == {
            0o600
        }


def _secret_places(data: Path, store: Seaweed) -> set[Path]:
    """Every small file of the data folder that contains the secret key; none may be a log or the state."""
    secret = S3Keys.read(store.keys_file).secret_key.encode()
    files = [path for path in data.rglob("*") if path.is_file() and path.stat().st_size < 2**20]
    return {path for path in files if secret in path.read_bytes()}
