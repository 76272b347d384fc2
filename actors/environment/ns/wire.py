"""Messages between driver, zygote and a sandbox's init: one JSON object a packet, with file descriptors.

The sockets are SOCK_SEQPACKET pairs: a packet arrives whole or not at all, and the end of either process is seen by the
other. Both sides are ours; nothing that runs in a sandbox ever holds such a socket.
"""

import json
import socket
from typing import Any

MAX_MESSAGE_BYTES = 192 * 1024
"""Longest packet. Linux limits one by the socket's send buffer (208 KiB by default); more must be a file."""

MAX_FDS = 4

Message = dict[str, Any]


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def send(sock: socket.socket, message: Message, fds: tuple[int, ...] = ()) -> None:
    """Send one packet; `BlockingIOError` when the other side is behind, on a socket that does not block."""
    socket.send_fds(sock, [encode(message)], fds)


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """The next packet, None when the other side has ended. Descriptors are not inherited by programs."""
    try:
        data, fds, flags, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    if not data:
        return None
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise OSError(f"packet of more than {MAX_MESSAGE_BYTES} bytes or {MAX_FDS} descriptors")
    return json.loads(data), fds
