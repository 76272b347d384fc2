"""`odradek audit`: is the log as it was signed, was an event on it, do a session's numbers come from its weights."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
import msgspec

from odradek.infra.cli.context import EXIT_CASE_FAILED, EXIT_CODES, CaseFailed, Context, command_options, given
from odradek.infra.cli.log import Say, broker, run
from odradek.infra.errors import UsageError

if TYPE_CHECKING:
    from odradek.actors.trainer.resample import Resampled
    from odradek.streams.audit.proof import Proof
    from odradek.streams.audit.settings import AuditSettings
    from odradek.streams.audit.vault import Vault
    from odradek.streams.audit.verify import AuditReport
    from odradek.streams.events.audit import ChainBegun

SHOWN = 20
"""Findings that are printed as text; all are in the JSON."""


@click.group(epilog=EXIT_CODES)
def command() -> None:
    """Verify or prove what the log says."""


_key = click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="HEX",
    help="Only this public key may sign; repeatable [this host's notary's, and those in the bucket].",
)
_log_only = click.option(
    "--log-only", is_flag=True, help="Without the bucket: a log cut off together with its anchors goes unseen."
)


@command.command
@click.option("--topic", help="Only this topic.")
@_key
@_log_only
@command_options
def verify(context: Context, topic: str | None, keys: tuple[str, ...], log_only: bool) -> None:
    """Read the whole log again and compare it with what the notary signed.

    Names the first offset of every partition that was changed, dropped, inserted, reordered or cut off since, and what
    is wrong with the anchors themselves. Records after the last anchor are counted as not yet anchored, never as
    verified. Exit code 1 on any finding, or if nothing is anchored.
    """

    _must_be_audited(topic)

    async def work(tell: Say) -> AuditReport:
        from odradek.streams.audit.verify import verify as verified
        from odradek.streams.log import EventLog

        settings, vault, trusted = await _trust(context, keys, log_only)
        async with EventLog(broker(context.config)) as event_log:  # no subject's key: stored bytes are all it needs
            return await verified(event_log, vault, settings.name, trusted, only=topic, say=tell)

    report = run(context, "verifying", work)
    value = {"ok": report.ok, "verified": report.verified, "not_anchored": report.not_anchored}
    context.result({**value, **msgspec.to_builtins(report)}, as_text(report))
    if not report.ok:
        raise click.exceptions.Exit(EXIT_CASE_FAILED)


def as_text(report: AuditReport) -> str:
    """The findings, and one line of totals."""
    lines = [str(finding) for finding in report.findings[:SHOWN]]
    if len(report.findings) > SHOWN:
        lines.append(f"… and {len(report.findings) - SHOWN} more (--json)")
    lines += [_given_up(one) for one in report.given_up]
    totals = f"{report.verified} records verified in {report.rounds} rounds, {report.not_anchored} not yet anchored"
    if not report.rounds:
        return "\n".join([*lines, f"nothing is anchored, {report.not_anchored} records: does a notary run?"])
    bad = len({(one.topic, one.partition) for one in report.findings})
    verdict = f"{bad} of {len(report.partitions)} partitions are not as they were signed; " if report.findings else ""
    how = "" if report.locked else "; the bucket has no object lock"
    late = f"; {report.not_kept} rounds are not in the bucket yet" if report.not_kept else ""
    signed = ", ".join(key[:16] for key in report.keys)
    return "\n".join([*lines, f"{verdict}{totals}; signed by {signed}{late}{how}"])


def _given_up(begun: ChainBegun) -> str:
    when = datetime.fromtimestamp(begun.time_ms / 1000, UTC)
    return (
        f"chain {begun.chain} was begun by a restore at {when:%Y-%m-%d %H:%M} UTC, signed by {begun.key[:16]}: "
        f"{begun.why}; {begun.before} is given up, with {begun.kept} rounds in the bucket and {begun.on_log} on the log"
        + (f" ({begun.reason})" if begun.reason else "")
    )


@command.command
@click.argument("ce_id", metavar="ID")
@click.option("--topic", help="Where the event lies; all topics are searched without it.")
@_key
@_log_only
@command_options
def prove(context: Context, ce_id: str, topic: str | None, keys: tuple[str, ...], log_only: bool) -> None:
    """Print a proof (JSON) that the event of this ce_id was on the log when it was signed. ID is what a record's
    header ce_id says; a batch's id, as `odradek weights explain` prints it, is one.

    It holds the stored record whole. Anybody can check it, with nothing of odradek installed:
    python check_proof.py PROOF.json PUBLIC_KEY (streams/audit/check_proof.py).
    """

    _must_be_audited(topic)

    async def work(tell: Say) -> Proof:
        from odradek.streams.audit.anchors import AnchorLog
        from odradek.streams.audit.proof import NotProvable, find
        from odradek.streams.audit.proof import prove as proved
        from odradek.streams.audit.verify import gather_anchors
        from odradek.streams.log import EventLog

        settings, vault, trusted = await _trust(context, keys, log_only)
        async with EventLog(broker(context.config)) as event_log:  # no subject's key: stored bytes are all it needs
            record = await find(event_log, ce_id, topic, tell)
            if record is None:
                raise UsageError(f"no event with ce_id {ce_id!r} on {topic or 'any audited topic'}")
            anchored = await gather_anchors(event_log, vault, settings.name, trusted)
            try:
                return await proved(event_log, AnchorLog(anchored.rounds), record)
            except NotProvable as error:
                raise CaseFailed(str(error)) from None

    proof = run(context, "searching", work)
    context.result(proof, msgspec.json.format(msgspec.json.encode(proof), indent=2).decode())


@command.command
@click.argument("session_id", metavar="SESSION", callback=given)
@command_options
def resample(context: Context, session_id: str) -> None:
    """Compute a session's log-probs and tokens again under the weights that it names.

    Says equal, or the first token that differs, with both values' bits. Equality is claimed only for turns that were
    sampled under this machine's numerics (instruction set, torch build, kernels); of others the gap is told. Exit code
    1 on a difference.
    """

    async def work(_tell: Say) -> Resampled:
        from odradek.actors.runtime.store import log_of, object_store
        from odradek.actors.trainer.resample import resample as computed
        from odradek.infra.cluster.deployment import deployment_of
        from odradek.infra.config.services import endpoints
        from odradek.infra.observe.lookup import read_session

        deployment = deployment_of(context.config, endpoints(context.config, ray=False))
        async with log_of(deployment) as event_log:
            found, records = await read_session(event_log, session_id)
            return await computed(event_log, object_store(deployment), found, records)

    from odradek.actors.trainer.resample import resampled_text

    found = run(context, "computing", work)
    context.result({"compared": found.compared, **msgspec.to_builtins(found)}, resampled_text(found))
    if found.first is not None:
        raise click.exceptions.Exit(EXIT_CASE_FAILED)


async def _trust(
    context: Context, keys: tuple[str, ...], log_only: bool
) -> tuple[AuditSettings, Vault | None, set[str]]:
    """The notary's settings, its vault if it is to be asked, and the public keys that may sign."""
    from odradek.actors.notary.access import own_keys, vault_of
    from odradek.infra.cluster.deployment import audit_of, store_of
    from odradek.infra.config.services import endpoints

    settings = audit_of(context.config)
    trusted = {_hex(key) for key in keys} or own_keys(settings)
    if log_only:
        if not trusted:
            raise UsageError(f"no key to check signatures with: there is no {settings.key_file}; give --key HEX")
        return settings, None, trusted
    vault = vault_of(store_of(endpoints(context.config, ray=False)), settings)
    if not await vault.open():
        return settings, None, trusted
    return settings, vault, trusted if keys else trusted | set(await vault.keys())


def _hex(key: str) -> str:
    if len(key) != 64 or not all(digit in "0123456789abcdef" for digit in key.lower()):
        raise UsageError(f"--key {key!r}: expected the 64 hex digits of an Ed25519 public key")
    return key.lower()


def _must_be_audited(topic: str | None) -> None:
    from odradek.streams.audit.scope import audited
    from odradek.streams.errors import UnknownTopic

    try:
        known = topic is None or audited(topic)
    except UnknownTopic as error:
        raise UsageError(f"--topic: {error}") from None
    if not known:
        raise UsageError(f"--topic {topic}: compacted topics and the anchors themselves are not chained")
