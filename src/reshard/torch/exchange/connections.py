"""Gloo connections between ranks, on which a lost message does not block until the timeout.

When a connection closes, gloo (as of torch 2.13) reports this to queued messages only. It does not
report it to the message that is being received, or to those that are being written: their waits
last until the group's timeout, which may be half an hour, and cannot be interrupted::

    sender      [ written | still to write ]   ends here
    receiver    [ read    | waits for these bytes ]

So a separate thread waits, and can be abandoned. The thread that needs the message checks from time
to time whether its connection is still open, and gives up if it is not.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

# The interval between checks of a connection. Each check leaks a few hundred bytes in gloo.
_POLL_S = 0.5
# The tag of messages that are never sent.
_PROBE_TAG = (1 << 30) + 1
# The tag of broadcasts and all-gathers, which are sequential.
_TOLD_TAG = (1 << 30) + 2
_AT_ONCE = timedelta(milliseconds=1)


class Connections:
    """A process group of gloo, for this process alone.

    Args:
        group: of torch, used only here.
        find_silent: returns why waiting is futile; empty if unknown.
    """

    def __init__(self, group: Any, find_silent: Callable[[], str] = str) -> None:
        self._group = group
        self.find_silent = find_silent
        # The same, within `heeding`.
        self.find_loss: Callable[[], str] = str

    @contextmanager
    def heeding(self, find_loss: Callable[[], str]) -> Iterator[None]:
        """Use another function inside that reports why waiting is futile."""
        self.find_loss = find_loss
        try:
            yield
        finally:
            self.find_loss = str

    def send(self, tensors: Sequence[torch.Tensor], receiver: int, tag: int) -> Message:
        """Begin to send to a rank of the group."""
        return Message(self, self._group.send(tensors, receiver, tag), receiver)

    def recv(self, tensors: Sequence[torch.Tensor], sender: int, tag: int) -> Message:
        """Begin to receive from a rank of the group."""
        return Message(self, self._group.recv(tensors, sender, tag), sender)

    def broadcast(self, tensor: torch.Tensor, root: int, until_s: float) -> None:
        """Broadcast the tensor of rank `root` in place, along a binomial tree.

        Raises as `Message.wait` does.
        """
        own, count = self._group.rank(), self._group.size()
        place = (own - root) % count
        # A rank receives from the position without its lowest set bit, and sends to the positions
        # with a further, lower bit. The first rank only sends.
        ahead = place & -place if place else 1 << (count - 1).bit_length()
        # In a list: an error keeps its frames' objects, and a message would keep connections open.
        messages: list[Message] = []
        try:
            if place:
                messages.append(self.recv([tensor], (own - ahead) % count, _TOLD_TAG))
                _wait_for_all(messages, until_s)
            while ahead := ahead >> 1:
                if place + ahead < count:
                    messages.append(self.send([tensor], (own + ahead) % count, _TOLD_TAG))
            _wait_for_all(messages, until_s)
        finally:
            messages.clear()

    def all_gather(self, tensor: torch.Tensor, until_s: float) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which have equal shapes.

        After each round a rank has the tensors of twice as many ranks (Bruck and others, 1997).
        Raises as `Message.wait` does.
        """
        own, count = self._group.rank(), self._group.size()
        # The tensors of the ranks from this rank on.
        tensors = torch.empty((count, *tensor.shape), dtype=tensor.dtype)
        tensors[0] = tensor
        messages: list[Message] = []
        have = 1
        try:
            while have < count:
                more = min(have, count - have)
                coming = tensors[have : have + more]
                messages.append(self.send([tensors[:more]], (own - have) % count, _TOLD_TAG))
                messages.append(self.recv([coming], (own + have) % count, _TOLD_TAG))
                _wait_for_all(messages, until_s)
                have += more
        finally:
            messages.clear()
        return [tensors[(rank - own) % count] for rank in range(count)]

    def is_closed(self, rank: int) -> bool:
        """Return whether no more messages can arrive from a rank."""
        try:
            # Gloo refuses a receive on a closed connection, and queues it on an open one.
            self._group.recv([torch.empty(0)], rank, _PROBE_TAG)
        except RuntimeError:
            return True
        return False

    def close(self) -> None:
        """Close all connections, even if remaining messages or errors would keep them open."""
        for rank in range(self._group.size()):
            if rank != self._group.rank():
                # After the timeout of a message, gloo closes all connections of the group.
                with suppress(RuntimeError):
                    self._group.recv([torch.empty(0)], rank, _PROBE_TAG).wait(_AT_ONCE)


