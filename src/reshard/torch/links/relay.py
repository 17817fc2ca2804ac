"""Relays: engines that hand on weights bucket by bucket, while they still get others.

A hand-on is a refit from one engine's tensors to another's, in a group of the ranks of both. It
goes in the buckets in which the weights arrive::

    from ahead      |  0  |  1  |  2  |  3  |
    handed on             |  0  |  1  |  2  |  3  |

Each hand-on has a thread of its own, which waits until what a bucket of it needs is complete here.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.errors import RunError
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.timeline import span
from reshard.torch.links.orders import HandOn
from reshard.torch.refitting.refit import Refit


class BucketGate:
    """Which batches of a run are complete on this rank, for threads that wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._complete = 0
        self._error: BaseException | None = None

    def begin(self, number: int) -> None:
        """A batch begins; nobody waits for that."""

    def end(self, number: int) -> None:
        """A batch is complete; so are those before it."""
        with self._changed:
            self._complete = number + 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """No more come."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        """Return once a batch is complete. Raises RunError where it will not be."""
        with self._changed:
            self._changed.wait_for(lambda: self._complete > number or self._error is not None)
            if self._complete <= number:
                raise RunError(f"the weights to hand on did not come: {self._error}")


@dataclass(frozen=True, slots=True)
class Relay:
    """One end of a hand-on, prepared."""

    hand_on: HandOn
    group: RankGroup
    refit: Refit


class _Passage:
    """What the buckets of a hand-on wait for: the batch ahead that completes each."""

    def __init__(self, gate: BucketGate, needs: Sequence[int]) -> None:
        self._gate, self._needs = gate, needs

    def begin(self, number: int) -> None:
        if self._needs[number] >= 0:
            with span("wait for what to hand on"):
                self._gate.wait(self._needs[number])

    def end(self, number: int) -> None:
        pass


class RelayThread:
    """A hand-on that runs beside what fills this engine."""

    def __init__(self, relay: Relay, ahead: Refit, gate: BucketGate) -> None:
        self.relay = relay
        self.error: BaseException | None = None
        last = max(ahead.batch_of.values(), default=-1)
        needs = [
            max((ahead.batch_of.get(name, last) for name in names), default=-1)
            for names in relay.refit.source_names
        ]
        self._passage = _Passage(gate, needs)
        # With its context: what records this thread records that one.
        call = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=call, args=(self._run,), name="reshard relay", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        try:
            # Its source is usable when the gate says so, not yet when the run begins.
            self.relay.refit.run(self._passage, checks_source=False)
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()
