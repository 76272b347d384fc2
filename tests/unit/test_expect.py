"""A store whose answer breaks off in the middle of `100 Continue`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from odradek.streams.blobs import S3Config, S3Store
from odradek.streams.errors import StoreUnreachable

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
OK = b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 0\r\n\r\n'


class Breaking:
    """Answers each connection's first request with the next of some bytes, and ends it."""

    def __init__(self, *answers: list[bytes]) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._answers = answers
        self.served = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.close()

    def _serve(self) -> None:
        for parts in self._answers:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with connection:
                for part in parts:
                    connection.recv(65536)
                    connection.sendall(part)
            self.served += 1


@pytest.fixture
def stores() -> Iterator[list[S3Store]]:
    made: list[S3Store] = []
    yield made
    for store in made:
        store.close()


def store_at(port: int, made: list[S3Store]) -> S3Store:
    config = S3Config(bucket="b", endpoint=f"http://127.0.0.1:{port}", access_key="a", secret_key="s")
    made.append(S3Store(config))
    return made[-1]


@pytest.mark.parametrize("length", range(len("HTTP/1.1 100 Continue\r\n"), len(CONTINUE)))
async def test_an_interim_answer_that_breaks_off_is_a_broken_connection(length: int, stores: list[S3Store]) -> None:
    """It used to spin for ever in a thread that nothing could end."""
    server = Breaking(*[[CONTINUE[:length]]] * 9)
    try:
        with pytest.raises(StoreUnreachable, match=r"no answer .ConnectionClosedError."):
            await store_at(server.port, stores).put("k", b"content")
        assert server.served > 1, "it was tried again"
    finally:
        server.close()


async def test_the_next_try_may_succeed(stores: list[S3Store]) -> None:
    server = Breaking([CONTINUE[:-1]], [CONTINUE, OK])
    try:
        assert await store_at(server.port, stores).put_if_absent("k", b"content")
    finally:
        server.close()
