"""Secrets are hidden before anyone sees them; words that only look like one are kept.

Every secret here is made up, and put together from parts so that no scanner of this repository takes it for real.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from odradek.actors.tools.capture import Capture, RedactedStream
from odradek.actors.tools.redact import redact
from odradek.actors.tools.secret_shapes import SHAPES

KEY_BODY = "MIIEpAIBAAKCAQEA0Z3VS5JJcds3xfnTsPPQ7dJkZL\nq2VtP0yQ9KXc3mBf8dLr5aHsJwEo1uNi6gTbRzCv4x\nAbCd\n"
BEGIN, END = "-----BEGIN RSA PRIVATE" + " KEY-----\n", "-----END RSA PRIVATE" + " KEY-----\n"

HIDDEN = {
    "AWS_ACCESS_KEY": "AKIA" + "IOSFODNN7EXAMPLE",
    "GITHUB_TOKEN": "ghp_" + "abcdefghijABCDEFGHIJ0123456789abcdef",
    "GITLAB_TOKEN": "glpat-" + "abcDEF123456abcDEF12",
    "GOOGLE_API_KEY": "AIza" + "SyA1234567890abcdefghijklmnopqrstuv",
    "GOOGLE_TOKEN": "ya29." + "a0AfH6SMBabcdefghijklmnopqrstuvwxyz0123456789",
    "DOCKER_TOKEN": "dckr_pat_" + "abcdefghijklmnopqrstuvwxyz0",
    "HUGGING_FACE_TOKEN": "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "JWT": "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0NTY3ODkwIn0" + ".dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "MODEL_API_KEY": "sk-" + "proj-abcdefghij0123456789ABCDEFGHIJ",
    "SENDGRID_KEY": "SG." + "a" * 22 + "." + "b" * 43,
    "SLACK_TOKEN": "xoxb-" + "123456789012-1234567890123-abcdefGHIJKLmnop",
    "STRIPE_KEY": "sk_live_" + "abcdefghijklmnopqrstuvwx",
    "TELEGRAM_TOKEN": "123456789:AA" + "F1234567890abcdefghijklmnopqrstuv",
    "DISCORD_TOKEN": "MTIzNDU2Nzg5MDEyMzQ1Njc4" + ".GabcDE." + "abcdefghijklmnopqrstuvwxyz12",
    "TWILIO_KEY": "AC" + "0123456789abcdef" * 2,
    "NPM_TOKEN": "npm_" + "a1b2c3" * 6,
    "PYPI_TOKEN": "pypi-AgEIcHlwaS5vcmc" + "a1" * 40,
    "SQUARE_TOKEN": "sq0csp-" + "a" * 43,
    "AGE_KEY": "AGE-SECRET-KEY-1" + "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L" * 2,
    "AZURE_STORAGE_KEY": "AccountKey=" + "aB3+" * 21 + "ab==",
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_known_shape_is_hidden_whole_wherever_it_stands(kind: str) -> None:
    secret = HIDDEN[kind]
    value = secret.removeprefix("AccountKey=")
    for text in (secret, f"x {secret} y", f'"{secret}"', f"NAME={secret}\n", f"a.py:3:key = '{secret}'"):
        shown = redact(text)
        assert value not in shown
        assert value[8:24] not in shown, "a part of it is still readable"
        assert "[redacted:" in shown
    assert f"[redacted:{kind}]" in redact(f"- {secret} -")


def test_every_listed_shape_has_an_example() -> None:
    shown_elsewhere = {
        *("AWS_SECRET_KEY", "URL_PASSWORD", "BEARER_TOKEN", "BASIC_AUTH"),
        *("PASSWORD", "PRIVATE_KEY", "DOCKER_AUTH"),
    }
    assert {shape.kind for shape in SHAPES} == set(HIDDEN) | shown_elsewhere


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgres://app:s3cr3t!x@db:5432/app", "postgres://app:[redacted:URL_PASSWORD]@db:5432/app"),
        ("curl -H 'Authorization: Bearer abcdefghijklmnopqrstuv1'", "[redacted:BEARER_TOKEN]"),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "Authorization: Basic [redacted:BASIC_AUTH]"),
        ("aws_secret_key = '" + "wJalrXUtnFEMI/K7MDENG" + "/bPxRfiCYEXAMPLEKEY'", "[redacted:"),
        # a random one that looks like a path: one in forty does
        ("aws_secret_access_key = " + "9gNgvjsKBN+7P/bKkaZqVTQC" + "alxZYXsD+mUTc233", "= [redacted:AWS_SECRET_KEY]"),
        ("AWS_SECRET_ACCESS_KEY: " + "/fkDr6ZcCU7Kkyi3DN8qyVq4" + "XkfcFy4q5UZqwfzX", ": [redacted:AWS_SECRET_KEY]"),
        ('"SecretAccessKey": "' + "/4Rb/y8RZ90tz957i52Eqm46" + "+hDF4ehzlnrEhRZ9" + '"', '"[redacted:AWS_SECRET_KEY]"'),
        ("GET /login?user=u&password=hunter2&x=1", "&password=[redacted:PASSWORD]&x=1"),
        ("https://h/hook?token=letmein", "?token=[redacted:PASSWORD]"),
        ("Server=db;User Id=sa;Password=hunter2;Encrypt=yes", ";Password=[redacted:PASSWORD];Encrypt=yes"),
        ("Driver={SQL Server};UID=sa;PWD=letmein", ";PWD=[redacted:PASSWORD]"),
        ("password=hunter2&token=letmein9", "password=[redacted:PASSWORD]&token=[redacted:PASSWORD]"),
        ("Password=hunter2;Server=db", "Password=[redacted:PASSWORD];Server=db"),
        ("/t?refresh_token=abcdwxyz", "?refresh_token=[redacted:PASSWORD]"),
        ("host=db user=app password=hunter2 dbname=x", " password=[redacted:PASSWORD] dbname=x"),
        ("password=hunter2 host=db", "password=[redacted:PASSWORD] host=db"),
        ("jdbc:oracle:thin:scott/tiger@h:1521:x", ":scott/[redacted:PASSWORD]@h:1521:x"),
        ("sqlplus -S scott/tiger@db", "scott/[redacted:PASSWORD]@db"),
        ("jdbc:sqlserver://db:1433;user=sa;password=hunter2", ";password=[redacted:PASSWORD]"),
        ("machine api.example login alice password hunter2", "password [redacted:PASSWORD]"),
        ("machine h\n  login alice\n  password hunter2\n", "  password [redacted:PASSWORD]\n"),
        ("machine h password hunter2 login alice", "machine h password [redacted:PASSWORD] login alice"),
        ("machine h login u account a password hunter2", "account a password [redacted:PASSWORD]"),
        ("default login u password hunter2", "password [redacted:PASSWORD]"),
        ("h:5433:app:alice:hun\\:ter2", "h:5433:app:alice:[redacted:PASSWORD]"),
        ("db.example:5432:app:alice:hunter2", "db.example:5432:app:alice:[redacted:PASSWORD]"),
        ("curl -s -u alice:hunter2 https://h", "curl -s -u alice:[redacted:PASSWORD] https://h"),
        ("curl --user 'alice:hunter2' https://h", "'alice:[redacted:PASSWORD]'"),
        ("curl -su alice:hunter2 https://h", "alice:[redacted:PASSWORD] https://h"),
        ("curl https://h \\\n  --proxy-user alice:hunter2", "alice:[redacted:PASSWORD]"),
        ("sshpass -p hunter2 ssh h", "-p [redacted:PASSWORD] ssh h"),
        ("redis-cli -h db -a hunter2 ping", "-a [redacted:PASSWORD] ping"),
        ("mysql -h db -u root -phunter2 app", "-p[redacted:PASSWORD] app"),
        ("mysqldump -pletmein app", "-p[redacted:PASSWORD] app"),
        ("tool --password=letmein run", "--password=[redacted:PASSWORD] run"),
        ("tool --password hunter2 run", "--password [redacted:PASSWORD] run"),
        ("tool --api-key 'a1b2c3d4'", "--api-key '[redacted:PASSWORD]'"),
        ('{"auths": {"r.example": {"auth": "YWxpY2U6aHVudGVyMg=="}}}', '"auth": "[redacted:DOCKER_AUTH]"'),
        ('{"identitytoken": "letmeinplease"}', '"identitytoken": "[redacted:DOCKER_AUTH]"'),
        ("Private-Lines: 2\nAAAAgQCx+3\nQ9x=\nPrivate-MAC: 0", "[redacted:PRIVATE_KEY]\n" * 2 + "Private-MAC: 0"),
        ("PGPASSWORD=hunter2 psql", "PGPASSWORD=[redacted:PASSWORD] psql"),
        ("DB_PASSWORD=hunter2", "DB_PASSWORD=[redacted:PASSWORD]"),
        ("export MYSQL_PWD=letmein", "export MYSQL_PWD=[redacted:PASSWORD]"),
        ("docker run -e DB_PASSWORD=hunter2 image", "docker run -e DB_PASSWORD=[redacted:PASSWORD] image"),
        ("+DB_PASSWORD=hunter2", "+DB_PASSWORD=[redacted:PASSWORD]"),
        (".env:3:DB_PASSWORD=hunter2", ".env:3:DB_PASSWORD=[redacted:PASSWORD]"),
        ('      - "DB_PASSWORD=hunter2"', '      - "DB_PASSWORD=[redacted:PASSWORD]"'),
        ("SERVICE_TOKEN=tok-abc-def", "SERVICE_TOKEN=[redacted:TOKEN]"),
        ("RAILS_SECRET_KEY_BASE=abcdefgh", "RAILS_SECRET_KEY_BASE=[redacted:KEY]"),
        ('password = "correct1horse"', 'password = "[redacted:PASSWORD]"'),
        ('{"api_key": "a1b2c3d4e5f6"}', '{"api_key": "[redacted:KEY]"}'),
        ("apiKey: 'a1b2c3d4e5f6'", "apiKey: '[redacted:KEY]'"),
        ("token: q7Rk2ZpXw93LmTt8VbNc4HsD", "token: [redacted:TOKEN]"),
        ("?access_token=a1b2c3d4e5f6a7b8&x=1", "?access_token=[redacted:TOKEN]"),
        ("ACME=xq-Lk92jdKx83JsPq02Lm4nVb", "ACME=[redacted:HIGH_ENTROPY]"),
    ],
)
def test_a_value_under_a_telling_name_is_hidden(text: str, shown: str) -> None:
    assert shown in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "commit 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
        "COMMIT=9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
        "RUN_ID=123e4567-e89b-12d3-a456-426614174000",
        '"integrity": "sha512-AbCdEfGhIjKlMnOpQrStUvWxYz0123456789AbCdEfGhIjKlMnOpQrStUvWxYz=="',
        "sha256:3126f59592c9b0d798584755f2bf7b081fa1ca35ce7a6fea980108d752a05bb1",
        "FACTORY=HTTPServerConnectionFactoryBuilderV2Impl",
        "MESSAGE=aGVsbG8gd29ybGQgdGhpcyBpcyBhIHRlc3Q=",
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
        "LS_COLORS=rs=0:di=01;34:ln=01;36",
        "TOKENIZERS_PARALLELISM=false",
        "MAX_TOKEN=4096",
        "token = next_token(stream)",
        "token: str = tokens[0]",
        "def parse(token: Token, key: str) -> None:",
        "password = getpass.getpass()",
        "password: str | None = None",
        "PASSWORD_FIELD = 'the password'",
        "API_KEY=$OTHER_KEY",
        "api_key=os.environ['API_KEY']",
        "key = 'hello_world_1'",
        "cache_key = f'{user}:{page}'",
        "secret_santa = pick(names)",
        "MLKEM768X25519PrivateKey = rust_openssl.hpke.MLKEM768X25519PrivateKey",
        "for key, value in items:",
        "monkey = 'banana12345'",
        "test_total: got 3, want 5 for 1, 2",
        "http://localhost:8080/path?a=b@c",
        'url = f"{base}?token={token}"',
        "curl 'https://h/x?token=$TOKEN'",
        "curl -u $USER:$PASS https://h",
        "a;pwd=$(pwd);cd x",
        "password=None; user=1",
        "login(password=secret, user=name)",
        "tool --token TOKEN --password=PASSWORD",
        "--token is required, and --password too",
        'parser.add_argument("--password", default="")',
        "mysql -p app",
        "mysql --port 3306 --protocol tcp",
        "login and password are required",
        "the machine and password shown there",
        "connect(host=host, user=user, password=secret, port=port)",
        '"auth": "required"',
        "https://h/x?auth=basic",
        "a.py:54:3:error:name",
        "sshpass -h; redis-cli --help",
        "to log in, login with your password there",
        "12:5432:x",
        "https://${USER}:${PASSWORD}@host/",
        "the sk-learn package and an xoxo and AKIA",
        "-----BEGIN CERTIFICATE-----\nMIIEpAIBAAKCAQEA0Z3VS5JJcds3xfn\n-----END CERTIFICATE-----",
    ],
)
def test_look_alike_words_are_kept(text: str) -> None:
    assert redact(text) == text


def test_a_private_key_keeps_its_lines_and_shows_none_of_them() -> None:
    text = f"before\n{BEGIN}{KEY_BODY}{END}after\n"
    shown = redact(text)
    assert shown == f"before\n{BEGIN}" + "[redacted:PRIVATE_KEY]\n" * 3 + f"{END}after\n"


@pytest.mark.parametrize(
    "text",
    [
        BEGIN + KEY_BODY,
        KEY_BODY + END,
        "     1\t" + BEGIN + "".join(f"     {n}\t{line}\n" for n, line in enumerate(KEY_BODY.splitlines(), 2)),
        (BEGIN + KEY_BODY + END).replace("\n", "\r\n"),
        '{"key": "' + (BEGIN + KEY_BODY + END).replace("\n", "\\n") + '"}',
    ],
    ids=["head", "tail", "cat -n", "CRLF", "JSON"],
)
def test_a_part_of_a_private_key_is_hidden_too(text: str) -> None:
    shown = redact(text)
    assert all(line not in shown for line in KEY_BODY.splitlines())
    assert shown.count("\n") == text.count("\n")
    assert redact(shown) == shown


def test_text_after_an_unfinished_key_is_kept() -> None:
    text = f"{BEGIN}{KEY_BODY}This is prose again, and it stays.\n"
    assert redact(text).endswith("\nThis is prose again, and it stays.\n")


def test_a_cut_through_a_secret_hides_it_whole() -> None:
    text = "a " + HIDDEN["GITHUB_TOKEN"] + " b"
    for cut in range(len(text) + 1):
        first, last = redact(text, 0, cut), redact(text, cut)
        assert "abcdefgh" not in first + last
        assert "GHIJ" not in first + last
        assert first.startswith("a"[:cut])


def test_hostile_text_is_redacted_in_time_linear_to_it() -> None:
    """Each of these made some pattern take time square to its length, or worse. The suite's time-out is the judge."""
    n = 200_000
    for piece in (
        "a",
        "sk-",
        "eyJ-",
        "A=",
        "key=",
        "://",
        "://a:",
        "xoxb-1-",
        "1_a",
        "aws",
        "key 'a",
        "\n",
        "MNO-",
        "=\"'",
        "curl -u ",
        "curl -u a:",
        "mysql -p",
        "login a ",
        "login a password",
        "machine a login a ",
        "default\n",
        "curl -u \\\n",
        "host=a ",
        "password=abc host",
        "sqlplus a/",
        "redis-cli -a",
        "a:5433:\\:",
        "?token=",
        "pwd=a",
        "pwd=abc;a",
        ";pwd=",
        "--token ",
        "--pass 0",
        "a:5432:",
        "a:*:a\n",
        "Private-Lines: 1\na\n",
    ):
        text = piece * (n // len(piece)) + "!"
        once = redact(text)
        assert redact(once) == once
    block = "-----BEGIN " + "PRIVATE KE " * 5_000 + "\n" + ("a" * 500 + "!\n") * 400
    assert redact(block + BEGIN + block)
    assert redact("PRIVATE KEY " + "a" * n + "!\n" + "A" * n + "=" + "1_a_" * 2_000 + "!")


def test_plain_text_does_not_load_the_detectors() -> None:
    """Their import takes a fifth of a second; an actor that meets no secret never pays it."""
    code = (
        "import sys; from odradek.actors.tools.redact import redact; "
        "assert redact('def total(a, b):\\n    return a + b  # single glob\\n'); "
        "print('detect_secrets' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_capture_keeps_both_ends_and_says_what_is_missing() -> None:
    capture = Capture(200)
    for number in range(10_000):
        capture.feed(f"line {number}\n")
    text = capture.text()
    assert text.startswith("line 0\nline 1\n")
    assert text.endswith("line 9998\nline 9999\n")
    assert "[truncated: about " in text
    assert "redirect to a file and read it in parts]" in text
    assert len(text.encode()) < 400


@pytest.mark.parametrize("step", [1, 7, 64, 5000])
def test_capture_of_any_pieces_is_the_same_text(step: int) -> None:
    text = "".join(f"ø→漢 {n}\n" for n in range(900))
    for limit in (20_000, 1_000):
        whole, pieces = Capture(limit), Capture(limit)
        whole.feed(text)
        for start in range(0, len(text), step):
            pieces.feed(text[start : start + step])
        assert pieces.text() == whole.text()
    assert "�" not in whole.text()


def test_a_secret_across_the_cut_of_a_capture_is_not_half_shown() -> None:
    secret = HIDDEN["GITHUB_TOKEN"]
    for offset in range(40, 140, 3):
        capture = Capture(200)
        capture.feed("." * offset + " " + secret + " " + "." * 5_000 + " " + secret + " " + "." * offset)
        assert "abcdef" not in capture.text()
        assert "GHIJ" not in capture.text()


@pytest.mark.parametrize("step", [1, 3, 50, 10_000])
def test_a_stream_shows_no_secret_however_it_is_cut(step: int) -> None:
    text = f"start\nDB_PASSWORD=hunter2\n{BEGIN}{KEY_BODY}{END}{HIDDEN['GITHUB_TOKEN']}\nlast"
    pieces: list[str] = []
    stream = RedactedStream(pieces.append)
    for start in range(0, len(text), step):
        stream.feed(text[start : start + step])
    stream.close()
    assert "".join(pieces) == redact(text)
    assert "hunter2" not in "".join(pieces)


def test_a_stream_passes_on_a_line_as_soon_as_it_ends() -> None:
    pieces: list[str] = []
    stream = RedactedStream(pieces.append)
    stream.feed("one\ntw")
    assert pieces == ["one\n"]
    stream.feed("x" * 100_000)
    assert sum(map(len, pieces)) > 90_000


def test_ordinary_source_code_is_kept() -> None:
    """This package's own, but for the one line that shows a secret."""
    root = Path(__file__).parents[2]
    sources = [path for room in ("actors", "streams", "infra", "kernels") for path in (root / room).rglob("*.py")]
    changed = {path.name for path in sources if redact(text := path.read_text()) != text}
    assert len(sources) > 300 and changed == {"redact.py"}
