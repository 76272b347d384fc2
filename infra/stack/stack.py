"""Up, down and status of the stack of one data folder.

Owns the order of things: configured (external) services are checked before anything embedded is started; embedded ones
start side by side, each under its own deadline; if one fails, or the person interrupts, everything that this `up`
started is ended again. Data stays in the folder between `down` and `up`.

Who ends what: `down` (and the next `up`) ends every process that carries the data folder's mark, so nothing survives a
launcher that was killed. Nothing else is ever signalled.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from odradek.infra.deadline import Deadline
from odradek.infra.errors import ComponentFailed, DiskFull, InfraError, StackError, Unreachable
from odradek.infra.stack import ports as port_choice
from odradek.infra.stack import processes
from odradek.infra.stack.component import SAY_S, Component, Progress, wait_ready
from odradek.infra.stack.state import ComponentState, StackState, locked, read_state, stack_id, under_way, write_state

MIN_FREE_MB = 512
"""Free space that `up` asks for on the data folder's disk. Less and the broker dies soon after its start."""

EXTERNAL_DEADLINE_S = 10.0
"""Seconds for a configured service to answer. Too low refuses a slow link, too high keeps a person waiting."""

STATUS_DEADLINE_S = 5.0
"""Seconds for one component's health check in `status`."""

HUNG_S = 90.0
"""Seconds that a service which is there may take to answer `up` before it counts as hung and is started again. Too low
takes a busy one for that; too high keeps a person waiting for one that hangs."""

STOP_DEADLINE_S = 60.0
"""Seconds after which `down` gives up on a process that even SIGKILL does not end (stuck in the kernel)."""

Health = Literal["running", "stopped", "unhealthy", "starting", "silent"]
"""`starting`: an `up` is under way. `silent`: no answer within the time, and no sign that it is gone."""


def shortage(data: Path) -> str:
    """What the data folder's disk lacks; empty: nothing. Then no service is started, and no sandbox made, so that what
    is left is the broker's. Raises OSError."""
    free_mb = shutil.disk_usage(data).free // 2**20
    return f"{data} has {free_mb} MB free, the stack needs {MIN_FREE_MB} MB" if free_mb < MIN_FREE_MB else ""


class External(Protocol):
    """A service that somebody else runs: only its address is ours."""

    @property
    def name(self) -> str:
        """The component that it stands in for."""

    @property
    def address(self) -> str:
        """Where it is configured to be."""

    def check(self, timeout_s: float) -> None:
        """Ask it; raises `Unreachable` or another `StackError` with the reason."""


class ComponentStatus(msgspec.Struct, frozen=True):
    """What `status` says of one component."""

    name: str
    health: Health
    address: str
    embedded: bool
    pids: tuple[int, ...] = ()
    log: str = ""
    reason: str = ""


class UpResult(msgspec.Struct, frozen=True):
    """What `up` did: which components it started, and how all of them stand."""

    started: tuple[str, ...]
    components: tuple[ComponentStatus, ...]


def quiet(_component: str, _message: str) -> None:
    """A progress callback that says nothing."""


