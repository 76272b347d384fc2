"""The shapes of secrets that are known by their look alone: a table of patterns, mostly detect-secrets'.

Each shape names the plain substrings of which at least one stands in every match ("triggers"): searching for those is
a thousand times faster than the pattern, so text without secrets costs microseconds and detect-secrets, whose import
takes a fifth of a second, is loaded only once something looks suspicious.

`group` is the part to hide. detect-secrets' own `analyze_string` is not used: for patterns with an inner group it
reports that group (for a GitHub token its prefix), and hiding only this would leave the token readable.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module

import msgspec


class Shape(msgspec.Struct, frozen=True):
    """One kind of secret. `source` is `module:Class` below detect_secrets.plugins, or a pattern of our own."""

    kind: str
    triggers: tuple[str, ...]
    source: str
    group: int = 0
    only: int | None = None
    """Index of the one pattern of the plug-in that `group` is meant for; None means all of them."""


_GITLAB = (
    "glpat-",
    "gldt-",
    "glft-",
    "glsoat-",
    "glrt-",
    "glcbt-",
    "glimt-",
    "glptt-",
    "glagent-",
    "gloas-",
    "GR1348941",
)

_NETRC_NAME = r"[ \t]+(?!(?:and|or)\b)\S{1,200}"  # "login and password" is prose
_LIBPQ = "(?:host|hostaddr|port|dbname|user|sslmode|connect_timeout|application_name)"

SHAPES = (
    Shape("AWS_ACCESS_KEY", ("A3T", "ABIA", "ACCA", "AKIA", "ASIA"), "aws:AWSKeyDetector", only=0),
    Shape("AWS_SECRET_KEY", ("aws", "AWS"), "aws:AWSKeyDetector", group=1, only=1),
    Shape(  # unquoted, as in ~/.aws/credentials; a random one may look like a path
        "AWS_SECRET_KEY",
        ("ecret_access_key", "ECRET_ACCESS_KEY", "ecretAccessKey"),
        r"(?i:secret_?access_?key)[\"']?[ \t]*(?:=>|=|:)[ \t]*[\"']?([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])",
        group=1,
    ),
    Shape("AZURE_STORAGE_KEY", ("AccountKey=",), r"AccountKey=([a-zA-Z0-9+/=]{88})", group=1),
    Shape(
        "URL_PASSWORD", ("://",), r"://[^:/?#\[\]@{}<>\s\"']*:([^:/?#\[\]@{}<>\s\"'$%][^:/?#\[\]@{}<>\s\"']*)@", group=1
    ),
    Shape("DISCORD_TOKEN", (".",), r"[MNO](?<![\w-][MNO])[a-zA-Z\d_-]{23,25}\.[a-zA-Z\d_-]{6}\.[a-zA-Z\d_-]{27,38}\b"),
    Shape("GITHUB_TOKEN", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), "github_token:GitHubTokenDetector"),
    Shape("GITHUB_TOKEN", ("github_pat_",), r"\bgithub_pat_[A-Za-z0-9_]{40,}"),
    Shape("DOCKER_TOKEN", ("dckr_",), r"\bdckr_(?:pat|oat)_[A-Za-z0-9_-]{20,}"),
    Shape("GITLAB_TOKEN", _GITLAB, "gitlab_token:GitLabTokenDetector"),
    Shape("GOOGLE_API_KEY", ("AIza",), r"\bAIza[0-9A-Za-z_-]{35}"),
    Shape("GOOGLE_TOKEN", ("ya29.",), r"\bya29\.[0-9A-Za-z_-]{20,}"),
    Shape("HUGGING_FACE_TOKEN", ("hf_",), r"\bhf_[A-Za-z0-9]{30,}"),
    Shape("MODEL_API_KEY", ("sk-",), r"\bsk-(?:[a-z]{1,20}[0-9]{0,4}-){0,4}[A-Za-z0-9_]{20,}[A-Za-z0-9_-]*"),
    Shape("NPM_TOKEN", ("_authToken=",), r"_authToken=[ \t]*([^\s\"'$\[]{8,})", group=1),
    Shape("NPM_TOKEN", ("npm_",), r"\bnpm_[A-Za-z0-9]{36}\b"),
    Shape("PYPI_TOKEN", ("pypi-",), "pypi_token:PypiTokenDetector"),
    Shape("SENDGRID_KEY", ("SG.",), "sendgrid:SendGridDetector"),
    Shape("SLACK_TOKEN", ("xox", "XOX", "hooks.slack.com"), "slack:SlackDetector"),
    Shape("SLACK_TOKEN", ("xapp-",), r"\bxapp-\d-[A-Z0-9]+-\d+-[a-z0-9]+"),
    Shape("SQUARE_TOKEN", ("sq0csp-",), "square_oauth:SquareOAuthDetector"),
    Shape("STRIPE_KEY", ("k_live_",), "stripe:StripeDetector"),
    Shape("TELEGRAM_TOKEN", (":AA",), r"\b\d{8,10}:AA[0-9A-Za-z_-]{33}\b"),
    Shape("TWILIO_KEY", ("AC", "SK"), r"\b(?:AC|SK)[a-f0-9]{32}\b"),
    Shape("JWT", ("eyJ",), r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"),
    Shape("BEARER_TOKEN", ("earer ",), r"\b[Bb]earer +([A-Za-z0-9._~+/-]{20,}=*)", group=1),
    Shape("AGE_KEY", ("AGE-SECRET-KEY-1",), r"AGE-SECRET-KEY-1[0-9A-Z]{40,}"),
    Shape(
        "PRIVATE_KEY", ("Private-Lines:",), r"Private-Lines: \d+\r?\n((?:[A-Za-z0-9+/=]+\r?(?:\n|$))+)", group=1
    ),  # PuTTY
    Shape(  # "auth": "required" is a word
        "DOCKER_AUTH",
        ('"auth"', '"identitytoken"', '"registrytoken"'),
        r"\"(?:auth(?!\"[ \t]*:[ \t]*\"[a-z]+\")|(?:identity|registry)token)\"[ \t]*:[ \t]*"
        r"\"([A-Za-z0-9+/._-]{8,}=*)\"",
        group=1,
    ),
    Shape(  # a query's or a form's field; a value that is a template or code begins otherwise
        "PASSWORD",
        ("assword=", "asswd=", "wd=", "ecret=", "oken=", "key="),
        r"[?&](?i:password|passwd|pwd|(?:access_|refresh_|id_)?token|(?:client_)?secret|api_?key)="
        r"([^&\s\"'`<>;#{}()$%\[\]]{3,})",
        group=1,
    ),
    Shape(  # a form or a connection string that begins with it: another field follows
        "PASSWORD",
        ("assword=", "asswd=", "wd="),
        r"(?<![A-Za-z0-9_.-])(?i:password|passwd|pwd)=([^&;\s\"'`<>{}()$%\[\]]{3,})(?=[&;][A-Za-z][\w ]{0,40}=)",
        group=1,
    ),
    Shape(  # ADO, ODBC, JDBC: Server=db;Password=…
        "PASSWORD", ("assword=", "wd="), r";[ \t]*(?i:password|pwd)=([^;\s\"'`{}$<>()]{3,})", group=1
    ),
    Shape(  # libpq: host=db password=…; a call has commas
        "PASSWORD",
        ("password=",),
        rf"(?<![\w.,(]){_LIBPQ}=[^\s,;()]{{1,100}}[ \t]+password='?([^\s\"'`$<>(){{}},;]{{3,}})",
        group=1,
    ),
    Shape("PASSWORD", ("password=",), rf"\bpassword='?([^\s\"'`$<>(){{}},;]{{3,}})'?(?=[ \t]+{_LIBPQ}=)", group=1),
    Shape(  # scott/tiger@
        "PASSWORD",
        ("jdbc:oracle:", "sqlplus "),
        r"(?:jdbc:oracle:\w{1,9}:|\bsqlplus (?:-\w{1,9} ){0,4})[\"']?\w{1,64}/([^\s@/\"'$]{3,})@",
        group=1,
    ),
    Shape(  # .netrc
        "PASSWORD",
        ("machine", "default", "login", "account"),
        rf"(?m)(?:\bmachine{_NETRC_NAME}|^[ \t+-]*default|^[ \t+-]*(?:login|account){_NETRC_NAME})"
        rf"(?:\s{{1,9}}(?:login|account){_NETRC_NAME}){{0,2}}\s{{1,9}}password[ \t]+(\S{{2,}})",
        group=1,
    ),
    Shape(  # .pgpass, at the ports of PostgreSQL and PgBouncer: a linter's line looks the same at another number
        "PASSWORD",
        (":543", ":6432:", ":*:"),
        r"(?m)^[\w.*-]{1,255}:(?:543\d|6432|\*):[^:\s]{1,64}:[^:\s]{1,64}:((?:[^:\s\\]|\\.){3,})$",
        group=1,
    ),
    Shape(
        "PASSWORD",
        ("curl ",),
        r"\bcurl (?:[^\n]|(?<=\\)\n){0,200}?(?<=[ \t])(?:-[A-Za-z]{0,5}[uU]|--(?:proxy-)?user)"
        r"[= \t]*[\"']?[^\s:\"']{1,64}:([^\s\"'$][^\s\"']{2,})",
        group=1,
    ),
    Shape(
        "PASSWORD",
        ("sshpass ", "redis-cli "),
        r"\b(?:sshpass (?:-\w{1,9} ){0,4}-p|redis-cli [^\n]{0,200}?(?<=[ \t])-a)[ \t]*[\"']?([^\s\"'$-][^\s\"']{2,})",
        group=1,
    ),
    Shape(
        "PASSWORD",
        ("mysql", "mariadb"),
        r"\b(?:mysql|mariadb)(?:dump|admin)? [^\n]{0,200}?(?<=[ \t])-p([^\s\"'$-][^\s\"']{2,})",
        group=1,
    ),
    Shape(  # --password=…; after a blank it may be prose, or the name of a value in a help text
        "PASSWORD",
        ("--pass", "--token", "--secret", "--api-key"),
        r"--(?:password|passwd|passphrase|pass|token|secret|api-key)"
        r"(?:=[\"']?(?![A-Z_]+\b)|[ \t]+[\"']?(?=[^\s\"'0-9]{0,64}[0-9]))"
        r"([^\s\"'`$<>{}()\[\],-][^\s\"'`<>{}()\[\],]{3,})",
        group=1,
    ),
    Shape(
        "BASIC_AUTH", ("Basic ", "basic "), r"\b[Aa]uthorization[\"']?: *[\"']?[Bb]asic +([A-Za-z0-9+/]{8,}=*)", group=1
    ),
)


@lru_cache(maxsize=len(SHAPES))
def _patterns(shape: Shape) -> tuple[re.Pattern[str], ...]:
    module, separator, name = shape.source.partition(":")
    if not (separator and module.isidentifier() and name.isidentifier()):
        return (re.compile(shape.source),)
    plugin = getattr(import_module(f"detect_secrets.plugins.{module}"), name)
    patterns: tuple[re.Pattern[str], ...] = tuple(plugin.denylist)
    return patterns if shape.only is None else (patterns[shape.only],)


def find_shapes(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and kind of everything in `text` that has the look of a known secret."""
    for shape in SHAPES:
        if any(trigger in text for trigger in shape.triggers):
            for pattern in _patterns(shape):
                for match in pattern.finditer(text):
                    yield match.start(shape.group), match.end(shape.group), shape.kind
