"""What a spec demands against what a host offers: strongest first, never silently weaker."""

from pathlib import Path

import pytest

from odradek.actors.environment.errors import SandboxSpecError
from odradek.actors.environment.ns import cgroup, seccomp
from odradek.actors.environment.ns.limits import plan
from odradek.actors.environment.protocol import Limit, Limits

ALL = Limits(cpus=Limit(0.5), memory_bytes=Limit(64 << 20), pids=Limit(8), disk_bytes=Limit(1 << 20))


def test_cgroups_are_taken_where_they_are() -> None:
    found = plan(ALL, has_cgroup=True)
    assert found.cgroup == {"cpu": 0.5, "memory": 64 << 20}
    assert (found.rlimits, found.processors) == ({"disk_bytes": 1 << 20, "pids": 8}, [])
    assert plan(Limits(pids=Limit(8, weakest="cgroup")), has_cgroup=True).cgroup == {"pids": 8}


def test_rlimits_hold_what_accepts_them() -> None:
    found = plan(ALL, has_cgroup=False)
    assert found.rlimits == {"memory_bytes": 64 << 20, "pids": 8, "disk_bytes": 1 << 20}
    assert found.cgroup == {}


@pytest.mark.parametrize("name", ["cpus", "memory_bytes", "pids", "disk_bytes"])
def test_a_demand_for_cgroups_is_refused_without_them(name: str) -> None:
    with pytest.raises(SandboxSpecError, match=name):
        plan(Limits(**{name: Limit(4, weakest="cgroup")}), has_cgroup=False)


def test_address_space_too_small_for_any_command_is_refused() -> None:
    with pytest.raises(SandboxSpecError, match="memory_bytes"):
        plan(Limits(memory_bytes=Limit(1 << 20)), has_cgroup=False)


@pytest.mark.parametrize("amount", [0, -1, float("inf"), float("nan")])
def test_amounts_must_be_amounts(amount: float) -> None:
    with pytest.raises(SandboxSpecError, match="positive"):
        plan(Limits(pids=Limit(amount)), has_cgroup=True)


def test_delegated_v2_cgroup_is_found_above_our_own(tmp_path: Path) -> None:
    own = tmp_path / "user/app"
    own.mkdir(parents=True)
    for directory, handed in ((own, ""), (own.parent, "cpu memory pids"), (tmp_path, "cpu memory pids io")):
        (directory / "cgroup.subtree_control").write_text(handed)
    mountinfo = f"30 20 0:26 / {tmp_path} rw,nosuid - cgroup2 cgroup2 rw\n"
    place = cgroup.find(mountinfo, "0::/user/app\n")
    assert place is not None
    assert (place.version, set(place.parents.values())) == (2, {own.parent})


def test_v2_without_controllers_is_no_place(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("")
    assert cgroup.find(f"30 20 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw\n", "0::/\n") is None
    assert cgroup.find("21 20 8:1 / / rw - ext4 /dev/root rw\n", "") is None


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_jumps_stay_inside_and_every_path_returns(machine: str) -> None:
    import struct

    raw = seccomp.build_filter(pin_processors=True, machine=machine)
    program = list(struct.iter_unpack("HBBI", raw))
    assert len(raw) % 8 == 0
    assert len(program) < 4096
    assert program[-1][0] == 0x06
    for at, (code, if_true, if_false, _) in enumerate(program):
        if code & 0x07 == 0x05:
            assert at + 1 + max(if_true, if_false) < len(program)


def _verdict(number: int, argument: int, machine: str, *, pinned: bool = False) -> int:
    """Run the filter as the kernel would; the return value's errno, 0 for allowed."""
    import struct

    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    data = {0: number, 4: arch, 16: argument}
    program = list(struct.iter_unpack("HBBI", seccomp.build_filter(pin_processors=pinned, machine=machine)))
    at, accumulator = 0, 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        if code == 0x20:
            accumulator = data[value]
        elif code == 0x06:
            return 0 if value == 0x7FFF0000 else value & 0xFFFF
        else:
            hit = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            at += if_true if hit else if_false


@pytest.mark.parametrize(
    ("machine", "number", "argument", "expected"),
    [
        ("x86_64", 0, 0, 0),  # read
        ("x86_64", 165, 0, 1),  # mount
        ("x86_64", 56, 17, 0),  # clone as fork
        ("x86_64", 56, 0x10000000 | 17, 1),  # clone into a user namespace
        ("x86_64", 56, 0x003D0F00, 0),  # clone as thread
        ("x86_64", 435, 0, 38),  # clone3
        ("x86_64", 41, 2, 0),  # socket, IPv4
        ("x86_64", 41, 1, 0),  # socket, local
        ("x86_64", 41, 40, 97),  # socket, vsock
        ("x86_64", 0x40000000, 0, 1),  # x32
        ("x86_64", 425, 0, 1),  # io_uring
        ("aarch64", 63, 0, 0),  # read
        ("aarch64", 40, 0, 1),  # mount
        ("aarch64", 198, 17, 97),  # socket, packet
        ("aarch64", 198, 16, 0),  # socket, netlink
    ],
)
def test_filter_decides(machine: str, number: int, argument: int, expected: int) -> None:
    assert _verdict(number, argument, machine) == expected


def test_pinned_commands_may_not_choose_their_processors() -> None:
    assert _verdict(203, 0, "x86_64") == 0
    assert _verdict(203, 0, "x86_64", pinned=True) == 1
