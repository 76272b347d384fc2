"""`odradek audit` on a real log and a real store: what it says, and its exit codes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.structs import TopicPartition
from support.cli import Answer, Cli
from support.sampled_session import POLICIES, Sampled

from odradek.actors.policy.model import Policy
from odradek.actors.trainer.checkpoint import Checkpoints, TrainerState
from odradek.actors.trainer.manifest import Origin, Place
from odradek.kernels.numerics import numerics_id
from odradek.streams import topics
from odradek.streams.admin import ensure_topics
from odradek.streams.audit import chain
from odradek.streams.audit.keys import SigningKey, load_or_make_key
from odradek.streams.audit.notary import Notary
from odradek.streams.audit.settings import AuditSettings
from odradek.streams.audit.vault import Vault
from odradek.streams.blobs import S3Config, S3Store
from odradek.streams.codec import f32, read_f32
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Event
from odradek.streams.events.sessions import TurnSampled
from odradek.streams.events.weights import VersionPublished
from odradek.streams.log import EventLog

pytestmark = pytest.mark.contract

BUCKET = f"audit-cli-{uuid.uuid4().hex[:8]}"
LATE = "late"
"""A session that came after the last round."""


@dataclass
class World:
    kafka: KafkaConfig
    s3: S3Config
    key: SigningKey
    settings: tuple[str, ...]


@pytest.fixture(scope="module")
def world(kafka_bootstrap: str, s3_config: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("audit")
    kafka = KafkaConfig(bootstrap=kafka_bootstrap, prefix=f"t{uuid.uuid4().hex[:10]}")
    credentials = folder / "credentials.json"
    credentials.write_bytes(msgspec.json.encode({name: s3_config[name] for name in ("access_key", "secret_key")}))
    values = {
        "kafka.bootstrap": kafka_bootstrap,
        "kafka.prefix": kafka.prefix,
        "s3.endpoint": s3_config["endpoint"],
        "s3.bucket": s3_config["bucket"],
        "s3.credentials_file": credentials,
        "audit.bucket": BUCKET,
        "data.dir": folder,
    }
    settings = AuditSettings(name=kafka.prefix, interval_records=4, lock_days=1)
    world = World(
        kafka,
        S3Config(**s3_config),
        load_or_make_key(folder / "audit" / "notary.key"),
        tuple(part for name, value in values.items() for part in ("--set", f"{name}={value}")),
    )

    async def write() -> None:
        await ensure_topics(kafka)
        async with EventLog(kafka) as log:
            await publish(log, world.s3, POLICIES)
            await sampled(log, "true")
            await sampled(log, "false", wrong=True)
            vault = Vault(msgspec.structs.replace(world.s3, bucket=BUCKET), settings)
            assert await Notary(log, vault, world.key, settings).once() == 8
            await sampled(log, LATE)

    asyncio.run(write())
    yield world


async def publish(log: EventLog, s3: S3Config, policies: Mapping[int, Policy], restored: int | None = None) -> None:
    """Versions of the policy, as a trainer does, or a restore at one of them."""
    store = S3Store(s3)
    checkpoints = Checkpoints(store, Place(uuid.uuid4().hex[:8], "p", "main-0"))
    for version, policy in policies.items():
        state = TrainerState.begin(policy, seed=0)
        state.version = version
        published = await checkpoints.publish(state, Origin(parent=None), numerics_id())
        body = VersionPublished(
            policy="p",
            version=version,
            manifest_key=published.key,
            manifest_sha256=published.sha256,
            restored=version == restored,
        )
        await log.append(topics.WEIGHTS.name, "p", Event.of(body, id=f"version-{published.key}", source="test"))
    store.close()


async def sampled(log: EventLog, name: str, *, wrong: bool = False) -> None:
    """A session of two turns over a reload; `wrong` gives one log-prob another last bit."""
    session = Sampled()
    session.turn([5, 6, 7], 6)
    session.turn([8], 6, reload_after=2)
    epoch = -1
    for _, identifier, meta, body in session.records:
        if wrong and isinstance(body, TurnSampled) and body.turn == 1:
            values = read_f32(body.logprobs)
            values[3] = float(values[3] * (1 + 2**-20))
            body = msgspec.structs.replace(body, logprobs=f32(values))
        if epoch >= 0:
            meta = msgspec.structs.replace(meta, epoch=epoch)
        event = Event.of(body, id=f"{name}-{identifier}", source="test", meta=meta)
        ref = await log.append(topics.SESSIONS.name, name, event)
        epoch = ref.offset if epoch < 0 else epoch


class Audit:
    """`odradek audit` against the world."""

    def __init__(self, cli: Cli, world: World) -> None:
        self._cli = cli
        self._settings = world.settings

    def __call__(self, *arguments: object, change: dict[str, str] | None = None) -> Answer:
        changed = [part for name, value in (change or {}).items() for part in ("--set", f"{name}={value}")]
        return self._cli("audit", *arguments, *self._settings, *changed)


@pytest.fixture
def audit(capsys: pytest.CaptureFixture[str], world: World) -> Audit:
    return Audit(Cli(capsys), world)


def test_an_untouched_log_verifies_and_what_came_later_is_not_called_ok(audit: Audit, world: World) -> None:
    answer = audit("verify")
    assert answer.code == 0
    assert answer.out == f"8 records verified in 1 rounds, 3 not yet anchored; signed by {world.key.public[:16]}\n"
    found = audit("verify", "--json").json
    assert (found["ok"], found["verified"], found["not_anchored"], found["findings"]) == (True, 8, 3, [])
    assert found["keys"] == [world.key.public] and found["locked"] is True
    only = audit("verify", "--topic", "weights.v1", "--json").json
    assert (only["verified"], only["not_anchored"]) == (2, 0)


def test_a_deployment_without_anchors_is_no_success(audit: Audit) -> None:
    answer = audit("verify", change={"audit.name": "another"})
    assert (answer.code, answer.out) == (1, "nothing is anchored, 11 records: does a notary run?\n")


def test_another_key_than_the_one_asked_for_is_found(audit: Audit) -> None:
    answer = audit("verify", "--key", "ab" * 32)
    assert answer.code == 1 and "is signed by no known key" in answer.out


def test_an_event_is_proved_to_whoever_has_the_script_and_the_key(audit: Audit, world: World, tmp_path: Path) -> None:
    answer = audit("prove", "true-e1")
    assert answer.code == 0
    (tmp_path / "proof.json").write_text(answer.out)
    script = Path(chain.__file__).with_name("check_proof.py")
    checked = subprocess.run(
        [sys.executable, "-I", script, tmp_path / "proof.json", world.key.public],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    place = f"sessions.v1/{topics.SESSIONS.partition_of('true')}@1"
    assert checked.stdout == f"{place} was anchored in round 0\n"
    assert audit("prove", "true-e1", "--topic", "sessions.v1", "--log-only", "--json").json == answer.json


def test_what_cannot_be_proved_says_why(audit: Audit) -> None:
    late = audit("prove", f"{LATE}-e1")
    assert late.code == 1 and "is not anchored yet" in late.err
    unknown = audit("prove", "nobody")
    assert unknown.code == 2 and "no event with ce_id 'nobody' on any audited topic" in unknown.err


def test_a_session_is_computed_again_under_the_weights_that_it_names(audit: Audit) -> None:
    answer = audit("resample", "true")
    assert answer.code == 0
    assert answer.out.splitlines() == [
        "  turn 0: 6 tokens under version 1: equal",
        "  turn 1: 6 tokens under version 1,2: equal",
        "session true: equal, 12 tokens and their log-probs bit for bit",
    ]
    wrong = audit("resample", "false", "--json")
    assert wrong.code == 1
    assert (wrong.json["first"]["turn"], wrong.json["first"]["index"], wrong.json["compared"]) == (1, 3, 12)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("verify", "--topic", "nothing.v1"), "is not declared"),
        (("verify", "--topic", "replicas.v1"), "compacted topics and the anchors themselves are not chained"),
        (("verify", "--key", "abc"), "expected the 64 hex digits"),
        (("verify", "--log-only", "--set", "audit.key_file=/nowhere/key"), "no key to check signatures with"),
        (("resample", "nobody"), "nobody"),
    ],
)
def test_wrong_usage_is_exit_code_2_in_one_line(audit: Audit, arguments: tuple[str, ...], said: str) -> None:
    at = arguments.index("--set") if "--set" in arguments else len(arguments)
    change = dict(part.split("=") for part in arguments[at + 1 :])
    answer = audit(*arguments[:at], change=change)
    assert answer.code == 2 and said in answer.err and len(answer.err.splitlines()) == 1


@pytest.mark.parametrize("what", ["kafka.bootstrap=127.0.0.1:9", "s3.endpoint=http://127.0.0.1:9"])
def test_a_service_that_does_not_answer_is_exit_code_3(audit: Audit, what: str) -> None:
    name, value = what.split("=")
    answer = audit("verify", change={name: value, "kafka.connect_timeout_s": "2"})
    assert answer.code == 3
    assert "127.0.0.1:9" in answer.err.splitlines()[-1]


def test_the_log_alone_is_verified_while_the_store_is_down(audit: Audit) -> None:
    answer = audit("verify", "--log-only", "--json", change={"s3.endpoint": "http://127.0.0.1:9"})
    assert (answer.code, answer.json["verified"]) == (0, 8)


def test_a_session_is_computed_under_the_weights_of_its_own_history(audit: Audit, world: World) -> None:
    """Last but one in the module. After a restore version 2 is another one; the session was sampled before."""

    async def restored() -> None:
        async with EventLog(world.kafka) as log:
            await publish(log, world.s3, {1: POLICIES[1], 2: POLICIES[1]}, restored=1)

    asyncio.run(restored())
    assert audit("resample", "true").code == 0
    wrong = audit("resample", "false", "--json")
    assert wrong.code == 1 and wrong.json["first"]["index"] == 3


def test_tampering_is_exit_code_1_and_names_partition_and_offset(audit: Audit, world: World) -> None:
    """Last in the module: it really removes a record."""

    async def cut() -> None:
        admin = AIOKafkaAdminClient(**world.kafka.client_options())
        await admin.start()
        try:
            await admin.delete_records({TopicPartition(world.kafka.name("weights.v1"), 0): RecordsToDelete(1)})
        finally:
            await admin.close()

    asyncio.run(cut())
    answer = audit("verify")
    assert answer.code == 1
    first, totals = answer.out.splitlines()
    assert first == "weights.v1/0@0: dropped: a record was here; the next one is at 1"
    assert totals.startswith("1 of ") and "partitions are not as they were signed; 6 records verified" in totals
