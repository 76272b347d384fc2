"""What the driver needs of its host, tried and not guessed, with the remedy for what is missing."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from odradek.actors.environment.errors import SandboxError
from odradek.actors.environment.ns import cgroup, linux
from odradek.actors.environment.ns.removal import remove_cgroups
from odradek.actors.environment.protocol import PreflightCheck, SandboxSpec
from odradek.sandbox_images.store import Image, ImageStore
from odradek.sandbox_images.tree import FileSpec

if TYPE_CHECKING:
    from odradek.actors.environment.ns.driver import NsDriver

TRIAL_DEADLINE_S = 10.0
"""Seconds for a sandbox without any program. Too low: a loaded host seems unfit; too high: preflight hangs."""

USER_NAMESPACES = Path("/proc/sys/user/max_user_namespaces")
RESTRICTIONS = (
    (Path("/proc/sys/kernel/unprivileged_userns_clone"), "0", "sysctl kernel.unprivileged_userns_clone=1"),
    (
        Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"),
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)
"""Switches of distributions that forbid user namespaces to ordinary users, and how to allow them."""


async def run(driver: "NsDriver") -> Sequence[PreflightCheck]:
    capabilities = await driver.capabilities()
    held = "cgroup" in capabilities.enforcement["memory_bytes"]
    return (
        PreflightCheck("machine", linux.supported(), linux.MACHINE, "driver ns runs on x86_64 and aarch64"),
        _user_namespaces(),
        await _trial(driver),
        PreflightCheck(
            "limits",
            True,
            "cgroups" if held else "no writable cgroup with memory, pids and cpu: limits are held by rlimits only",
        ),
    )


def _user_namespaces() -> PreflightCheck:
    with suppress(OSError):
        if int(USER_NAMESPACES.read_text()) == 0:
            return PreflightCheck("user namespaces", False, "the limit is 0", "sysctl user.max_user_namespaces=15000")
    for path, bad, remedy in RESTRICTIONS:
        with suppress(OSError):
            if path.read_text().strip() == bad:
                return PreflightCheck("user namespaces", False, f"{path} is {bad}", remedy)
    return PreflightCheck("user namespaces", True, "allowed")


async def _trial(driver: "NsDriver") -> PreflightCheck:
    """Make a sandbox without any program: namespaces, overlay, /proc, devices."""
    spec = SandboxSpec(image=_empty_image(driver.images), lifetime_s=TRIAL_DEADLINE_S)
    try:
        sandbox = await driver.create(spec, deadline_s=TRIAL_DEADLINE_S)
        await sandbox.destroy()
    except SandboxError as error:
        return PreflightCheck("sandbox", False, str(error), _remedy(str(error)))
    return PreflightCheck("sandbox", True, "made and removed")


def _empty_image(images: ImageStore) -> str:
    names = ("proc", "dev", "tmp", "workspace")
    layer = images.layer_from_files({name: FileSpec(directory=True, mode=0o755) for name in names}, prefix="")
    return images.put_image(Image(layers=(layer,), name="preflight"))


def _remedy(error: str) -> str:
    if "mount proc" in error:
        return "/proc is partly hidden, as in a container: run that with --security-opt systempaths=unconfined"
    if "mount overlay" in error:
        return "overlay in user namespaces needs Linux 5.11, and a state directory on ext4, xfs, btrfs or tmpfs"
    if "clone" in error or "uid_map" in error:
        return "allow user namespaces (in a container: --security-opt seccomp=unconfined apparmor=unconfined)"
    return "see the error"


def find_cgroups() -> cgroup.Place | None:
    try:
        return cgroup.find(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    except OSError:
        return None


def try_cgroups(place: cgroup.Place, name: str, owner: int) -> cgroup.Place | None:
    """The driver's own group below `place`, or None if this host refuses after all; tried with real limits."""
    ours = place.below(f"{cgroup.SHARED}/{name}")
    try:
        cgroup.make_parent(place, name, owner)
        cgroup.make_group(ours, "trial", {"memory": 64 << 20, "pids": 8, "cpu": 1.0})
        remove_cgroups([str(path) for path in ours.paths("trial")])
    except OSError:
        cgroup.remove_parent(ours)
        return None
    return ours
