"""A link to a server on this machine: a proxy that passes bytes on late, and at a rate.

What one side sends arrives `latency_s` later at the other, so a request and its answer take twice
that. All connections share the link: in each direction it passes `bytes_per_s` in all.

    with slow_link(port_of_the_server, latency_s=0.01, bytes_per_s=50e6) as port: ...

`passed_bytes()` makes what counts the bytes that went to the server and came from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

_PIECE_BYTES = 64 << 10
# What may be on its way in one direction of a connection: as much as a window of TCP.
_WINDOW = 64


class _Direction:
    """One direction of the link, with the time at which it is free again."""

    def __init__(self, latency_s: float, bytes_per_s: float, passed: Any, number: int) -> None:
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._free_s = 0.0
        self._passed, self._number = passed, number

    def arrival_s(self, size_bytes: int, now_s: float) -> float:
        """When bytes that are sent now arrive."""
        self._passed[self._number] += size_bytes
        self._free_s = max(self._free_s, now_s) + size_bytes / self._bytes_per_s
        return self._free_s + self._latency_s

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what comes, until it ends."""
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WINDOW)

        async def deliver() -> None:
            while True:
                arrival_s, piece = await under_way.get()
                await asyncio.sleep(max(arrival_s - loop.time(), 0))
                if not piece:
                    break
                writer.write(piece)
                await writer.drain()
            with contextlib.suppress(OSError):
                writer.write_eof()

        delivery = asyncio.create_task(deliver())
        with contextlib.suppress(ConnectionError):
            while not delivery.done():
                piece = await reader.read(_PIECE_BYTES)
                await under_way.put((self.arrival_s(len(piece), loop.time()), piece))
                if not piece:
                    break
        with contextlib.suppress(ConnectionError):
            await delivery


def _serve(
    server_port: int, latency_s: float, bytes_per_s: float, told: Connection, passed: Any
) -> None:
    async def run() -> None:
        forth, back = (_Direction(latency_s, bytes_per_s, passed, number) for number in range(2))

        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inner, outer = await asyncio.open_connection("127.0.0.1", server_port)
            await asyncio.gather(forth.carry(reader, outer), back.carry(inner, writer))
            for one in (writer, outer):
                one.close()

        server = await asyncio.start_server(meet, "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def passed_bytes() -> Any:
    """Two counts: bytes to the server, and from it."""
    return multiprocessing.get_context("spawn").Array("q", 2, lock=False)


@contextlib.contextmanager
def slow_link(
    server_port: int, latency_s: float, bytes_per_s: float, passed: Any = None
) -> Iterator[int]:
    """The port of a link to a server of this machine, until the end of the `with`."""
    here, there = multiprocessing.Pipe()
    proxy = multiprocessing.get_context("spawn").Process(
        target=_serve,
        args=(server_port, latency_s, bytes_per_s, there, passed or passed_bytes()),
        daemon=True,
    )
    proxy.start()
    try:
        yield here.recv()
    finally:
        proxy.kill()
        proxy.join()
