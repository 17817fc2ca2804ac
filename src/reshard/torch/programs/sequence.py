"""Sequences of movements: ranks that run a list in the same order agree on it once.

The movements of a sequence are not agreed on separately::

    each alone      agree  move           agree  move           agree  move
    a sequence      agree  move           move                  move           confirm

Movements may also run in a thread of the sequence, in the order in which they were begun, while the
rank computes::

    the rank      begin a   compute   begin b   compute   wait for a   compute   wait for b
    the thread         | a ---------------------- | b ----------------------- |

All ranks begin movements in the same order, so that each waits for a single message at a time.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch

from reshard.torch.exchange.agreement import CallSignature, Group, agree, confirm
from reshard.torch.exchange.groups import RankGroup, rank_group


class MovementSequence:
    """The movements of a run of a program, on which all ranks have agreed.

    Args:
        group: of all ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._begun: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[Any] | None = None

    def begin(self, move: Callable[[], Any], is_here: bool = False) -> Future[Any]:
        """Run a movement after those that have begun.

        The data that it reads must not change before it has been waited for, and no movement may
        run in another thread until all of the sequence are waited for.

        Args:
            move: runs the movement.
            is_here: whether it must run in this thread, at once.
        """
        begun: Future[Any] = Future()
        if is_here:
            if self._last is not None:
                self._last.result()
            _fulfil(begun, move)
            return begun
        self._last = begun
        if self._thread is None:
            # Copy PyTorch's thread-local modes and this context, so that the thread has the same.
            modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            self._thread = threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._run, *modes),
                name="reshard movements",
                # A daemon thread, so that a thread that waits forever does not keep the process
                # alive.
                daemon=True,
            )
            self._thread.start()
        self._begun.put((move, begun))
        return begun

    def close(self) -> None:
        """End the thread after the movements that have begun."""
        if self._thread is not None:
            self._begun.put(None)
            self._thread.join()

    def _run(self, has_gradients: bool, is_inference: bool) -> None:
        error: BaseException | None = None
        with torch.inference_mode(is_inference), torch.set_grad_enabled(has_gradients):
            while (listed := self._begun.get()) is not None:
                move, begun = listed
                # A source is freed as soon as no other reference to it is left.
                del listed
                if error is None:
                    error = _fulfil(begun, move)
                else:
                    begun.set_exception(error)
                del move


def _fulfil(begun: Future[Any], move: Callable[[], Any]) -> BaseException | None:
    """Run a movement. Return its error, or None."""
    try:
        begun.set_result(move())
    except BaseException as error:
        begun.set_exception(error)
        return error
    return None


@contextmanager
def agreed_sequence(group: Group, digest: bytes) -> Iterator[MovementSequence]:
    """Enter a sequence of movements that all ranks run in the same order, compared by its digest.

    Movements inside run as agreed. A rank that raises inside closes the group's connections, so
    that the others raise its cause at once.

    Raises:
        PlanError: the sequences of ranks differ.
        RunError: a rank does not arrive, or does not reach the end.
    """
    among: RankGroup = rank_group(group)
    with among.sequence():
        agree(CallSignature({"the program": digest}), among)
        sequence = MovementSequence(among)
        try:
            yield sequence
        except BaseException as error:
            # Notify before waiting for the thread, which may be in the middle of a movement.
            among.break_off(error)
            raise
        finally:
            sequence.close()
        confirm(among)
