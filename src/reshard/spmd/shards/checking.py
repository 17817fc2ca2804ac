"""A mode for debugging in which ranks compare what they run, and the data that they start from.

Over processes every rank runs the same program. If a rank runs another operation, or creates an
array from other data, its values differ, and nothing detects that as long as no elements move. With
`checking`, all ranks compare

1. the data of each `sp.array`, by a digest of its bytes,
2. the copies that ranks have of each part given to `sp.from_shards`, by digests,
3. each operation after it ran: its name, attributes, numbers, and the types of its operands.

Each comparison is a round of messages between all ranks, so it is meant for small runs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import numpy as np

from reshard._contexts import set_context
from reshard.errors import ShardError
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.backend import library_of
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import CompiledCall, Recorder, recording
from reshard.spmd.shards.runner import Runner

_is_checking: ContextVar[bool] = ContextVar("is_checking", default=False)


@contextmanager
def checking() -> Iterator[None]:
    """Compare operations and initial data between ranks inside. All ranks enter and leave it.

    In one process there is nothing to compare.

    Raises inside, on every rank:
        PlanError: ranks that run different operations, or create arrays of other types or data;
            the message shows those of each.
        ShardError: copies of a part that differ, with the ranks that have them.

    >>> import reshard.spmd as sp
    >>> with sp.checking():
    ...     float(sp.sum(sp.ones(3)))
    3.0
    """
    comparer = _Comparer()
    with set_context(_is_checking, True), recording(comparer):
        yield
        if comparer.runner is not None:
            _compare(comparer.runner, "operation", "the end of sp.checking()")


class _Comparer(Recorder):
    """A recorder that compares each operation of a runner over processes."""

    def __init__(self) -> None:
        self.runner: Runner | None = None
        self._numbers = itertools.count(1)

    def record(
        self, call: CompiledCall, operands: Sequence[Any], results: Sequence[ArrayValue]
    ) -> None:
        """Compare an operation that ran."""
        shown = [
            str(operand.type) if isinstance(operand, ArrayValue) else repr(operand)
            for operand in operands
        ]
        options = {**call.attributes, **call.options}
        shown += [f"{name}={value!r}" for name, value in options.items()]
        self._compare(results[0].runner, f"{call.name}({', '.join(shown)})")

    def record_reshard(self, operand: ArrayValue, result: ArrayValue) -> None:
        """Compare a reshard that the user asked for."""
        self._compare(result.runner, f"reshard({operand.type}, {result.type})")

    def _compare(self, runner: Runner, text: str) -> None:
        if is_over_processes(runner):
            self.runner = runner
            _compare(runner, "operation", f"operation {next(self._numbers)}, {text}")


def is_over_processes(runner: Runner) -> bool:
    """Return whether other processes have other shards."""
    return not runner.has_every_shard and not runner.is_abstract


def check_data(runner: Runner, array: Any, kind: ArrayType) -> None:
    """Compare data that every rank has in full, in `checking` alone."""
    if _is_checking.get() and is_over_processes(runner):
        _compare(runner, "data of sp.array", f"{kind}, digest {_digest(array)}")


def check_copies(runner: Runner, shards: Mapping[int, Any], kind: ArrayType) -> None:
    """Compare the copies of each part that ranks have, in `checking` alone.

    Raises ShardError, on every rank, for copies that differ.
    """
    if not (_is_checking.get() and is_over_processes(runner)) or kind.spec is None:
        return
    _compare(runner, "array of sp.from_shards", str(kind))
    if kind.spec.partial_axes:
        # Contributions to a sum are expected to differ.
        return
    own = {
        str([(*box.start, *box.stop) for box in kind.layout.boxes(rank)]): _digest(shard)
        for rank, shard in shards.items()
    }
    from reshard.torch.exchange.agreement import gather

    gathered = gather(json.dumps(own).encode(), _group_of(runner))
    ranks_with: dict[str, dict[str, list[int]]] = {}
    for rank, text in gathered.items():
        for boxes, digest in json.loads(text).items():
            ranks_with.setdefault(boxes, {}).setdefault(digest, []).append(rank)
    for by_digest in ranks_with.values():
        if len(by_digest) > 1:
            sides = " and ".join(f"ranks {ranks}" for ranks in by_digest.values())
            raise ShardError(
                f"sp.from_shards of {kind}: {sides} have copies of one part that differ; give "
                "each rank the same elements, or a sharding in which they are parts of their own"
            )


def _compare(runner: Runner, what: str, text: str) -> None:
    # Imported here, because arrays in a single process do not need torch.
    from reshard.torch.exchange.agreement import CallSignature, agree

    agree(CallSignature({what: text.encode()}, show=lambda: {what: text}), _group_of(runner))


def _group_of(runner: Runner) -> Any:
    return getattr(runner, "group", None)


def _digest(array: Any) -> str:
    backend = library_of(array)
    if backend is not None and backend.name == "torch":
        flat = array.detach().cpu().contiguous().reshape(-1)
        array = flat.view(import_module("torch").uint8).numpy()
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.blake2b(data.tobytes(), digest_size=8).hexdigest()
