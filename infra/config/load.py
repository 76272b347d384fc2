"""From file, environment and flags to one `Config` in which every value knows where it came from.

Later wins: built-in default < `odradek.toml` < `ODRADEK_SECTION__KEY` < `--set section.key=value`. A key that does not
exist is an error that names the key, where it stands, and what was probably meant: the likely spelling, or the section
that does have it. Nothing is ever ignored, because a mistyped setting that silently keeps its default costs hours.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import os
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.inspect import Field, StructType, UnionType, type_info
from msgspec.inspect import Metadata as AnnotatedType

from odradek.infra.config.tree import Config
from odradek.infra.errors import UsageError

DEFAULT_FILE = "odradek.toml"
"""Read from the current folder if it is there."""

ENVIRONMENT_PREFIX = "ODRADEK_"

DATA_VARIABLE = "ODRADEK_DATA"
"""Short form of ODRADEK_DATA__DIR."""

FILE_VARIABLE = "ODRADEK_CONFIG"
"""Path of the file to read instead of ./odradek.toml."""

NOTHING = ("none", "")
"""What stands for no value in environment and flags."""

MASK = "•••"
"""What is shown in place of a secret."""

NEAR_ELSEWHERE = 0.75
"""Likeness from which a key of another section is suggested. Too low suggests what only shares letters."""


class ConfigError(UsageError):
    """A setting that can't be obeyed; nothing was started."""


class Setting(msgspec.Struct, frozen=True):
    """One effective value with its origin: `default`, `FILE`, `environment NAME` or `--set`."""

    key: str
    value: object
    origin: str
    secret: bool
    meaning: str


class Loaded(msgspec.Struct, frozen=True):
    """The configuration, and for each key where its value came from."""

    config: Config
    origins: dict[str, str]

    def settings(self) -> list[Setting]:
        """Every effective value in the tree's order; secrets masked."""
        shown = []
        for section, fields in SECTIONS.items():
            meanings = field_meanings(type(getattr(self.config, section)))
            for key, field in fields.items():
                value = getattr(getattr(self.config, section), key)
                secret = _is_secret(field)
                name = f"{section}.{key}"
                masked = MASK if secret and value is not None else value
                shown.append(Setting(name, masked, self.origins.get(name, "default"), secret, meanings.get(key, "")))
        return shown


def field_meanings(struct: type) -> dict[str, str]:
    """The docstring under each field of a struct, as its source has it; a field without one is missing here."""
    body = ast.parse(textwrap.dedent(inspect.getsource(struct))).body[0]
    assert isinstance(body, ast.ClassDef)
    meanings = {}
    for statement, following in itertools.pairwise(body.body):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            meanings[statement.target.id] = " ".join(str(following.value.value).split())
    return meanings


def _sections() -> dict[str, dict[str, Field]]:
    whole = type_info(Config)
    assert isinstance(whole, StructType)
    found = {}
    for section in whole.fields:
        assert isinstance(section.type, StructType)
        found[section.name] = {field.name: field for field in section.type.fields}
    return found


SECTIONS = _sections()
"""Every section with its fields."""


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    data: Path | None = None,
) -> Loaded:
    """The effective configuration. `flags` are `section.key=value`; `data` is `--data` and wins over all.

    `file` None reads $ODRADEK_CONFIG, else ./odradek.toml if there is one. Raises `ConfigError`.
    """
    variables = os.environ if environment is None else environment
    values: dict[str, dict[str, object]] = {}
    origins: dict[str, str] = {}
    for section, key, value, origin in (
        *_from_file(_file_to_read(file, variables)),
        *_from_environment(variables),
        *_from_flags(flags),
        *([("data", "dir", str(data), "--data")] if data else []),
    ):
        value = _checked(section, key, value, origin)
        values.setdefault(section, {})[key] = value
        origins[f"{section}.{key}"] = origin
    config = msgspec.convert(values, Config, strict=False)
    _check_together(config, origins)
    return Loaded(config, origins)


_Item = tuple[str, str, object, str]


def _file_to_read(file: Path | None, variables: Mapping[str, str]) -> Path | None:
    named = file or (Path(variables[FILE_VARIABLE]) if variables.get(FILE_VARIABLE) else None)
    if named is not None:
        if not named.is_file():
            raise ConfigError(f"configuration file {named} does not exist")
        return named
    default = Path(DEFAULT_FILE)
    return default if default.is_file() else None


def _from_file(file: Path | None) -> Iterable[_Item]:
    if file is None:
        return
    try:
        content = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    for section, fields in content.items():
        if not isinstance(fields, dict):
            raise ConfigError(f"{file}: {section!r} stands outside of any section; {_hint_section_of(section)}")
        for key, value in fields.items():
            yield section, key, value, str(file)


