"""The broker's jars: locked by coordinates and SHA-256, fetched by an ordinary Maven client, cached per user.

Owns `kafka-jars.lock` and the cache folder. Promises: `ensure_jars` returns a folder that holds exactly the locked
jars with the locked hashes, or raises `JarError`; a half-made cache is never seen (folders appear by rename).
Where to fetch from is the client's business (Maven's own settings), so the lock holds no address.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from odradek.infra.errors import InfraError, JarError

LOCK_FILE = Path(__file__).with_name("kafka-jars.lock")

ROOT_ARTIFACTS = ("org.apache.kafka:kafka_2.13:4.3.1",)
"""What `relock` resolves with its runtime dependencies."""

ALONE_ARTIFACTS = ("org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",)
"""Locked without dependencies: with them some resolvers mix an older kafka-clients in."""

FETCH_DEADLINE_S = 600.0
"""Seconds for the whole download (44 MB). Too low fails on slow links; too high hides a dead one."""


class Jar(msgspec.Struct, frozen=True, order=True):
    """One line of the lock."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        """The jar's file name in a Maven repository."""
        return f"{self.artifact}-{self.version}.jar"

    @property
    def coordinates(self) -> str:
        """`group:artifact:version`, as Maven writes it."""
        return f"{self.group}:{self.artifact}:{self.version}"