class Message:
    """A message in flight to or from a rank."""

    __slots__ = ("_connections", "_rank", "_work")

    def __init__(self, connections: Connections, work: Any, rank: int) -> None:
        self._connections, self._work, self._rank = connections, work, rank

    def wait(
        self, until_s: float = math.inf, watched: Iterable[int] = (), patience_s: float = 0
    ) -> None:
        """Wait until it is sent or received, or until the group's timeout.

        Args:
            until_s: the deadline, by `time.monotonic`.
            watched: other ranks; once the connection to any of them is closed, wait for
                `patience_s` and no longer.

        Raises RuntimeError if it is not sent or received.
        """
        ends_s = math.inf

        def find_loss() -> str:
            nonlocal ends_s
            if self._connections.is_closed(self._rank):
                return "the connection closed in the middle of a message"
            if ends_s == math.inf and any(map(self._connections.is_closed, watched)):
                ends_s = time.monotonic() + patience_s
            if time.monotonic() >= ends_s:
                return "another connection closed, and no message came after it"
            return self._connections.find_silent() or self._connections.find_loss()

        waiter = _IDLE.pop() if _IDLE else _Waiter()
        waiter.wait(self._work, find_loss, until_s)


def _wait_for_all(messages: list[Message], until_s: float) -> None:
    """Wait for messages, and remove each from the list."""
    while messages:
        messages.pop().wait(until_s)


class _Waiter:
    """A thread that waits for torch works sequentially."""

    def __init__(self) -> None:
        # Both locks are held: a work releases the first when it is passed, the second when it ends.
        self._given, self._ended = threading.Lock(), threading.Lock()
        self._given.acquire()
        self._ended.acquire()
        self._works: list[Any] = []
        self._error: RuntimeError | None = None
        # A daemon thread: a wait that gloo never ends must not keep the process alive.
        threading.Thread(target=self._run, name="reshard wait", daemon=True).start()

    def _run(self) -> None:
        while self._given.acquire() and self._works:
            try:
                self._works[0].wait()
            except RuntimeError as error:
                # Without its frames, which keep the work alive.
                self._error = error.with_traceback(None)
            self._works.clear()
            self._ended.release()

    def wait(self, work: Any, find_loss: Callable[[], str], until_s: float) -> None:
        """Wait for a work, or until it is lost. Raises RuntimeError if it fails or is lost."""
        self._works.append(work)
        self._given.release()
        has_ended, problem = False, ""
        try:
            while not problem and not (has_ended := self._has_ended(until_s)):
                if problem := find_loss():
                    # It may have ended meanwhile; then its own error is more precise.
                    has_ended = self._ended.acquire(timeout=_POLL_S)
                elif time.monotonic() >= until_s:
                    problem = "the time to wait for all ranks is up"
        finally:
            if not has_ended:
                # The thread ends if it gets no further work.
                self._given.release()
        if not has_ended:
            raise RuntimeError(problem)
        error, self._error = self._error, None
        _IDLE.append(self)
        if error is not None:
            raise error

    def _has_ended(self, until_s: float) -> bool:
        return self._ended.acquire(timeout=max(0, min(_POLL_S, until_s - time.monotonic())))


# Idle threads. A forked process does not have them.
_IDLE: list[_Waiter] = []
os.register_at_fork(after_in_child=_IDLE.clear)
