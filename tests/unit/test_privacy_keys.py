"""The key store and the ring: one key a subject, never again after it was destroyed, and nothing opens out of place."""

from __future__ import annotations

import os
import signal
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber
from hypothesis import given, settings
from hypothesis import strategies as st

from odradek.streams.errors import DecodeError, KeyUnavailable, StoreUnreachable, SubjectErased
from odradek.streams.privacy import keys as keys_module
from odradek.streams.privacy.keys import KEY_BYTES, KeyFiles
from odradek.streams.privacy.kms import KmsWrapping
from odradek.streams.privacy.names import LONGEST, folder_of
from odradek.streams.privacy.ring import OVERHEAD, KeyRing, SubjectKey

PLACE = b"here"


@pytest.fixture
def store(tmp_path: Path) -> KeyFiles:
    return KeyFiles(tmp_path / "keys")


# -- the store --------------------------------------------------------------------------------------------------------


def test_a_key_is_made_once_and_found_again(store: KeyFiles) -> None:
    assert store.find("ann") is None
    key = store.obtain("ann")
    assert len(key) == KEY_BYTES
    assert store.obtain("ann") == store.find("ann") == KeyFiles(store.folder).find("ann") == key
    assert store.obtain("ben") != key


def test_of_many_that_ask_at_once_all_get_the_same_key(store: KeyFiles) -> None:
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda _: KeyFiles(store.folder).obtain("ann"), range(64)))
    assert set(found) == {store.find("ann")}
    assert [path.name for path in store.folder.iterdir()] == ["ann.key"], "nothing is left beside it"


def test_only_the_owner_can_read_keys(store: KeyFiles) -> None:
    store.obtain("ann")
    store.destroy("ben", "asked")
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in store.folder.iterdir()} == {0o600}


def test_a_destroyed_subject_never_has_a_key_again(store: KeyFiles) -> None:
    """Guarantee 9: a late writer cannot mint the key again."""
    key = store.obtain("ann")
    assert store.destroy("ann", "asked") is True
    assert store.destroyed("ann") and not store.destroyed("ben")
    for ask in (store.find, store.obtain, KeyFiles(store.folder).obtain):
        with pytest.raises(SubjectErased, match="'ann' was erased"):
            ask("ann")
    assert store.destroy("ann", "again") is False, "twice is once"
    assert all(key not in path.read_bytes() for path in store.folder.iterdir())


def test_a_subject_without_a_key_can_be_erased_too(store: KeyFiles) -> None:
    assert store.destroy("ann", "asked") is True
    with pytest.raises(SubjectErased):
        store.obtain("ann")


def test_a_key_made_while_the_subject_is_erased_is_not_used(store: KeyFiles) -> None:
    """The writer looked before the mark was there and writes its key after the store was swept."""

    class Slow(keys_module.Unwrapped):
        def fresh(self, subject: str) -> tuple[bytes, bytes]:
            KeyFiles(store.folder).destroy(subject, "asked")
            return super().fresh(subject)

    with pytest.raises(SubjectErased):
        KeyFiles(store.folder, Slow()).obtain("ann")
    assert [path.name for path in store.folder.iterdir()] == ["ann.erased"]


