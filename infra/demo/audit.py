"""The end of a run, as an auditor would look at it: the whole log against what the notary signed while it ran."""

from __future__ import annotations

from odradek.actors.notary.access import own_keys, vault_of
from odradek.actors.runtime.deployment import Deployment
from odradek.streams.audit.verify import AuditReport, verify
from odradek.streams.log import EventLog


async def audited(deployment: Deployment, event_log: EventLog) -> AuditReport | None:
    """The verdict; None where no notary runs. A few seconds: it reads every record again."""
    settings = deployment.audit
    if not settings.enabled:
        return None
    vault = vault_of(deployment.store, settings)
    there = await vault.open()
    trusted = own_keys(settings) | (set(await vault.keys()) if there else set())
    return await verify(event_log, vault if there else None, settings.name, trusted)


def line(report: AuditReport) -> str:
    """For the closing table."""
    verdict = "the chain verifies" if report.ok else "NOT as it was signed: odradek audit verify names the place"
    if not report.rounds:
        verdict = "the notary made no round in time"
    return f"Audit: {report.verified} records anchored, {report.not_anchored} not yet; {verdict}"
