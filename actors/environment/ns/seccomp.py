"""The system-call filter of a sandbox's commands, as a classic BPF program.

Refused with EPERM: what could change mounts or namespaces, look into other processes, load code into the kernel, or
reach a kernel surface that no build or test needs. `clone3` answers ENOSYS, because its flags lie in memory that a
filter can't read; every libc then falls back to `clone`, whose namespace flags are refused. Sockets are only of the
families local, IPv4, IPv6 and netlink: vsock would reach the hypervisor past the network namespace. Calls of another
architecture, x32 included, are refused as a whole.
"""

import errno
import struct

from odradek.actors.environment.ns.linux import MACHINE

NAMESPACE_FLAGS = 0x7E020000
"""All CLONE_NEW* bits of `clone`; CLONE_NEWTIME exists for clone3 and unshare only."""

SOCKET_FAMILIES = (1, 2, 10, 16)
X32_BIT = 0x40000000

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_DENIED = {
    "x86_64": {
        "ptrace": 101, "syslog": 103, "personality": 135, "pivot_root": 155, "chroot": 161, "acct": 163, "mount": 165,
        "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171,
        "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "kexec_load": 246,
        "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "move_pages": 279, "perf_event_open": 298,
        "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "kexec_file_load": 320,
        "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "acct": 89, "personality": 92,
        "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "syslog": 116, "ptrace": 117,
        "reboot": 142, "sethostname": 161, "setdomainname": 162, "add_key": 217, "request_key": 218, "keyctl": 219,
        "swapon": 224, "swapoff": 225, "move_pages": 239, "perf_event_open": 241, "fanotify_init": 262,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "bpf": 280, "userfaultfd": 282,
        "kexec_file_load": 294,
    },
}  # fmt: skip

_DENIED_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442,
    "quotactl_fd": 443,
}  # fmt: skip
"""Calls added since the numbers became the same for all architectures."""

_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_AFFINITY = {"x86_64": 203, "aarch64": 122}
_CLONE3 = 435

_LOAD, _JUMP_EQUAL, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARG0 = 0, 4, 16
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def build_filter(*, pin_processors: bool, machine: str = MACHINE) -> bytes:
    """The program. `pin_processors`: commands may not choose their processors, since that is how a limit is held."""
    refuse = _instruction(_RETURN, _ERRNO | errno.EPERM)
    program = [
        _instruction(_LOAD, _OFFSET_ARCH),
        _instruction(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        refuse,
        _instruction(_LOAD, _OFFSET_NUMBER),
        _instruction(_JUMP_GE, X32_BIT, 0, 1),
        refuse,
    ]
    denied = {**_DENIED[machine], **_DENIED_EVERYWHERE}
    if pin_processors:
        denied["sched_setaffinity"] = _AFFINITY[machine]
    for number in sorted(denied.values()):
        program += [_instruction(_JUMP_EQUAL, number, 0, 1), refuse]
    program += [_instruction(_JUMP_EQUAL, _CLONE3, 0, 1), _instruction(_RETURN, _ERRNO | errno.ENOSYS)]
    program += [
        _instruction(_JUMP_EQUAL, _CLONE[machine], 0, 4),
        _instruction(_LOAD, _OFFSET_ARG0),
        _instruction(_JUMP_SET, NAMESPACE_FLAGS, 0, 1),
        refuse,
        _instruction(_RETURN, _ALLOW),
    ]
    families = len(SOCKET_FAMILIES)
    program += [_instruction(_JUMP_EQUAL, _SOCKET[machine], 0, families + 2), _instruction(_LOAD, _OFFSET_ARG0)]
    for index, family in enumerate(SOCKET_FAMILIES):
        program.append(_instruction(_JUMP_EQUAL, family, families - index, 0))
    program += [_instruction(_RETURN, _ERRNO | errno.EAFNOSUPPORT), _instruction(_RETURN, _ALLOW)]
    return b"".join(program)