class Stack:
    """The services of one data folder."""

    def __init__(
        self,
        data: Path,
        components: Sequence[Component],
        external: Sequence[External] = (),
        reap: Callable[[], object] = lambda: None,
    ) -> None:
        """`reap` removes what actors leave on the host (sandboxes, mounts, cgroups) once their processes have ended."""
        self.data = data
        self._reap = reap
        self.components = tuple(components)
        self.external = tuple(external)
        self._id = stack_id(data)

    # -- up ---------------------------------------------------------------------------------------------------------

    def up(self, progress: Progress = quiet) -> UpResult:
        """Start what is not running; on any failure end again what this call started, and raise its first error."""
        for service in self.external:
            progress(service.name, f"checking {service.address}")
            service.check(EXTERNAL_DEADLINE_S)
        if not self.components:
            return UpResult((), self.status())
        self._check_disk()
        with locked(self.data):
            state = msgspec.structs.replace(read_state(self.data), stopping=False)
            write_state(self.data, state)
            with ThreadPoolExecutor(len(self.components)) as pool:
                healthy = list(pool.map(lambda part: self._healthy(state, part, progress), self.components))
            missing = [part for part, good in zip(self.components, healthy, strict=True) if not good]
            for part in missing:
                self._end_part(state, part, part.stop_grace_s)
            if missing:
                if any(part.name == "ray" for part in missing):
                    self._reap()
                self._start_all(missing, state, progress)
        started = tuple(part.name for part in missing)
        return UpResult(started, self._statuses(skip_check=started if missing else ()))

    def _mark(self, component: str) -> str:
        return f"{self._id}/{component}"

    def _check_disk(self) -> None:
        try:
            self.data.mkdir(parents=True, exist_ok=True)
            short = shortage(self.data)
        except OSError as error:
            raise StackError(f"data folder {self.data} can't be used: {error.strerror}") from error
        if short:
            raise DiskFull(f"{short}: free some space, or name another folder with --data")

    def _start_all(self, parts: Sequence[Component], state: StackState, progress: Progress) -> None:
        """Prepare all, then start all: what can fail without a process fails before there is one."""
        shared = _Shared(self.data, state)
        pool = ThreadPoolExecutor(len(parts), thread_name_prefix="up")
        futures = [pool.submit(self._prepare, part, shared, progress) for part in parts]
        try:
            _first_failure(futures)
            futures = [pool.submit(self._start_one, part, shared, progress) for part in parts]
            _first_failure(futures)
        except BaseException:
            begun = shared.give_up([part.name for part in parts])
            for part in parts:
                self._end(begun, part.name, 0.0)
            wait(futures)
            for part in parts:
                self._end_part(begun, part, 0.0)
            raise
        finally:
            pool.shutdown()

    def _prepare(self, part: Component, shared: _Shared, progress: Progress) -> None:
        previous = shared.state.components.get(part.name)
        before = previous.ports if previous else {}
        ports = shared.choose_ports(part.port_names, before)
        if any(name in before and before[name] != port for name, port in ports.items()):
            progress(part.name, f"its port was taken by another program; from now on at {part.address(ports)}")
        log = self.data / part.name / f"{part.name}.log"
        shared.record(part.name, ComponentState(part.address(ports), ports, log=str(log)))
        try:
            part.prepare(ports, progress)
        except OSError as error:
            raise ComponentFailed(f"{part.name}: {self.data}: {error.strerror or error}") from error

    def _start_one(self, part: Component, shared: _Shared, progress: Progress) -> None:
        if shared.abort.is_set():
            return
        planned = shared.state.components[part.name]
        ports, log, mark = planned.ports, Path(planned.log), self._mark(part.name)
        started = Deadline(part.start_deadline_s)
        progress(part.name, "starting")
        process = part.start(ports, mark, log)
        wait_ready(part, ports, process, log, progress)
        part.finish(ports)
        running = ComponentState(planned.address, ports, tuple(processes.marked(mark)), planned.log, time.time())
        shared.record(part.name, running)
        progress(part.name, f"ready at {planned.address} after {started.elapsed:.1f} s")

    def _healthy(self, state: StackState, part: Component, progress: Progress) -> bool:
        """Whether it can be left as it is. One that is there and slow is waited for: to start it again would end all
        that it does for others, every actor where it is Ray."""
        known = state.components.get(part.name)
        if known is None or not processes.marked(self._mark(part.name)):
            return False
        patience, said = Deadline(HUNG_S), -SAY_S
        while reason := _reason(lambda: part.check(known.ports, STATUS_DEADLINE_S)):
            if _dead(part, known.ports):
                return False
            if patience.expired:
                progress(part.name, f"has not answered for {patience.elapsed:.0f} s ({reason}): starting it again")
                return False
            if patience.elapsed >= said + SAY_S:
                said = patience.elapsed
                progress(part.name, f"is there and does not answer yet ({reason})")
            time.sleep(processes.POLL_S * 2)
        return True

    # -- down -------------------------------------------------------------------------------------------------------

    def down(self, progress: Progress = quiet) -> tuple[str, ...]:
        """End every embedded process of this data folder; returns the components that had any. Data stays."""
        if not self.data.is_dir():
            return ()
        with locked(self.data):
            state = msgspec.structs.replace(read_state(self.data), stopping=True)
            write_state(self.data, state)
            ended = []
            for part in reversed(self.components):
                if processes.marked(self._mark(part.name)):
                    progress(part.name, "stopping")
                    ended.append(part.name)
                self._end_part(state, part, part.stop_grace_s)
            left = {name.pid for name in processes.marked(f"{self._id}/")}
            if left:  # a component that this build no longer knows
                ended.append("other")
                self._end(state, "", 1.0)
            self._reap()
            return tuple(ended)

    def _end_part(self, state: StackState, part: Component, grace_s: float) -> None:
        self._end(state, part.name, grace_s)
        known = state.components.get(part.name)
        if known is not None:
            part.clean(known.ports)

    def _end(self, state: StackState, component: str, grace_s: float) -> None:
        mark = self._mark(component)
        known = state.components.get(component)
        sessions: set[int] = set()

        def find() -> list[processes.ProcessName]:
            recorded = [name for name in (known.processes if known else ()) if processes.alive(name)]
            ours = {*processes.marked(mark), *recorded}
            sessions.update(session for name in ours if (session := processes.session_of(name)) is not None)
            return sorted({*ours, *processes.in_sessions(sessions)}, key=lambda name: name.pid)

        left = processes.end_all(find, Deadline(STOP_DEADLINE_S), grace_s)
        if left:
            pids = ", ".join(str(name.pid) for name in left)
            raise StackError(f"{component or 'stack'}: processes {pids} did not end within {STOP_DEADLINE_S:.0f} s")

    # -- status -----------------------------------------------------------------------------------------------------

    def status(self) -> tuple[ComponentStatus, ...]:
        """How each service stands now, asked of the service itself; what an `up` is starting is not asked, since it
        could not answer in time. Starts and changes nothing."""
        return self._statuses()

    def _statuses(self, skip_check: Sequence[str] = ()) -> tuple[ComponentStatus, ...]:
        """All of them, asked side by side; `skip_check` were seen to be healthy a moment ago."""
        state = read_state(self.data)
        up = under_way(self.data) and not state.stopping

        def asked(part: Component) -> ComponentStatus:
            known = state.components.get(part.name)
            if up and (known is None or not known.processes):
                return ComponentStatus(part.name, "starting", known.address if known else "", embedded=True)
            return self._component_status(state, part, part.name in skip_check)

        with ThreadPoolExecutor(max(1, len(self.components) + len(self.external))) as pool:
            embedded = pool.map(asked, self.components)
            external = pool.map(_external_status, self.external)
            return (*embedded, *external)

    def _component_status(self, state: StackState, part: Component, skip_check: bool) -> ComponentStatus:
        known = state.components.get(part.name)
        pids = tuple(name.pid for name in processes.marked(self._mark(part.name)))
        if known is None or not pids:
            return ComponentStatus(part.name, "stopped", known.address if known else "", embedded=True)
        reason = "" if skip_check else _reason(lambda: part.check(known.ports, STATUS_DEADLINE_S))
        health: Health = "running" if not reason else "unhealthy" if _dead(part, known.ports) else "silent"
        return ComponentStatus(part.name, health, known.address, True, pids, known.log, reason)

    def watched(self) -> dict[str, str]:
        """The embedded services that were started and not stopped, each with why it is certainly gone; empty: it is
        not. Named by service and start: one that is started again has another name. Cheap enough to ask every other
        second; none while a `down` is under way."""
        state = read_state(self.data)
        if state.stopping:
            return {}
        found = {}
        for part in self.components:
            known = state.components.get(part.name)
            if known is not None and known.processes:
                dead = _dead(part, known.ports)
                why = f"{part.name}: nothing listens on {dead[0]} any more" if dead else ""
                found[f"{part.name} {known.started_at}"] = why
        return found

    def address(self, component: str) -> str:
        """Where a running component listens; `Unreachable` with the command to run if it is not up."""
        return self.addresses((component,))[component]

    def addresses(self, wanted: Sequence[str]) -> dict[str, str]:
        """Where the named components are; `Unreachable` names the first whose processes do not run.

        Quick: the services themselves are not asked (`status` does that), and configured ones are taken at their word.
        """
        state = read_state(self.data)
        found = {service.name: service.address for service in self.external}
        for part in self.components:
            status = self._component_status(state, part, skip_check=True)
            if status.health == "running":
                found[part.name] = status.address
        for name in wanted:
            if name not in found:
                raise Unreachable(f"{name} is not running for {self.data}: run odradek up")
        return {name: found[name] for name in wanted}