def in_child(work: Any, name: str, at: int) -> bool:
    """Runs `work` in a process that dies by SIGKILL at its call number `at` of `os.NAME`; False if it makes fewer."""
    child = os.fork()
    if child == 0:
        calls, real = 0, getattr(os, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return real(*arguments, **named)

        setattr(os, name, counted)
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("call", ["fsync", "open", "link", "unlink"])
def test_a_kill_at_any_point_of_destroying_leaves_the_key_whole_or_the_subject_erased(
    tmp_path: Path, call: str
) -> None:
    died = 0
    for at in range(20):
        store = KeyFiles(tmp_path / f"{call}{at}")
        key = store.obtain("ann")
        if not in_child(lambda store=store: store.destroy("ann", "asked"), call, at):
            break
        died += 1
        if not store.destroyed("ann"):
            assert store.find("ann") == key, "nothing had happened yet"
        assert store.destroy("ann", "again") in (True, False)
        with pytest.raises(SubjectErased):
            store.obtain("ann")
        assert all(key not in path.read_bytes() for path in store.folder.iterdir()), "finished by the next call"
    assert died, "no kill happened: the test shows nothing"


@pytest.mark.parametrize("call", ["fsync", "open"])
def test_a_kill_at_any_point_of_making_a_key_leaves_none_or_a_whole_one(tmp_path: Path, call: str) -> None:
    died = 0
    for at in range(20):
        store = KeyFiles(tmp_path / f"{call}{at}")
        if not in_child(lambda store=store: store.obtain("ann"), call, at):
            break
        died += 1
        found = store.find("ann")
        assert found is None or len(found) == KEY_BYTES
        assert found in (None, store.obtain("ann"))
    assert died


def test_a_store_that_cannot_be_read_is_named_without_the_key(store: KeyFiles) -> None:
    store.obtain("ann")
    (store.folder / "ann.key").unlink()
    (store.folder / "ann.key").mkdir()
    with pytest.raises(KeyUnavailable, match=r"key store at .*privacy.keys"):
        store.find("ann")
    (store.folder / "ben.key").write_bytes(b"short")
    with pytest.raises(KeyUnavailable, match="has 5 bytes, expected 32"):
        store.find("ben")


# -- names ------------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.text(min_size=1, max_size=300), st.text(min_size=1, max_size=300))
def test_subjects_have_names_of_their_own_that_are_no_paths(one: str, other: str) -> None:
    """Erasing a subject must reach nobody else's objects: no name is another's, or leads into or out of its folder."""
    try:
        first, second = folder_of(one), folder_of(other)
    except UnicodeEncodeError:
        return  # lone surrogates are no text
    assert (first == second) == (one == other)
    assert "/" not in first and first not in (".", "..", "shared") and len(first) <= LONGEST


ALIKE = ["ann", "Ann", "ann ", "a\u0308nn", "\u00e4nn", "ann.", "ann%2E", "a/nn", "a%2Fnn", "shared", "%73hared", "."]
"""Names that a careless escape makes one."""


def test_names_that_are_nearly_the_same_stay_apart() -> None:
    names = [*ALIKE, *("x" * LONGEST + end for end in ("", "a", "b")), folder_of("x" * LONGEST + "a")]
    assert len({folder_of(name) for name in names}) == len(names)


# -- the ring ---------------------------------------------------------------------------------------------------------


async def test_what_is_encrypted_opens_in_its_place_only(store: KeyFiles) -> None:
    key = await KeyRing(store).obtain("ann")
    box = key.encrypt(b"hello", PLACE)
    assert len(box) == len(b"hello") + OVERHEAD and b"hello" not in box
    assert key.decrypt(box, PLACE) == b"hello"
    with pytest.raises(DecodeError, match="changed, or belongs to another place"):
        key.decrypt(box, b"elsewhere")
    for at in range(len(box)):
        changed = bytearray(box)
        changed[at] ^= 1
        with pytest.raises((DecodeError, KeyUnavailable)):
            key.decrypt(bytes(changed), PLACE)


async def test_equal_content_never_gives_equal_bytes(store: KeyFiles) -> None:
    key = await KeyRing(store).obtain("ann")
    assert len({key.encrypt(b"same", PLACE) for _ in range(50)}) == 50


async def test_a_wrong_key_store_is_told_from_a_changed_ciphertext(store: KeyFiles, tmp_path: Path) -> None:
    box = (await KeyRing(store).obtain("ann")).encrypt(b"x", PLACE)
    other = await KeyRing(KeyFiles(tmp_path / "other")).obtain("ann")
    with pytest.raises(KeyUnavailable, match="is it the deployment's own"):
        other.decrypt(box, PLACE)


async def test_content_and_leaves_have_keys_of_their_own(store: KeyFiles) -> None:
    key = await KeyRing(store).obtain("ann")
    secret = store.find("ann")
    assert secret is not None
    parts = {key.leaf, key._derived(b"content"), secret}
    assert len(parts) == 3 and key.id not in b"".join(parts)
    assert secret.hex() not in repr(key) and str(secret) not in repr(key)


async def test_a_key_in_memory_is_dropped_when_another_process_destroys_it(store: KeyFiles) -> None:
    ring, other = KeyRing(store), KeyRing(KeyFiles(store.folder))
    await ring.obtain("ann")
    assert ring.held("ann") is not None
    await other.destroy("ann", "asked")
    assert ring.held("ann") is None and ring.erased("ann")
    assert await ring.find("ann") is None
    with pytest.raises(SubjectErased):
        await ring.obtain("ann")


async def test_a_missing_key_is_no_erasure(store: KeyFiles) -> None:
    ring = KeyRing(store)
    assert await ring.find("ann") is None and not ring.erased("ann")


# -- KMS, against boto3's own stub: it was not run against AWS ------------------------------------------------------


@pytest.fixture
def kms() -> Any:
    return boto3.client("kms", region_name="eu-central-1", aws_access_key_id="x", aws_secret_access_key="y")


async def test_with_a_kms_the_folder_holds_only_the_wrapped_key(tmp_path: Path, kms: Any) -> None:
    secret, context = os.urandom(KEY_BYTES), {"odradek:subject": "ann"}
    store = KeyFiles(tmp_path / "keys", KmsWrapping(kms, "alias/odradek"))
    with Stubber(kms) as stub:
        stub.add_response(
            "generate_data_key",
            {"Plaintext": secret, "CiphertextBlob": b"wrapped", "KeyId": "k"},
            {"KeyId": "alias/odradek", "KeySpec": "AES_256", "EncryptionContext": context},
        )
        stub.add_response(
            "decrypt",
            {"Plaintext": secret, "KeyId": "k"},
            {"KeyId": "alias/odradek", "CiphertextBlob": b"wrapped", "EncryptionContext": context},
        )
        box = (await KeyRing(store).obtain("ann")).encrypt(b"hello", PLACE)
        assert (store.folder / "ann.key").read_bytes() == b"wrapped"
        found = await KeyRing(store).find("ann")
        assert found is not None and found.decrypt(box, PLACE) == b"hello"
        stub.assert_no_pending_responses()
        await KeyRing(store).destroy("ann", "asked")
        assert [path.name for path in store.folder.iterdir()] == ["ann.erased"]


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [("AccessDeniedException", 400, KeyUnavailable), ("ThrottlingException", 400, StoreUnreachable),
     ("KMSInternalException", 500, StoreUnreachable)],
)  # fmt: skip
def test_a_kms_that_refuses_is_told_from_one_that_is_busy(
    tmp_path: Path, kms: Any, code: str, status: int, expected: type[Exception]
) -> None:
    store = KeyFiles(tmp_path / "keys", KmsWrapping(kms, "alias/odradek"))
    with Stubber(kms) as stub:
        wanted = {"KeyId": ANY, "KeySpec": ANY, "EncryptionContext": ANY}
        stub.add_client_error("generate_data_key", code, http_status_code=status, expected_params=wanted)
        with pytest.raises(expected, match=code):
            store.obtain("ann")
    assert not store.folder.exists(), "no half-made key"


