"""Every wait of the actors and of the log in one table. What waits now is `pending.py`.

`TABLE` is guarantee 12 spelled out: for each wait who gives up (the owner), for whom it waits, after how long, what
happens then, and where its age can be seen. `sites` are the places in the code that wait; `tests/unit/test_waits.py`
walks over all of `actors` and `streams` and fails where one is not in the table, and where a named deadline is none.
A wait without a deadline says why: nothing is owed to it, or another row bounds it. What a person's command waits for
(`infra`) is not here: somebody sits before it, and it ends with its terminal.

Guarantee 12 (tests/GUARANTEES.md): test_waits.py, test_observe_pending.py, test_session_hangs.py.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path
from typing import Final

import msgspec

AGE = "odradek_wait_age_seconds"
"""Metric: the oldest wait of each kind that the log shows."""
HOST = "odradek_oldest_wait_seconds"
"""Metric: the longest wait of each host of sessions, in its own words."""
UP = "odradek_actor_up"
LAG = "odradek_consumer_lag"


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of wait."""

    name: str
    owner: str
    """Who gives up."""
    on: str
    """Whom or what it waits for."""
    deadline: tuple[str, ...]
    """`module.CONSTANT` each (they add up), or where the number stands: a field of an event, a setting. Empty: none."""
    then: str
    """What happens at the deadline; without one, why none is needed."""
    metric: str
    sites: tuple[str, ...] = ()
    """`room/file.py:function`, retry pauses included."""

    def seconds(self) -> float | None:
        """The constants' sum; None where the number stands elsewhere."""
        numbers = [value for path in self.deadline if (value := constant(path)) is not None]
        return sum(numbers) if numbers and len(numbers) == len(self.deadline) else None