def _from_environment(variables: Mapping[str, str]) -> Iterable[_Item]:
    if variables.get(DATA_VARIABLE):
        yield "data", "dir", variables[DATA_VARIABLE], f"environment {DATA_VARIABLE}"
    for name, text in variables.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        rest = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        section, separator, key = rest.partition("__")
        if separator:
            yield section, key, text, f"environment {name}"
        else:
            _refuse_single_underscore(name, rest)


def _refuse_single_underscore(name: str, rest: str) -> None:
    """`ODRADEK_KAFKA_BOOTSTRAP` would be ignored: say how it is spelled. Other ODRADEK_ names are not settings."""
    section, _, key = rest.partition("_")
    if key and key in SECTIONS.get(section, {}):
        meant = f"{ENVIRONMENT_PREFIX}{section.upper()}__{key.upper()}"
        raise ConfigError(f"environment {name} is not a setting; did you mean {meant}?")


def _from_flags(flags: Sequence[str]) -> Iterable[_Item]:
    for flag in flags:
        name, separator, text = flag.partition("=")
        section, dot, key = name.partition(".")
        if not (separator and dot):
            raise ConfigError(f"--set {flag}: expected section.key=value")
        yield section, key, text, f"--set {name}"


def _checked(section: str, key: str, value: object, origin: str) -> object:
    """The value as the tree takes it. The key must exist and the value fit; each problem is told with its origin."""
    if section not in SECTIONS:
        raise ConfigError(f"{origin}: there is no section [{section}]; {_hint_section(section, key)}")
    if key not in SECTIONS[section]:
        raise ConfigError(f"{origin}: there is no key {key!r} in [{section}]; {_hint_key(section, key)}")
    strict = not origin.startswith(("environment", "--"))
    if not strict and str(value).lower() in NOTHING and _may_be_none(SECTIONS[section][key]):
        return None
    try:
        msgspec.convert({section: {key: value}}, Config, strict=strict)
    except msgspec.ValidationError as error:
        shown = MASK if _is_secret(SECTIONS[section][key]) else repr(value)
        form = _extra(SECTIONS[section][key], "form")
        reason = f"expected {form}" if form and "regex" in str(error) else str(error).partition(" - at ")[0]
        raise ConfigError(f"{origin}: {section}.{key} = {shown}: {reason[:1].lower()}{reason[1:]}") from error
    return value


def _hint_section(section: str, key: str) -> str:
    close = difflib.get_close_matches(section, SECTIONS, n=1)
    if close:
        return f"did you mean [{close[0]}]?"
    return _hint_section_of(key)


def _hint_section_of(key: str) -> str:
    owners = [name for name, fields in SECTIONS.items() if _plain(key) in fields]
    if owners:
        return f"{_plain(key)!r} belongs to {_listed(owners)}"
    return f"the sections are {_listed(list(SECTIONS))}"


def _hint_key(section: str, key: str) -> str:
    plain = _plain(key)
    if plain in SECTIONS[section]:
        return f"did you mean {plain!r}?"
    owners = [name for name, fields in SECTIONS.items() if plain in fields]
    if owners:
        return f"{plain!r} belongs to {_listed(owners)}"
    close = difflib.get_close_matches(plain, SECTIONS[section], n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    everywhere = {f"{name}.{field}": field for name, fields in SECTIONS.items() for field in fields}
    near = difflib.get_close_matches(plain, everywhere.values(), n=1, cutoff=NEAR_ELSEWHERE)
    if near:
        return f"did you mean {next(full for full, field in everywhere.items() if field == near[0])!r}?"
    return f"its keys are {', '.join(SECTIONS[section])}"


def _plain(key: str) -> str:
    return key.strip().lower().replace("-", "_")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"[{name}]" for name in names)


def _may_be_none(field: Field) -> bool:
    return isinstance(field.type, UnionType) and field.type.includes_none


def _is_secret(field: Field) -> bool:
    return bool(_extra(field, "secret"))


def _extra(field: Field, name: str) -> object:
    """What the field's type says of itself beside what msgspec checks."""
    kinds = field.type.types if isinstance(field.type, UnionType) else (field.type,)
    said = ((kind.extra or {}).get(name) for kind in kinds if isinstance(kind, AnnotatedType))
    return next((value for value in said if value), None)


def _check_together(config: Config, origins: Mapping[str, str]) -> None:
    """What one value alone can't break. Raises `ConfigError`."""
    if config.lane.attempts > config.session.max_in_flight:
        said = [
            f"{name} = {value} ({origins.get(name, 'default')})"
            for name, value in (
                ("lane.attempts", config.lane.attempts),
                ("session.max_in_flight", config.session.max_in_flight),
            )
        ]
        raise ConfigError(f"{said[0]} is more than {said[1]}: a group opens whole, so none ever would; change one")
