"""What is compared with the run before: exchanged as changes, or all of it in stages.

Of what is sent whole, each byte enters a host once and is handed on there (`stages`); changes go to
each rank that wants them. So tensors whose changes are sent have two sets of messages, where hosts
have replicas, and a run takes one of them::

    first run, or most changed     source -> one rank of a host -> the others     in stages
    any other run                  source -> each rank, what changed

Which it is, all ranks say alike before the run. A sender that looked at some of what it sends says
whether most of it seems to have changed (`seems_changed`).
"""

from __future__ import annotations

from collections.abc import Iterator

from reshard.torch.exchange.changes import ChangeExchange
from reshard.torch.exchange.exchange import MessageExchange


class ComparedExchange:
    """The messages of one rank for tensors of which runs send what changed.

    `sent_bytes` and `received_bytes` are of the last run, and before any of a whole one.

    Args:
        changes: sends what changed, between ranks that compare.
        near: sends the rest of the same tensors, to ranks that share memory; None without any.
        staged: sends all of both in stages; None where no tensor is.
    """

    def __init__(
        self,
        changes: ChangeExchange,
        near: MessageExchange | None = None,
        staged: MessageExchange | None = None,
    ) -> None:
        self._changes, self._near, self._staged = changes, near, staged
        self._was_staged = staged is not None

    def seems_changed(self) -> bool:
        """Whether what this rank sends had better go in stages, as most of it has changed.

        True where it sends nothing, False where there are no stages.
        """
        if self._staged is None:
            return not self._changes.sends
        return self._changes.seems_changed()

    def run(self, is_whole: bool) -> None:
        """Send what changed, or all where `is_whole`, which all ranks say alike.

        Raises RunError where a message does not come; the targets are not usable then.
        """
        self._was_staged = is_whole and self._staged is not None
        if is_whole and self._staged is not None:
            self._staged.run()
            self._changes.remember()
            return
        self._changes.run(is_whole)
        if self._near is not None:
            self._near.run()

    @property
    def _of_last_run(self) -> Iterator[ChangeExchange | MessageExchange]:
        if self._was_staged and self._staged is not None:
            yield self._staged
            return
        yield self._changes
        if self._near is not None:
            yield self._near

    @property
    def sent_bytes(self) -> int:
        """What this rank sent in the last run."""
        return sum(one.sent_bytes for one in self._of_last_run)

    @property
    def received_bytes(self) -> int:
        """What it received, likewise."""
        return sum(one.received_bytes for one in self._of_last_run)

    @property
    def kept_bytes(self) -> int:
        """What it remembers of what it sent."""
        return self._changes.kept_bytes

    @property
    def extra_bytes(self) -> int:
        """The most memory that a run takes."""
        others = (one.extra_bytes for one in (self._near, self._staged) if one is not None)
        return max(self._changes.extra_bytes, *others, 0)
