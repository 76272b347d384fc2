"""The configuration: precedence, origins, and every way of getting a key wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from odradek.infra.config.load import MASK, SECTIONS, ConfigError, field_meanings, load
from odradek.infra.config.tree import Config


def _file(folder: Path, text: str) -> Path:
    path = folder / "odradek.toml"
    path.write_text(text)
    return path


def _refusal(**given: object) -> str:
    with pytest.raises(ConfigError) as refused:
        load(**{"environment": {}, **given})  # type: ignore[arg-type]
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_later_layers_win_and_each_value_knows_its_origin(tmp_path: Path) -> None:
    """default < file < environment < flags; `config show` must tell a person which of them it was."""
    file = _file(tmp_path, "[demo]\nseed = 1\nminutes = 1\nunseen_templates = 1\n")
    loaded = load(
        file=file,
        environment={"ODRADEK_DEMO__MINUTES": "2", "ODRADEK_DEMO__UNSEEN_TEMPLATES": "2"},
        flags=["demo.unseen_templates=3"],
    )
    demo = loaded.config.demo
    assert (demo.seed, demo.minutes, demo.unseen_templates, demo.new_combinations) == (1, 2.0, 3, 120)
    origins = {setting.key: setting.origin for setting in loaded.settings()}
    assert origins["demo.seed"] == str(file)
    assert origins["demo.minutes"] == "environment ODRADEK_DEMO__MINUTES"
    assert origins["demo.unseen_templates"] == "--set demo.unseen_templates"
    assert origins["demo.new_combinations"] == "default"


def test_the_data_folder_has_short_forms() -> None:
    """`--data` beats ODRADEK_DATA, which beats the default."""
    assert load(environment={"ODRADEK_DATA": "/a"}).config.data.dir == "/a"
    assert load(environment={"ODRADEK_DATA": "/a"}, data=Path("/b")).config.data.dir == "/b"


def test_case_unsloth_10452_a_key_with_a_hyphen_is_refused_with_its_spelling(tmp_path: Path) -> None:
    """unslothai/unsloth PR 10452: unknown keys were ignored and the defaults trained for hours."""
    message = _refusal(file=_file(tmp_path, "[trainer]\nlearning-rate = 1e-3\n"))
    assert "odradek.toml" in message
    assert "'learning-rate' in [trainer]; did you mean 'learning_rate'?" in message


def test_case_unsloth_10452_a_key_in_the_wrong_section_is_refused_with_the_right_one(tmp_path: Path) -> None:
    """unslothai/unsloth PR 10452, second row: the key exists, but elsewhere."""
    message = _refusal(file=_file(tmp_path, "[demo]\nlearning_rate = 1e-3\n"))
    assert "no key 'learning_rate' in [demo]; 'learning_rate' belongs to [trainer]" in message


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("kafka.bootstrp=x", "did you mean 'bootstrap'?"),
        ("kafka.learning_rat=x", "did you mean 'trainer.learning_rate'?"),
        ("kafca.bootstrap=x", "no section [kafca]; did you mean [kafka]?"),
        ("zzz.bootstrap=x", "'bootstrap' belongs to [kafka]"),
        ("zzz.wombat=x", "the sections are [data], [kafka]"),
        ("trainer.wombat=x", "its keys are learning_rate, minibatches"),
        ("session.hosts=abc", "no key 'hosts' in [session]; its keys are "),
        ("trainer", "expected section.key=value"),
        ("trainer=3", "expected section.key=value"),
    ],
)
def test_an_unknown_flag_is_refused_with_a_suggestion(flag: str, expected: str) -> None:
    """Whatever is wrong with a key, the message says what was probably meant."""
    message = _refusal(flags=[flag])
    assert message.startswith("--set ")
    assert expected in message


def test_a_single_underscore_in_the_environment_is_refused() -> None:
    """ODRADEK_KAFKA_BOOTSTRAP looks right and would do nothing."""
    message = _refusal(environment={"ODRADEK_KAFKA_BOOTSTRAP": "x"})
    assert "did you mean ODRADEK_KAFKA__BOOTSTRAP?" in message


def test_other_variables_of_ours_are_left_alone() -> None:
    """Test and process variables share the prefix and are no settings."""
    assert load(environment={"ODRADEK_TEST_KAFKA": "x", "ODRADEK_STACK_MARK": "y", "HOME": "/"}).config == Config()


def test_an_unknown_environment_key_is_refused() -> None:
    """The environment is checked like a file."""
    assert "environment ODRADEK_DEMO__SEEDS" in _refusal(environment={"ODRADEK_DEMO__SEEDS": "3"})


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("demo.minutes=abc", "demo.minutes = 'abc': expected `float`"),
        ("demo.minutes=-1", "demo.minutes = '-1': expected `float` > 0.0"),
        ("lane.attempts=1", "expected `int` >= 2"),
        ("kafka.security_protocol=TLS", "kafka.security_protocol = 'TLS': invalid enum value"),
        ("telemetry.prometheus_port=70000", "expected `int` <= 65535"),
        ("demo.seed=none", "demo.seed = 'none': expected `int`"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(flag: str, expected: str) -> None:
    """Type and range belong to the tree; the message shows key, value and what was expected."""
    assert expected in _refusal(flags=[flag])


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("s3.endpoint=foo", "http(s)://host[:port], or aws"),
        ("s3.endpoint=http://", "http(s)://host[:port], or aws"),
        ("s3.endpoint=http://host:99999", "http(s)://host[:port], or aws"),
        ("kafka.bootstrap=foo", "host:port, several comma separated"),
        ("kafka.bootstrap=a:9092,b", "host:port, several comma separated"),
        ("kafka.bootstrap=http://a:9092", "host:port, several comma separated"),
        ("ray.address=foo", "host:port"),
        ("ray.address=ray://a:10001", "host:port"),
        ("ray.address=a:0", "host:port"),
        ("telemetry.otlp_endpoint=localhost:4318", "http(s)://host[:port][/path]"),
    ],
)
def test_an_address_of_another_form_is_refused_by_the_name_of_its_setting(flag: str, expected: str) -> None:
    """A client library would say "Invalid endpoint" in the middle of a start."""
    key, _, value = flag.partition("=")
    assert _refusal(flags=[flag]) == f"--set {key}: {key} = {value!r}: expected {expected}"


def test_addresses_as_people_write_them_are_taken() -> None:
    flags = {
        "kafka.bootstrap": "broker-1.example:9092,10.0.0.2:9092,[::1]:9092",
        "s3.endpoint": "https://s3.eu-west-1.example/base",
        "ray.address": "ray-head:6379",
        "telemetry.otlp_endpoint": "http://[::1]:4318",
    }
    config = load(environment={}, flags=[f"{key}={value}" for key, value in flags.items()]).config
    assert {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in flags} == flags
    assert load(environment={}, flags=["s3.endpoint=aws"]).config.s3.endpoint == "aws"


def test_a_group_that_could_never_open_whole_is_refused(tmp_path: Path) -> None:
    """Its task would wait for ever, and every task behind it."""
    message = _refusal(file=_file(tmp_path, "[session]\nmax_in_flight = 16\n"), flags=["lane.attempts=17"])
    assert message.startswith("lane.attempts = 17 (--set lane.attempts) is more than session.max_in_flight = 16 (")
    assert "\n" not in message
    assert load(environment={}, flags=["lane.attempts=16", "session.max_in_flight=16"]).config.lane.attempts == 16


def test_a_file_is_not_read_loosely(tmp_path: Path) -> None:
    """TOML has types: a number in quotes is a mistake there, while the environment has only text."""
    assert "expected `float`, got `str`" in _refusal(file=_file(tmp_path, '[demo]\nminutes = "3"\n'))


def test_none_switches_a_setting_off() -> None:
    """A flag can undo what a file set."""
    environment = {"ODRADEK_KAFKA__BOOTSTRAP": "host:1"}
    assert load(environment=environment, flags=["kafka.bootstrap=none"]).config.kafka.bootstrap is None
    assert load(environment={"ODRADEK_KAFKA__PREFIX": ""}).config.kafka.prefix == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed = 1\n", "'seed' stands outside of any section; 'seed' belongs to [demo]"),
        ("[demo\n", "Expected ']'"),
        ("[demo]\nseed = 1\nseed = 2\n", "Cannot overwrite a value"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    """Syntax errors keep their line; loose keys get their section."""
    assert expected in _refusal(file=_file(tmp_path, text))


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    """`--config typo.toml` must not run on defaults."""
    assert "does not exist" in _refusal(file=tmp_path / "typo.toml")
    assert "does not exist" in _refusal(environment={"ODRADEK_CONFIG": str(tmp_path / "typo.toml")})


def test_secrets_are_masked_and_never_in_errors() -> None:
    """What `config show` prints may be pasted into an issue."""
    loaded = load(environment={"ODRADEK_KAFKA__SASL_PASSWORD": "hunter2"})
    shown = {setting.key: setting.value for setting in loaded.settings()}
    assert shown["kafka.sasl_password"] == MASK
    assert loaded.config.kafka.sasl_password == "hunter2"
    assert "hunter2" not in repr(loaded.settings())


def test_every_field_is_documented_and_every_section_refuses_unknown_keys() -> None:
    """The rules that new fields must keep."""
    for name, fields in SECTIONS.items():
        struct = type(getattr(Config(), name))
        assert set(field_meanings(struct)) == set(fields), name
        assert struct.__struct_config__.frozen, name
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"no_such_key": 1}, struct)


@pytest.mark.parametrize(
    "flag",
    [
        "demo.minutes=inf",
        "demo.minutes=nan",
        "demo.minutes=-1",
        "demo.minutes=1e300",
        "lane.groups_per_batch=99999999999999999999",
        "lane.attempts=1",
        "lane.attempts=5000",
        "lane.policy=",
        "lane.policy=../../x",
        "lane.spread_component=",
        "kafka.prefix=a b/c",
        "kafka.prefix=../x",
        "kafka.connect_timeout_s=inf",
        "trainer.learning_rate=inf",
        "trainer.kl_coefficient=inf",
        "trainer.clip_low=inf",
        "session.max_in_flight=0",
    ],
)
def test_a_value_that_nothing_could_work_with_is_refused_before_anything_starts(flag: str) -> None:
    key = flag.partition("=")[0]
    assert f"--set {key}: {key} = " in _refusal(flags=[flag])
