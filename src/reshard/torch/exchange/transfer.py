"""A transfer: tensors that move between ranks, prepared once and run any number of times.

Everything that moves between ranks is a transfer: a redistribution, partitions, a refit, the
movement of an array, an output of a pipeline's stage. Its phases run in this order. The first two
are done by the caller, since calls agree on different things: a tensor, partitions, or a model::

    agree      all ranks compare their calls                        `agreement.agree`
    plan       which rank sends which part to which                 `RankTransfers`, or a program
    prepare    list messages, allocate slots, find carriers         `Transfer.prepare`
    start      pack and send what fits in memory; copy what stays   `Transfer.start`
    finish     send the rest, receive and unpack                    `Transfer.finish`
    confirm    all ranks have everything, or all raise
    verify     on request, compare what arrived with the source     `Transfer.verify`

`run` is `start` and `finish` at once. A transfer has batches, which run in order. A refit has
several; all others have a single exchange.

A rank that fails closes the group's connections, so that all others raise its cause. The caller's
tensors that were written into are then marked (`consistency`).

*In the background.* A separate thread runs the exchange, in the same order and memory, while its
rank does something else::

    main thread    start()   other work ...   finish()
    its thread         | messages, a few slots at a time |

Several transfers of a group can be in progress at once. Each has its own tag for its messages; all
ranks prepare the transfers in the same order, so that tags are equal. On devices, and with grouped
messages (NCCL), an exchange stays in the thread that began it: that thread posts the messages that
fit into memory, and the stream waits for them.

*Verification* sends no elements. Sender and receiver know which elements of a tensor were sent.
Each computes a digest of its own elements, in the dtype in which they were sent, and the receiver
compares them: 16 bytes for each tensor between two ranks, whatever its size::

    sender     up.weight 0:4 of rank 2's  ->  digest  ----->  equal?  <-  digest of 0:4  receiver

Elements that a rank copies from itself are compared directly.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from reshard.errors import ReshardError, RunError
from reshard.text import first_text
from reshard.torch.exchange import consistency
from reshard.torch.exchange.agreement import CallSignature, agree, confirm
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.packing.messages import Piece, RankTransfers, list_pieces, view_bytes
from reshard.torch.exchange.timeline import span

Calls = Sequence[Callable[[], None]]
# Tensors by name with their transfers on this rank, stage by stage; None if they are not compared:
# results of transforms and of programs, and combined contributions, differ from what was sent.
Contents = Iterable[tuple[str, Sequence[RankTransfers] | None]]
_DIGEST_BYTES = 16
_SHOWN = 8
# Tags begin at a number that users rarely choose, and repeat after this many transfers.
_FIRST_TAG, _TAGS = 1 << 20, 1 << 20


class BatchObserver(Protocol):
    """Callbacks of a run, called in its thread with each batch's number; errors end the run."""

    def begin(self, number: int, /) -> None:
        """Handle the start of a batch, before this rank reads or writes any of its tensors."""

    def end(self, number: int, /) -> None:
        """Handle the end of a batch, when this rank has read and written all of its tensors."""


