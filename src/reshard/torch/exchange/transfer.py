"""A transfer: tensors that move between ranks, prepared once and run any number of times.

Its phases run in this order. The first two are done by the caller, since calls agree
on different things: a tensor (`redistribution`), partitions, or a model::

    agree      all ranks compare their calls                        `agreement.agree`
    plan       which rank sends which part to which                 `RankTransfers`, or a program
    prepare    list messages, allocate slots, find carriers         `Transfer.prepare`
    start      pack and send what fits in memory; copy what stays   `Transfer.start`
    finish     send the rest, receive and unpack                    `Transfer.finish`
    confirm    all ranks have everything, or all raise

A rank that fails closes the group's connections, so that all others raise its cause. The caller's
tensors that were written into are then marked (`consistency`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from reshard.errors import ReshardError, RunError
from reshard.torch.exchange.agreement import confirm
from reshard.torch.exchange.consistency import mark_unusable, mark_usable
from reshard.torch.exchange.exchange import BackgroundExchange, MessageExchange, next_tag
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.packing.messages import RankTransfers


class Transfer:
    """A prepared movement of tensors between ranks. It can run any number of times.

    `sent_bytes`, `received_bytes` and `extra_bytes`, memory beyond the tensors, are this rank's.

    Args:
        make_run: prepares an exchange or a run of a program for this rank's tensors. Its errors,
            such as for lack of memory, are raised on all ranks.
        group: of all ranks, which prepare and run alike.
        written: tensors of the caller that a failed run leaves partly written, with their memory.
        in_background: whether to run in a separate thread, if the device allows it.
    """

    def __init__(
        self,
        make_run: Callable[[], Any],
        group: RankGroup,
        written: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
        in_background: bool = False,
    ) -> None:
        self._group, self._written = group, tuple(written)
        # Count before any step that may fail on this rank only, so that all ranks count alike.
        tag = next_tag(group)
        with group.errors_on_all():
            run = make_run()
        if isinstance(run, MessageExchange):
            run.tag = tag
            if in_background and run.can_leave_its_thread:
                run = BackgroundExchange(run, tag)
        self._run = run
        self.is_done = False

    @classmethod
    def prepare(
        cls,
        tensors: Sequence[RankTransfers],
        group: RankGroup,
        device: torch.device,
        extra_bytes: int,
        written: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
        in_background: bool = False,
    ) -> Transfer:
        """Prepare an exchange of messages.

        Args:
            tensors: this rank's transfers of each tensor, in the same order on every rank.
            device: of the tensors.
            extra_bytes: the maximum memory beyond the tensors; the same on every rank.
        """

        def make_run() -> MessageExchange:
            return MessageExchange(tensors, group.rank, group, device, extra_bytes)

        return cls(make_run, group, written, in_background)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in a run."""
        return int(self._run.sent_bytes)

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank receives in a run."""
        return int(self._run.received_bytes)

    @property
    def extra_bytes(self) -> int:
        """The memory used beyond the tensors; of a program, the memory used so far."""
        return int(self._run.extra_bytes)

    @property
    def has_arrived(self) -> bool:
        """Whether this rank has sent and received everything, or failed."""
        return self._run.is_done if isinstance(self._run, BackgroundExchange) else self.is_done

    def run(self) -> None:
        """Move the tensors. Raises as `finish` does."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Start. Sources must not change, nor targets be used, until `finish` has returned."""
        self.is_done = False
        try:
            self._run.start()
        except BaseException:
            self._mark(False)
            raise

    def finish(self) -> None:
        """Return when all ranks have everything.

        Raises:
            RunError: on every rank, if a message does not arrive or a rank does not finish; tensors
                are partly written then.
        """
        if self._run.has_failed:
            raise RunError("this redistribution failed; its result is not usable")
        try:
            self._run.finish()
            confirm(self._group)
        except BaseException as error:
            self._run.has_failed = True
            self._mark(False)
            self._group.break_off(error)
            if isinstance(error, ReshardError):
                shown = "the result"
                if self._written:
                    out, _ = self._written[0]
                    shown = f"out, {out.dtype} of shape {list(out.shape)},"
                raise RunError(f"{error}; {shown} is partly new and not usable") from error
            raise
        self._mark(True)
        self.is_done = True

    def _mark(self, is_usable: bool) -> None:
        for tensor, memory in self._written:
            # Messages are written without autograd noticing, so mark the tensors as changed.
            if not memory.is_inference():
                torch.autograd.graph.increment_version(memory)
            (mark_usable if is_usable else mark_unusable)(tensor)