@functools.cache
def constant(path: str) -> float | None:
    """The value of `module.CONSTANT` below odradek, read from its source: importing it would bring torch along. None
    for anything that is not written as a constant; raises AttributeError for one that is not there."""
    module, _, name = path.rpartition(".")
    if not name.isupper():
        return None
    spec = importlib.util.find_spec(f"odradek.{module}")
    if spec is None or spec.origin is None:
        raise AttributeError(f"there is no module {module} (for {path})")
    for node in ast.parse(Path(spec.origin).read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(getattr(t, "id", "") == name for t in targets):
            return float(ast.literal_eval(node.value)) if node.value is not None else None
    raise AttributeError(f"there is no {name} in {module}")


def _wait(name: str, owner: str, on: str, deadline: str, then: str, metric: str, *sites: str) -> Wait:
    paths = tuple(deadline.split(" + ")) if deadline else ()
    return Wait(name=name, owner=owner, on=on, deadline=paths, then=then, metric=metric, sites=sites)


GROUP, CALL, TURN, GRADING = "group", "tool call", "model turn", "grading"
ASSEMBLY, TRAINING, LOADING = "assembly", "training", "loading weights"

TABLE: Final = (
    # -- the loop, as the log shows it -------------------------------------------------------------------------------
    _wait(GROUP, "controller", "all members' verdicts", "GroupOpened.deadline_ms",
          "sealed with those that have one, or discarded with the reason", AGE),
    _wait(TURN, "session actor", "an inference actor",
          "actors.session.calls.INFRA_DEADLINE_S + actors.session.runner.SAMPLE_TIMEOUT_S "
          "+ actors.session.clients.ANSWER_GRACE_S",
          "tried again, then session.failed with the cause; the member is replaced or the group discarded", AGE,
          "actors/session/clients.py:RayEngine.sample", "actors/session/runner.py:SessionRunner._sample",
          "actors/session/runner.py:SessionRunner._unless_called_off",
          "actors/inference/actor.py:InferenceActor._sample"),
    _wait(CALL, "session actor", "the environment actor", "Budget.tool_seconds + actors.session.clients.CALL_GRACE_S",
          "a command is ended and its result says so; an environment that does not answer is lost and rebuilt, until "
          "INFRA_DEADLINE_S, then session.failed", AGE,
          "actors/session/clients.py:RayEnvironment._ask", "actors/session/calls.py:ToolCalls._in_environment"),
    _wait(GRADING, "reward actor", "a grader in its sandbox", "actors.reward.grader.GRADE_DEADLINE_S",
          "reward.ungraded with the cause: never a score", AGE, "actors/reward/grader.py:grade"),
    _wait(ASSEMBLY, "assembler", "kept groups for a batch", "",
          "nothing is owed: a batch closes once it has as many groups as the lane asks for", AGE),
    _wait(TRAINING, "trainer", "its own step", "",
          "steps take what they take; a trainer that can't go on says so (its fault in odradek status)", AGE),
    _wait(LOADING, "inference actor", "the object store", "actors.inference.serving.FETCH_S",
          "the old version is served on, replica.reported says why, and it is tried again", AGE,
          "actors/inference/serving.py:ServingActor._fetch", "actors/inference/serving.py:ServingActor._load_wanted"),
    # -- session actors ----------------------------------------------------------------------------------------------
    _wait("append", "session actor", "the broker", "actors.session.clients.APPEND_RETRY_S",
          "the session's owner ends without an end on the log; the controller places it again", HOST,
          "actors/session/clients.py:KafkaJournal.append"),
    _wait("message", "session actor", "a person's message", "Budget.wall_seconds", "the session ends: wall_clock", HOST,
          "actors/session/runner.py:SessionRunner._loop"),
    # -- controller --------------------------------------------------------------------------------------------------
    _wait("host's answer", "controller", "a session actor", "actors.controller.actor.STATUS_TIMEOUT_S",
          "the host counts as away for this tick; its members are placed again when it is back", UP,
          "actors/controller/actor.py:ControllerActor._ask_hosts.ask",
          "actors/controller/actor.py:ControllerActor._hand_over",
          "actors/controller/actor.py:ControllerActor._cancel"),
    _wait("torn session's end", "reward actor", "its session actor", "actors.reward.torn.HOST_S",
          "it is asked again in the next round, until the session's end is on the log", UP,
          "actors/reward/torn.py:TornSessions._settle", "actors/reward/torn.py:TornSessions.run"),
    _wait("tick", "controller", "any input", "actors.controller.actor.TICK_S", "it looks at the world all the same", UP,
          "actors/controller/actor.py:ControllerActor._drain"),
    # -- inference ---------------------------------------------------------------------------------------------------
    _wait("pinned weights", "inference actor", "the object store", "SampleRequest.deadline",
          "the request fails by name; its session tries again", HOST,
          "actors/inference/actor.py:InferenceActor._load_pinned"),
    _wait("engine command", "inference actor", "the engine's thread", "actors.inference.actor.CALL_TIMEOUT",
          "the call fails; a stuck engine fails every request at its deadline", UP,
          "actors/inference/actor.py:InferenceActor._command"),
    _wait("engine idle", "engine thread", "a request", "actors.inference.loop.IDLE_WAIT", "it looks again", UP,
          "actors/inference/loop.py:EngineLoop._await_work"),
    # -- sandboxes ---------------------------------------------------------------------------------------------------
    _wait("sandbox made", "session actor", "the environment actor", "actors.session.clients.OPEN_TIMEOUT_S",
          "counts as a lost environment (see tool call)", HOST,
          "actors/environment/ns/driver.py:NsDriver.start_init"),
    _wait("command", "sandbox driver", "init and its supervisor",
          "ExecRequest.timeout_s + actors.environment.ns.commands.EXEC_GRACE_S",
          "the command is killed at its limit; a sandbox that does not even say so is destroyed", HOST,
          "actors/environment/ns/commands.py:Commands.finish", "actors/environment/ns/commands.py:Commands.stream",
          "actors/environment/ns/commands.py:Commands.stop",
          "actors/environment/ns/commands.py:Commands.take_over", "actors/environment/ns/init.py:Init.loop"),
    _wait("init's answer", "sandbox driver", "init, or the zygote", "actors.environment.protocol.DEFAULT_DEADLINE_S",
          "SandboxInfraError: the environment is lost and rebuilt", HOST,
          "actors/environment/ns/channel.py:Channel.request", "actors/environment/ns/driver.py:NsDriver.stop_init"),
    _wait("files of a sandbox", "sandbox driver", "a file thread", "actors.environment.ns.sandbox.FILES_DEADLINE_S",
          "SandboxInfraError", HOST, "actors/environment/ns/sandbox.py:NsSandbox._on_files"),
    _wait("snapshot", "sandbox driver", "calls under way in the sandbox", "",
          "each of them has a deadline of its own; whoever asked has one too", HOST,
          "actors/environment/ns/sandbox.py:NsSandbox._freeze", "actors/environment/ns/sandbox.py:NsSandbox._use"),
    _wait("zygote's start", "sandbox driver", "the zygote", "actors.environment.ns.host.START_DEADLINE_S",
          "the actor does not come up, with the zygote's own words", UP,
          "actors/environment/ns/host.py:ZygoteHost._listen"),
    _wait("a killed process", "whoever removes a dead driver's rest", "the kernel",
          "actors.environment.ns.instance.GONE_DEADLINE_S", "what is left keeps its note, for the next start", UP,
          "actors/environment/ns/instance.py:_wait_gone", "actors/environment/ns/removal.py:remove_cgroups"),
    _wait("zygote's news", "zygote", "the driver, an init's end, the next lifetime's end", "",
          "nothing is owed: the driver's end closes its socket", UP, "actors/environment/ns/zygote.py:Zygote.loop"),
    _wait("driver lost", "environment or reward actor", "the end of its zygote", "",
          "nothing is owed: it waits to end its own process", UP, "actors/environment/ns/driver.py:NsDriver.lost"),
    _wait("disk watch", "sandbox driver", "the next look", "actors.environment.ns.disk.LOOK_S", "it looks", UP,
          "actors/environment/ns/disk.py:guard"),
    _wait("image set-up", "image builder", "set-up commands of a recipe",
          "actors.environment.setup.SETUP_DEADLINE_S", "the image is not built; the task is refused by name", HOST,
          "actors/environment/setup.py:setup_runner.run"),
    # -- tools on the host's side ------------------------------------------------------------------------------------
    _wait("tool helper", "environment actor", "the helper process", "actors.tools.helper.START_SECONDS",
          "the helper is killed and the call's result says that it took too long", HOST,
          "actors/tools/helper.py:_read", "actors/tools/helper.py:Helper._end"),
    # -- starts, ends, reopenings ------------------------------------------------------------------------------------
    _wait("actor's start", "the actor's constructor", "broker, store, images",
          "actors.environment.actor.START_DEADLINE_S", "Ray says that it did not come up, with the cause", UP,
          "actors/runtime/loop.py:LoopThread.begin"),
    _wait("actor's end", "the actor's loop", "its own tasks", "actors.runtime.loop.STOP_DEADLINE_S",
          "they are cut off", UP, "actors/runtime/loop.py:LoopThread.stop", "actors/runtime/loop.py:LoopThread._drain"),
    _wait("reopening", "assembler, trainer, notary", "broker or store after a fault",
          "actors.trainer.actor.REOPEN_PAUSE_S", "it begins again at its last commit", LAG,
          "actors/assembler/actor.py:AssemblerActor._run", "actors/trainer/actor.py:TrainerActor._run",
          "actors/notary/actor.py:NotaryActor._notarise"),
    _wait("projections worker", "projections actor", "its worker's end", "actors.projections.actor.STOP_S",
          "nothing is owed while it runs; at the end it is killed", UP,
          "actors/projections/actor.py:ProjectionsActor._run", "actors/projections/actor.py:ProjectionsActor._stop"),
    _wait("retraining", "odradek replay rescore", "assembler and trainer of the new lane", "",
          "ends with the error of the first that fails; a person can stop it", UP, "actors/trainer/retrain.py:retrain"),
    # -- the log -----------------------------------------------------------------------------------------------------
    _wait("broker's answer", "whoever asks", "the broker", "streams.config.REQUEST_TIMEOUT_S",
          "DeadlineExceeded or AppendUncertain: retried by whoever owns the work", LAG,
          "streams/clients.py:guarded", "streams/log.py:EventLog.append_many", "streams/log.py:EventLog.append_raw"),
    _wait("connection", "whoever connects", "the broker", "streams.config.CONNECT_TIMEOUT_S",
          "BrokerUnreachable naming the address", LAG, "streams/clients.py:start"),
    _wait("client's end", "whoever closes", "the broker",
          "streams.clients.STOP_S + streams.clients.STOP_AGAIN_S", "the client is cut off", LAG,
          "streams/clients.py:stop"),
    _wait("stable end", "whoever starts a stage", "another writer's open transaction", "streams.log.STABLE_S",
          "DeadlineExceeded naming the partition", LAG, "streams/log.py:EventLog.wait_stable"),
    _wait("records of a range", "reader", "the broker", "streams.log.STALL_S", "DeadlineExceeded: the offset is named",
          LAG, "streams/log.py:EventLog._range"),
    _wait("new records", "follower", "any append", "", "nothing is owed: what was appended is read", LAG,
          "streams/log.py:EventLog.tail_batches"),
    _wait("transaction", "controller, assembler, trainer, notary", "the broker", "streams.transactions.TRANSACTION_S",
          "thrown away; nothing of it is visible; redone from the last commit", LAG,
          "streams/transactions.py:Stage.transaction", "streams/transactions.py:Stage._give_up"),
    _wait("handler", "consumer", "the handler of a record", "streams.consumers.HANDLER_S",
          "tried again with backoff, then a dead letter with the cause", LAG,
          "streams/consumers.py:GroupConsumer._call", "streams/consumers.py:GroupConsumer._redeliver",
          "streams/consumers.py:GroupConsumer._give_up",
          "streams/consumers.py:GroupConsumer._turn"),
    _wait("object", "whoever reads or writes", "the object store", "streams.blobs.DEADLINE_S",
          "StoreUnreachable: retried by whoever owns the work", LAG, "streams/blobs.py:S3Store._run"),
    _wait("topics", "the admin step", "the broker's metadata", "streams.admin.READY_S", "an error naming the topic",
          LAG, "streams/admin.py:_until_ready"),
    _wait("notary's pause", "notary", "the next interval", "streams.audit.notary.LOOK_S", "it looks", LAG,
          "streams/audit/notary.py:Notary.run"),
    _wait("notary's last round", "odradek down", "the notary", "infra.cluster.actors.STOP_DEADLINE_S",
          "it is stopped; the next start anchors first what is left", UP, "actors/notary/actor.py:NotaryActor._end"),
)  # fmt: skip

NOT_WAITS: Final = frozenset(
    {
        "actors/controller/past.py:_readable .sleep",  # of no time: others get a turn
        "actors/environment/ns/commands.py:Commands.stop .poll",  # asks for a job's output; returns at once
        "actors/environment/ns/sandbox.py:NsSandbox.poll_job .poll",
        "actors/inference/scheduler.py:Scheduler.restart .acquire",  # counts a reference to a page of keys and values
        "actors/inference/scheduler.py:Scheduler._admit .acquire",
    }
)
"""Calls that read like waits and are none."""

BY_NAME: Final = {wait.name: wait for wait in TABLE}