class TransferBatch(NamedTuple):
    """Exchanges that run one after another, and calls before and after them.

    `exchanges` are of messages or of changes, or runs of a program. A batch that `is_staged` has
    elements between source and target: no rank begins it before all ranks do.
    """

    exchanges: Sequence[Any]
    before: Calls = ()
    after: Calls = ()
    is_staged: bool = False


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a verification on a rank.

    Attributes:
        differences: tensors whose elements on this rank differ from the source's, with the sender.
        compared_bytes: the size of the compared elements, as they were sent.
        left_out: names of tensors that cannot be compared.
    """

    differences: tuple[str, ...]
    compared_bytes: int
    left_out: tuple[str, ...]


class Transfer:
    """A prepared movement of tensors between ranks. It can run any number of times.

    Attributes:
        batches: in the order in which they run.
        is_done: whether the last run is complete on all ranks.
        in_background: whether a separate thread runs its exchange.
        has_failed: whether a run has failed, so that no other can follow.

    Args:
        group: of all ranks, which prepare and run alike.
        written: tensors of the caller that a run writes into, and a failed run leaves partly new.
        memory: the memory of `written`, where it has a version of its own.
        contents: the tensors that `verify` compares.
        result: the name of what a run writes, for errors.
        in_background: see the attribute.
        confirms: whether all ranks confirm the end of a run, and raise if any rank failed.
    """

    def __init__(
        self,
        batches: Sequence[TransferBatch],
        group: RankGroup,
        written: Iterable[torch.Tensor] = (),
        memory: Iterable[torch.Tensor] = (),
        *,
        contents: Contents = (),
        result: str = "the result",
        in_background: bool = False,
        confirms: bool = True,
    ) -> None:
        self.batches, self._group, self._result = batches, group, result
        self.in_background, self._confirms = in_background, confirms
        self._contents = contents
        self._written = tuple(written)
        self._versioned = (*self._written, *memory)
        self._uncounted = consistency.list_uncounted(self._written)
        self._is_started = False
        self._thread: threading.Thread | None = None
        self._thread_error: BaseException | None = None
        self.is_done = self.has_failed = False

    @classmethod
    def prepare(
        cls,
        make_exchange: Callable[[], Any],
        group: RankGroup,
        *written: Iterable[torch.Tensor],
        tag: int | None = None,
        in_background: bool = False,
        **options: Any,
    ) -> Transfer:
        """Prepare the transfer of a single exchange.

        Args:
            make_exchange: prepares an exchange of messages or a run of a program for this rank's
                tensors. Its errors, such as for lack of memory, are raised on all ranks.
            group: of all ranks.
            written: the tensors of the caller that a run writes into, and their memory.
            tag: of the messages, equal on all ranks; the group's next when None.
            in_background: whether to run in a separate thread, if the device allows it.
            options: further arguments of the class.
        """
        # Count before any step that may fail on this rank only, so that all ranks count alike.
        tag = next_tag(group) if tag is None else tag
        with group.errors_on_all():
            exchange = make_exchange()
        exchange.tag = tag
        in_background = in_background and exchange.can_leave_its_thread
        batches = [TransferBatch([exchange])]
        return cls(batches, group, *written, in_background=in_background, **options)

    @property
    def exchanges(self) -> list[Any]:
        """The exchanges of all batches, in order."""
        return [exchange for batch in self.batches for exchange in batch.exchanges]

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in a run; if only changes are sent, those of the last run."""
        return sum(exchange.sent_bytes for exchange in self.exchanges)

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank receives, counted as `sent_bytes`."""
        return sum(exchange.received_bytes for exchange in self.exchanges)

    @property
    def extra_bytes(self) -> int:
        """The memory used beyond the tensors; of a program, the memory used so far."""
        return sum(exchange.extra_bytes for exchange in self.exchanges)

    @property
    def has_arrived(self) -> bool:
        """Whether this rank has sent and received everything, or failed."""
        is_over = self._thread is not None and not self._thread.is_alive()
        return self.is_done or self.has_failed or is_over

    def run(self, observer: BatchObserver | None = None) -> None:
        """Move the tensors.

        Raises:
            RunError: on every rank, if a message does not arrive or a rank does not finish, such as
                for a transform that fails there; tensors are partly written then.
        """
        self.is_done = False
        self.finish(observer)

    def start(self) -> None:
        """Start the only exchange, and return before it ends.

        Sources must not change, nor targets be used, until `finish` has returned.
        """
        self._check_not_failed()
        if self._thread is not None:
            raise RunError("this transfer runs already; finish it before it starts again")
        self.is_done = False
        try:
            if self.in_background:
                # A daemon thread, so that a thread that waits forever does not keep the process
                # alive.
                self._thread = threading.Thread(
                    target=self._run_in_thread, name="reshard exchange", daemon=True
                )
                self._thread.start()
            else:
                self.exchanges[0].start()
                self._is_started = True
        except BaseException as error:
            self._fail(error)
            raise

    def finish(self, observer: BatchObserver | None = None) -> None:
        """Return when all ranks have everything. Raises as `run` does."""
        self._check_not_failed()
        try:
            problem: Exception | None = None
            if self._thread is not None:
                self._join()
            elif self._is_started:
                self._is_started = False
                self.exchanges[0].finish()
            else:
                problem = self._run_batches(observer)
            if self._confirms:
                with span("confirm the end"):
                    confirm(self._group, problem)
        except BaseException as error:
            self._fail(error)
            raise
        # Messages are written without autograd noticing, so mark the tensors as changed.
        torch.autograd.graph.increment_version(self._versioned)
        consistency.unmark(self._written)
        consistency.count_runs(self._uncounted)
        self.is_done = True

    def list_contents(self) -> Contents:
        """Return the tensors that `verify` compares."""
        return self._contents

    def verify(self) -> Verification:
        """Compare what the ranks have received with the sources as they are now, by digests.

        All ranks call this, after they have agreed on the call.

        Raises:
            RunError: on every rank, elements that differ, with their tensors and ranks; or a rank
                that does not answer.
        """
        group = self._group
        sent: defaultdict[int, bytes] = defaultdict(bytes)
        received: defaultdict[int, list[tuple[str, bytes]]] = defaultdict(list)
        differences, left_out, compared_bytes = list[str](), list[str](), 0
        for name, stages in self.list_contents():
            if stages is None:
                left_out.append(name)
                continue
            outgoing, incoming, local = list_pieces(stages, group.rank)
            for (_, peer), pieces in outgoing.items():
                sent[peer] += _digest(pieces)
            for (_, peer), pieces in incoming.items():
                received[peer].append((name, _digest(pieces)))
                compared_bytes += sum(pieces.sizes_bytes)
            # Copies alone: later orders are contributions, which are combined.
            for copy in local.get(0, ()):
                compared_bytes += copy.target.nbytes
                if not _has_same_bits(copy.target, copy.source.to(copy.target.dtype)):
                    differences.append(f"{name} (of this rank's own source)")
        with group.errors("nothing was compared"):
            theirs = group.swap_bytes(
                sent, {peer: len(named) * _DIGEST_BYTES for peer, named in received.items()}
            )
        for peer, named in received.items():
            for number, (name, digest) in enumerate(named):
                if theirs[peer][number * _DIGEST_BYTES :][:_DIGEST_BYTES] != digest:
                    differences.append(f"{name} (from rank {peer})")
        listed = first_text(differences, _SHOWN)
        problem = f"not the source's: {listed}" if differences else None
        agree(CallSignature({"the comparison": b""}, problem), group)
        return Verification(tuple(differences), compared_bytes, tuple(left_out))

    def _check_not_failed(self) -> None:
        if self.has_failed:
            raise RunError(f"this transfer failed; {self._result} is not usable")

    def _run_batches(self, observer: BatchObserver | None) -> Exception | None:
        """Run all batches; return the error of a call, which the other ranks do not know yet."""
        error: Exception | None = None
        for number, batch in enumerate(self.batches):
            if observer is not None:
                observer.begin(number)
            if batch.is_staged:
                # A rank whose transform fails must not leave others waiting for its messages.
                error = error or _call_all(batch.before)
                confirm(self._group, error)
            name = "batch" if batch.is_staged else "bucket"
            with span(name, partial(dict, number=number)):
                for exchange in batch.exchanges:
                    exchange.run()
                error = _call_all(batch.after)
            # After an error the batch was not completed.
            if observer is not None and error is None:
                observer.end(number)
        return error

    def _run_in_thread(self) -> None:
        try:
            # Inference mode is set per thread; an engine's tensors may be inference tensors.
            with torch.inference_mode():
                self.exchanges[0].run()
        except BaseException as error:
            self._thread_error = error

    def _join(self) -> None:
        """Wait for the thread, and raise its error."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._thread_error = self._thread_error, None
        if error is not None:
            raise error

    def _fail(self, error: BaseException) -> None:
        """Mark what a failed run has written, and notify all ranks; raise RunError for our errors.

        Other errors, such as those of a user's observer, are for the caller to raise.
        """
        self.has_failed = True
        # Also of a failed run, which may have written parts.
        torch.autograd.graph.increment_version(self._versioned)
        consistency.mark_unusable(*self._written)
        self._group.break_off(error)
        if isinstance(error, ReshardError):
            raise RunError(f"{error}; {self._result} is partly new and not usable") from error


def next_tag(group: RankGroup) -> int:
    """Return a tag for the messages of a transfer; the n-th of a group is equal on all ranks."""
    return _FIRST_TAG + group.next_number() % _TAGS


def _digest(pieces: Iterable[Piece]) -> bytes:
    """Return the digest of pieces, in the dtype in which they are sent."""
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for piece in pieces:
        # The narrower of both types is sent, and its elements are exact in a wider target.
        hasher.update(view_bytes(piece.view.detach().to(piece.dtype)).cpu().numpy())
    return hasher.digest()


def _has_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(torch.equal(view_bytes(first), view_bytes(second)))


def _call_all(calls: Calls) -> Exception | None:
    """Call each until a call fails. Return its error, or None if all succeed."""
    try:
        for call in calls:
            call()
    except Exception as error:
        return error
    return None