def test_nothing_of_a_key_stands_in_what_is_encrypted_under_it() -> None:
    """Its id does, to tell keys apart; it is derived, and no part of the key."""
    secret = os.urandom(KEY_BYTES)
    one, other = SubjectKey("ann", secret), SubjectKey("ann", secret[:-1] + bytes([secret[-1] ^ 1]))
    assert one.id != other.id
    box = one.encrypt(b"hello", PLACE)
    for part in (secret, one.leaf):
        assert not any(part[at : at + 4] in box for at in range(len(part) - 3))


def test_a_destroyed_key_is_overwritten_wherever_the_folder_kept_it(store: KeyFiles, tmp_path: Path) -> None:
    """Its file, and what a process left that died while it made one; a second name of the same file shows what was in
    the place."""
    store.obtain("ann")
    (store.folder / "ann.key.0123456789abcdef.new").write_bytes(os.urandom(KEY_BYTES))
    for number, path in enumerate(sorted(store.folder.iterdir())):
        os.link(path, tmp_path / f"kept{number}")
    store.destroy("ann", "asked")
    assert [path.name for path in store.folder.iterdir()] == ["ann.erased"]
    assert [(tmp_path / f"kept{number}").read_bytes() for number in range(2)] == [bytes(KEY_BYTES)] * 2


def test_a_subject_key_shows_nothing_of_itself() -> None:
    secret = os.urandom(KEY_BYTES)
    shown = repr(SubjectKey("ann", secret))
    assert shown == "SubjectKey('ann')"