class _Shared:
    """What the starting threads share: the state file and the ports already given away."""

    def __init__(self, data: Path, state: StackState) -> None:
        self.abort = threading.Event()
        self.state = state
        self._data = data
        self._lock = threading.Lock()

    def record(self, name: str, component: ComponentState) -> None:
        with self._lock:
            self._record(name, component)

    def give_up(self, names: Sequence[str]) -> StackState:
        """From here on nothing is on record as started, so that whoever watches (`Stack.watched`) does not take the end
        of what this `up` had started for its fault; returns what was on record."""
        with self._lock:
            self.abort.set()
            begun = self.state
            for name in begun.components.keys() & set(names):
                self._record(name, begun.components[name])
            return begun

    def _record(self, name: str, component: ComponentState) -> None:
        if self.abort.is_set():
            component = msgspec.structs.replace(component, processes=())
        self.state = self.state.with_component(name, component)
        write_state(self._data, self.state)

    def choose_ports(self, names: Sequence[str], previous: Mapping[str, int]) -> dict[str, int]:
        with self._lock:
            return port_choice.choose(names, previous)


def _first_failure(futures: Sequence[Future[None]]) -> None:
    """Wait for all; raise the first error as soon as it happens."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=0.2, return_when="FIRST_EXCEPTION")
        for future in done:
            future.result()


def _external_status(service: External) -> ComponentStatus:
    reason = _reason(lambda: service.check(STATUS_DEADLINE_S))
    health: Health = "unhealthy" if reason else "running"
    return ComponentStatus(service.name, health, service.address, embedded=False, reason=reason)


def _dead(part: Component, ports: Mapping[str, int]) -> list[int | Path]:
    """Where it should listen and certainly does not."""
    return [where for where in part.listens(ports) if port_choice.refused(where)]


def _reason(check: Callable[[], None]) -> str:
    try:
        check()
    except InfraError as error:
        return str(error)
    return ""
