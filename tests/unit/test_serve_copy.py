"""What of a person's folder is copied, what is left out and said, and what a session starts from."""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
from tests.support.serve_world import file, link, on_disk, write_tree

from odradek.infra.serve.errors import FolderRefused
from odradek.infra.serve.select import is_secret, select
from odradek.infra.serve.snapshot import Node, as_tar, start_of, take


def _git(root: Path, *arguments: str) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(root), "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(root), *arguments]
    subprocess.run(command, check=True, capture_output=True, env=environment)


@pytest.fixture(params=["git", "plain"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder under git, and the same without: the rules are the same."""
    folder = tmp_path / "project"
    folder.mkdir()
    if request.param == "git":
        _git(folder, "init", "-q")
    return folder


def test_tracked_and_unignored_files_are_copied(root: Path) -> None:
    write_tree(
        root,
        {
            ".gitignore": file("*.log\n/build/\nnested/*.tmp\n!keep.log\n"),
            "main.py": file("m"),
            "a.log": file("ignored"),
            "keep.log": file("kept"),
            "build/out": file("ignored"),
            "deep/build/out": file("kept: the pattern is anchored"),
            "nested/x.tmp": file("ignored"),
            "nested/.gitignore": file("y.txt\n"),
            "nested/y.txt": file("ignored"),
            "y.txt": file("kept"),
        },
    )
    assert select(root).paths == [
        ".gitignore",
        "deep/build/out",
        "keep.log",
        "main.py",
        "nested/.gitignore",
        "y.txt",
    ]


def test_a_tracked_file_is_copied_although_it_is_ignored(tmp_path: Path) -> None:
    write_tree(tmp_path, {".gitignore": file("*.log\n"), "a.log": file("tracked"), "b.log": file("not")})
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "-f", "a.log")
    assert select(tmp_path).paths == [".gitignore", "a.log"]


def test_a_file_deleted_in_the_work_tree_is_not_copied(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a": file("a"), "b": file("b")})
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", ".")
    (tmp_path / "a").unlink()
    assert select(tmp_path).paths == ["b"]
    assert select(tmp_path).left_out == {}


def test_a_folder_inside_a_repository_is_copied_alone(tmp_path: Path) -> None:
    write_tree(tmp_path, {"outside": file(), "sub/inside": file(), ".gitignore": file("*.log\n"), "sub/a.log": file()})
    _git(tmp_path, "init", "-q")
    assert select(tmp_path / "sub").paths == ["inside"]


def test_a_folder_that_its_repository_ignores_is_copied_by_its_own_rules(tmp_path: Path) -> None:
    write_tree(
        tmp_path, {".gitignore": file("/out/\n"), "out/project/a": file(), "out/project/.gitignore": file("b\n")}
    )
    write_tree(tmp_path / "out" / "project", {"b": file()})
    _git(tmp_path, "init", "-q")
    assert select(tmp_path / "out" / "project").paths == [".gitignore", "a"]


SECRETS = [
    ".env",
    ".env.local",
    ".envrc",
    "config/.env",
    "server.pem",
    "server.KEY",
    "id_rsa",
    "id_ed25519.pub",
    "credentials.json",
    ".netrc",
    ".aws/config",
    ".ssh/known_hosts",
    "sub/.SSH/x",
    ".npmrc",
    ".pypirc",
    ".git-credentials",
    "store.p12",
    "prod.env",
    "kubeconfig",
    "deploy/staging.kubeconfig",
    ".kube/config",
    "creds.json",
    "credentials-prod.yaml",
    "service-account-7f.json",
    "client_secret_1.json",
    ".env.example",
]


@pytest.mark.parametrize("path", SECRETS)
def test_env_and_key_files_are_never_copied_and_it_is_said(root: Path, path: str) -> None:
    write_tree(root, {path: file("SECRET"), "main.py": file("m")})
    if (root / ".git").exists():
        _git(root, "add", "-f", ".")
    selection = select(root)
    assert selection.paths == ["main.py"]
    assert selection.left_out == {path: "may hold a secret"}


HARMLESS = [
    *("environment.py", "keys.py", "pem.txt", "env/x.py", "id.py", "monkey", "keyboard.py", "monkey.json"),
    *("credentials.py", "creds_test.go", "kubeconfig.go", "docs/service-account.md", "env.py"),
]


@pytest.mark.parametrize("path", HARMLESS)
def test_names_that_only_look_like_secrets_are_copied(path: str) -> None:
    assert not is_secret(path)


BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQDkHZq1Zp3v\n" * 4
KEY = f"-----BEGIN RSA PRIVATE KEY-----\n{BODY}-----END RSA PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("deploy.txt", KEY, "holds a private key"),
        ("far.conf", "# a line\n" * 5_000 + KEY, "holds a private key"),
        ("cut.conf", "#" * (64 * 1024 - 200) + "\n" + KEY, "holds a private key"),
        ("key", KEY.replace("RSA ", "OPENSSH ").replace("\n", "\r\n"), "holds a private key"),
        ("gcp.json", json.dumps({"type": "service_account", "private_key": KEY}), "holds a private key"),
        ("settings.py", f"KEY = {KEY!r}\n", "holds a private key"),
        ("app/credentials.py", 'API_KEY = "q7Rk2ZpXw93LmTt8VbNc4HsD"\n', "may hold a secret"),
    ],
)
def test_a_file_with_a_key_in_it_is_left_out_whatever_its_name(root: Path, path: str, text: str, reason: str) -> None:
    write_tree(root, {path: file(text), "main.py": file("m")})
    snapshot = take(root, select(root))
    assert set(snapshot.tree) == {"main.py"}
    assert snapshot.left_out == {path: reason}


def test_code_that_only_speaks_of_keys_is_copied(root: Path) -> None:
    files = {
        "pem.py": file('BEGIN = "-----BEGIN PRIVATE KEY-----"\n\n\ndef is_key(text: str) -> bool:\n    ...\n'),
        "README.md": file("The key file begins with `-----BEGIN PRIVATE KEY-----`; see [redacted:PRIVATE_KEY].\n"),
        "public.txt": file(KEY.replace("RSA PRIVATE", "PUBLIC")),
        "credentials.py": file("def load(path: str) -> Credentials:\n    return Credentials(read(path))\n"),
        "settings.py": file('API_KEY = "q7Rk2ZpXw93LmTt8VbNc4HsD"\n'),
    }
    write_tree(root, files)
    snapshot = take(root, select(root))
    assert (set(snapshot.tree), snapshot.left_out) == (set(files), {})


def test_links_are_copied_as_links_and_modes_as_git_keeps_them(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("x")
    write_tree(root, {"run.sh": file("#!", 0o775), "a.py": file("a", 0o600), "real/f": file("f")})
    (root / "to_file").symlink_to("a.py")
    (root / "to_nothing").symlink_to("nothing")
    (root / "to_folder").symlink_to("real")
    (root / "out").symlink_to(outside)
    tree = take(root, select(root)).tree
    assert tree == {
        "run.sh": file("#!", 0o755),
        "a.py": file("a"),
        "real/f": file("f"),
        "to_file": link("a.py"),
        "to_nothing": link("nothing"),
        "to_folder": link("real"),
        "out": link(str(outside)),
    }


def test_what_can_not_be_copied_is_said(root: Path, tmp_path: Path) -> None:
    write_tree(root, {"a": file()})
    (root / os.fsdecode(b"caf\xe9")).write_text("x")
    nested = root / "nested"
    nested.mkdir()
    _git(nested, "init", "-q")
    (nested / "x").write_text("x")
    expected = {"caf\\xe9": "its name is not text", "nested": "a repository of its own"}
    if not (root / ".git").exists():  # git does not list sockets
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(root / "s"))
        expected["s"] = "not a file"
    selection = select(root)
    assert selection.paths == ["a"]
    assert selection.left_out == expected


def test_caches_are_neither_copied_nor_listed(root: Path) -> None:
    write_tree(root, {"a.py": file(), "__pycache__/a.cpython-311.pyc": file(), ".pytest_cache/x": file()})
    assert (select(root).paths, select(root).left_out) == (["a.py"], {})
    assert select(root).ignored(["__pycache__/", "b/__pycache__/x.pyc", "b.py"]) == {
        "__pycache__/",
        "b/__pycache__/x.pyc",
    }


def test_ignored_by_products_are_told_from_work(root: Path) -> None:
    write_tree(root, {".gitignore": file("*.log\nout/\n"), "a": file()})
    assert select(root).ignored(["x.log", "sub/y.log", "out/", "out/deep/z", "new.py"]) == {
        "x.log",
        "sub/y.log",
        "out/",
        "out/deep/z",
    }
    assert select(root).ignored([]) == set()


def test_too_much_is_refused_with_the_number(root: Path) -> None:
    write_tree(root, {"a": file("x" * 1_500_000), "b": file("y" * 1_000_000)})
    with pytest.raises(FolderRefused, match=r"has 2\.5 MB to copy, at most 2 MB are"):
        take(root, select(root), max_bytes=2_000_000)
    assert take(root, select(root), max_bytes=2_500_000).size == 2_500_000


def test_looking_runs_no_program_that_the_folder_names_and_changes_no_byte(tmp_path: Path) -> None:
    """A repository's own configuration can name a program for git to run; a person's index is not ours to refresh."""
    root, ran = tmp_path / "project", tmp_path / "ran"
    root.mkdir()
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    write_tree(root, {"a": file("a")})
    _git(root, "init", "-q")
    _git(root, "add", ".")
    _git(root, "config", "core.fsmonitor", str(program))
    (root / "a").touch()
    before = _everything(root)
    assert take(root, select(root)).tree == {"a": file("a")}
    select(root).ignored(["x"])
    assert not ran.exists()
    assert _everything(root) == before


def _everything(root: Path) -> dict[str, tuple[int, str]]:
    paths = [p for p in root.rglob("*") if p.is_file()]
    return {str(p): (p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest()) for p in paths}


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderRefused, match="not a directory"):
        select(tmp_path / "none")


ODD: dict[str, Node] = {
    "plain.py": file("p"),
    "with blank.sh": file("s", 0o755),
    "quote's $HOME `id`.sh": file("q", 0o755),
    "-rf": file("dash", 0o755),
    "ü/new\nline.sh": file("n", 0o755),
    "links/only/here": link("../../plain.py"),
    "-link": link("-rf"),
    "to blank": link("with blank.sh"),
    "dollar": link("$HOME'; touch evil"),
}


def test_files_and_set_up_commands_are_the_whole_start(tmp_path: Path) -> None:
    """Links and modes come from set-up commands, whatever characters the names have."""
    start = start_of(ODD, "demo")
    write_tree(tmp_path, {path: Node("file", 0o644, content) for path, content in start.files.items()})
    for command in start.setup:
        subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, check=True)
    made = {path: node for path, node in on_disk(tmp_path).items() if node.kind != "dir"}
    assert made == ODD


def test_set_up_commands_stay_below_the_length_the_kernel_takes() -> None:
    tree = {f"{'d' * 100}/{'p' * 100}{number}": file("", 0o755) for number in range(2000)}
    tree |= {f"{'l' * 100}/{number}": link("t" * 200) for number in range(1000)}
    commands = start_of(tree, "demo").setup
    assert max(len(command.encode()) for command in commands) < 100_000
    assert sum(command.count("ln -s") for command in commands) == 1000


def test_a_large_tree_travels_as_one_tar_with_the_same_bytes_each_time(tmp_path: Path) -> None:
    archive = as_tar(ODD)
    assert as_tar(dict(reversed(ODD.items()))) == archive
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(tmp_path, filter="fully_trusted")
    made = {path: node for path, node in on_disk(tmp_path).items() if node.kind != "dir"}
    assert made == ODD
    assert all(stat.S_IMODE((tmp_path / p).stat().st_mode) == 0o755 for p in ("-rf", "with blank.sh"))