def read_lock(path: Path = LOCK_FILE) -> tuple[Jar, ...]:
    """The locked jars, in the lock's order; a malformed line is a `JarError` naming it."""
    jars = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            coordinates, sha256 = line.split()
            group, artifact, version = coordinates.split(":")
        except ValueError as error:
            raise JarError(f"{path}:{number}: expected 'group:artifact:version sha256', found {line!r}") from error
        jars.append(Jar(group, artifact, version, sha256))
    return tuple(jars)


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/odradek` or `~/.cache/odradek`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "odradek"


def ensure_jars(cache: Path | None = None, lock: Path = LOCK_FILE) -> Path:
    """The folder of verified jars; fetched on the first call, checked against the lock on each."""
    jars = read_lock(lock)
    folder = (cache or default_cache()) / f"kafka-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
    if folder.is_dir():
        bad = mismatches(folder, jars)
        if not bad:
            return folder
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetch-") as made:
        staging = Path(made) / "jars"
        staging.mkdir()
        fetch(jars, staging)
        bad = mismatches(staging, jars)
        if bad:
            raise JarError(f"jars do not match {lock.name}: {'; '.join(bad[:3])} ({len(bad)} in all); nothing was kept")
        try:
            staging.rename(folder)
        except OSError as error:  # another process made it meanwhile: its folder passed the same check
            if not folder.is_dir():
                raise JarError(f"can't keep the jars in {folder}: {error}") from error
    return folder


def mismatches(folder: Path, jars: tuple[Jar, ...]) -> list[str]:
    """What differs between the folder and the lock, one phrase for each jar; empty if nothing does."""
    found = []
    for jar in jars:
        path = folder / jar.file_name
        if not path.is_file():
            found.append(f"{jar.coordinates} missing")
            continue
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != jar.sha256:
            found.append(f"{jar.coordinates} has sha256 {digest[:12]}…, the lock says {jar.sha256[:12]}…")
    return found


def fetch(jars: tuple[Jar, ...], target: Path) -> None:
    """Download the jars by the first client present: Maven, else the Python package `jgo`."""
    if shutil.which("mvn"):
        _fetch_maven(jars, target)
    elif importlib.util.find_spec("jgo"):
        _fetch_jgo(jars, target)
    else:
        raise JarError(
            "no client to fetch the Kafka jars: install the Debian package 'maven', or the Python package 'jgo' "
            "(pip install 'odradek[java]')"
        )


def _fetch_maven(jars: tuple[Jar, ...], target: Path) -> None:
    """One throw-away POM that names each locked jar with its dependencies excluded."""
    pom = target.parent / "pom.xml"
    pom.write_text(_pom(jars))
    command = ["mvn", "-B", "-q", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={target}"]
    command += ["-Dstyle.color=never", *_repository()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise JarError(f"mvn did not fetch the Kafka jars within {FETCH_DEADLINE_S:.0f} s; try again") from error
    if done.returncode != 0:
        reason = next((line for line in done.stdout.splitlines() if "ERROR" in line), "no error line")
        raise JarError(f"mvn could not fetch the Kafka jars (exit {done.returncode}): {reason}")


def _repository() -> list[str]:
    """Maven keeps its cache in the account's home folder, whatever HOME says; an account without one can't use it."""
    try:
        account = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        account = ""
    home = Path.home()
    return [] if account == str(home) else [f"-Dmaven.repo.local={home / '.m2' / 'repository'}"]


def _pom(jars: tuple[Jar, ...]) -> str:
    def dependency(jar: Jar) -> str:
        return (
            f"<dependency><groupId>{jar.group}</groupId><artifactId>{jar.artifact}</artifactId>"
            f"<version>{jar.version}</version><exclusions><exclusion><groupId>*</groupId>"
            "<artifactId>*</artifactId></exclusion></exclusions></dependency>"
        )

    head = "<project><modelVersion>4.0.0</modelVersion><groupId>odradek</groupId><artifactId>jars</artifactId>"
    return f"{head}<version>1</version><dependencies>{''.join(map(dependency, jars))}</dependencies></project>\n"


def _fetch_jgo(jars: tuple[Jar, ...], target: Path) -> None:
    maven: Any = importlib.import_module("jgo.maven")
    context = maven.MavenContext()
    for jar in jars:
        try:
            path = context.project(jar.group, jar.artifact).at_version(jar.version).artifact().resolve()
        except Exception as error:
            raise JarError(f"jgo could not fetch {jar.coordinates}: {error}") from error
        shutil.copyfile(path, target / jar.file_name)


def _unhashed(coordinates: str) -> Jar:
    group, artifact, version = coordinates.split(":")
    return Jar(group, artifact, version, "")


def relock(lock: Path = LOCK_FILE) -> int:
    """Resolve the roots again with Maven and rewrite the lock; returns the number of jars."""
    with tempfile.TemporaryDirectory() as made:
        roots = [_unhashed(root) for root in ROOT_ARTIFACTS]
        alone = [_unhashed(root) for root in ALONE_ARTIFACTS]
        plain = "".join(
            f"<dependency><groupId>{jar.group}</groupId><artifactId>{jar.artifact}</artifactId>"
            f"<version>{jar.version}</version></dependency>"
            for jar in roots
        )
        pom = Path(made) / "pom.xml"
        pom.write_text(_pom(tuple(alone)).replace("<dependencies>", f"<dependencies>{plain}"))
        repository = Path(made) / "jars"
        command = ["mvn", "-B", "-q", "-f", str(pom), "dependency:copy-dependencies"]
        layout = [f"-DoutputDirectory={repository}", "-DincludeScope=runtime", "-Dmdep.useRepositoryLayout=true"]
        subprocess.run([*command, *layout], check=True, timeout=FETCH_DEADLINE_S)
        rows = []
        for path in repository.rglob("*.jar"):
            version, artifact = path.parent.name, path.parent.parent.name
            group = ".".join(path.parent.parent.parent.relative_to(repository).parts)
            rows.append(f"{group}:{artifact}:{version} {hashlib.sha256(path.read_bytes()).hexdigest()}")
    comments = [line for line in lock.read_text().splitlines() if line.startswith("#")]
    lock.write_text("\n".join([*comments, *sorted(rows)]) + "\n")
    return len(rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["relock"]:
        print(f"{LOCK_FILE.name}: {relock()} jars")
    else:
        print(f"checking {len(read_lock())} Kafka jars, fetching them if they are not there", file=sys.stderr)
        try:
            print(ensure_jars())
        except InfraError as error:
            sys.exit(f"odradek: {error}")
