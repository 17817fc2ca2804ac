"""Parts that are sent in threads of their own, while others go on to read and write.

Both directions of a link are busy then. As many parts are under way as there are threads; who has
another one waits, so that what is written and not sent stays little.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from reshard.checkpoint.files.descriptors import Closing


class PartSender(Closing):
    """Sends parts by their numbers, with `send`. What that raises is raised by the next call.

    Args:
        send: sends a part.
        count: of the threads.

    >>> sent = []
    >>> with PartSender(sent.append, 2) as sender:
    ...     sender.put(3)
    ...     sender.finish()
    >>> sent
    [3]
    """

    def __init__(self, send: Callable[[int], None], count: int) -> None:
        self._send, self._count = send, count
        self._threads = ThreadPoolExecutor(count, "reshard-send")
        self._free = threading.Semaphore(count)
        self._error: BaseException | None = None

    def put(self, part: int) -> None:
        """Send a part, as soon as one of the threads is free. Raises what an earlier one raised."""
        self.check()
        self._free.acquire()
        self._threads.submit(self._send, part).add_done_callback(self._end)

    def _end(self, future: Future[None]) -> None:
        if not future.cancelled():
            self._error = self._error or future.exception()
        self._free.release()

    def check(self) -> None:
        """Raise what a part that was put raised."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait until all parts that were put are sent. Raises what one of them raised."""
        for _ in range(self._count):
            self._free.acquire()
        self._free.release(self._count)
        self.check()

    def close(self) -> None:
        """Wait for the parts that are under way; no other can be put."""
        self._threads.shutdown(cancel_futures=True)
