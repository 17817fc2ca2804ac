"""A stage's function and its backward pass as one graph, and its parts for each pass.

    forward     %4 = matmul(%3, %1)         what the stage makes
                ----------------------
    back        %7 = matmul(%6, %5)         from the cotangent to that of the stage's array
                ----------------------
    weights     %9 = tensordot(%3, %6)      gradients of the parameters

If the backward pass is one task, it is one part. What no part returns to whoever runs the pipeline,
and no later part needs, is left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from reshard.errors import UsageError
from reshard.spmd.arrays.argument_tree import leaves
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.operator import operator_of
from reshard.spmd.graph import Graph, Operation, Value
from reshard.spmd.programs.traced_function import as_abstract
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import recorders, unrecorded
from reshard.spmd.shards.pending_sums import settled
from reshard.spmd.tracing.graph_recording import GraphRecorder, record

Back = Callable[[Any], tuple[Any, Callable[[], Any]]]
"""From a cotangent to that of the stage's array, and what gives the gradients then."""

Differentiated = Callable[..., tuple[Any, Back]]
"""From a stage's parameters, its array and maybe targets to its output, and the backward pass."""


@dataclass(frozen=True)
class PassPart:
    """A pass: its operations, and values by number.

    Args:
        operations: of the whole graph.
        reads: what it is given of values before it.
        makes: what it returns, and later parts read.
        kept: what is needed after it.
    """

    operations: tuple[Operation, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    kept: frozenset[int]


@dataclass(frozen=True)
class RecordedStage:
    """A stage for arguments of a kind, recorded. Make one with `record_stage`.

    Args:
        whole: its function and the backward pass.
        kinds: types of all values; None for numbers.
        parts: of the passes, in order.
        made: the value that the stage makes.
        cotangent: the input of the backward pass.
        slope: the cotangent of the stage's array; None for the first stage's.
        gradients: of the parameters, as a tree of the places of values.
    """

    whole: Graph
    kinds: tuple[ArrayType | None, ...]
    parts: tuple[PassPart, ...]
    made: int
    cotangent: int
    slope: int | None
    gradients: Any

    @property
    def arguments(self) -> list[int]:
        """The inputs that the stage is given, in their order."""
        return [number for number in self.whole.arguments if number != self.cotangent]

    @property
    def returned(self) -> tuple[int | None, ...]:
        """What each part returns beside gradients. It may be what the part is given."""
        return self.made, self.slope, None

    @property
    def gradient_numbers(self) -> list[int]:
        """The values of the gradients, in the order of the parameters."""
        return _numbers(self.gradients)

    def graph_of(self, part: PassPart, known: bool) -> Graph:
        """Return the graph of a pass, from what it reads to what it makes and the gradients.

        With `known` gradients, it takes these as well and returns the sums. Only the last pass
        returns gradients.
        """
        values = [
            replace(value, sharding=None if kind is None else kind.spec)
            for value, kind in zip(self.whole.values, self.kinds, strict=True)
        ]
        operations, inputs = list(part.operations), list(part.reads)
        returned = self.gradient_numbers if part is self.parts[-1] else []
        if known:
            for place, number in enumerate(returned):
                before, total = len(values), len(values) + 1
                values += [replace(values[number], index=n) for n in (before, total)]
                shape = values[number].shape
                rule = operator_of("add").rule([shape, shape])
                add = Operation("add", (before, number), (total,), rule)
                # As soon as it is there, so that it is not kept beside all others.
                ready = [n + 1 for n, one in enumerate(operations) if number in one.results]
                operations.insert(max(ready, default=0), add)
                inputs.append(before)
                returned[place] = total
        read = {number for one in operations for number in one.operands}
        constants = {n: x for n, x in self.whole.constants.items() if n in read}
        inputs += constants
        outputs = (*part.makes, *returned)
        return Graph(
            tuple(values),
            tuple(inputs),
            tuple(operations),
            outputs,
            tuple(f"%{number}" for number in inputs),
            MappingProxyType(constants),
            [values[number] for number in outputs],
            self.whole.library,
        )


def record_stage(
    function: Differentiated, own: Any, given: Sequence[Any], is_split: bool
) -> RecordedStage:
    """A stage, recorded for parameters, and its array and maybe targets.

    Its backward pass is one part, or two where it `is_split`.

    Raises what the function does, and UsageError for one that asks for elements, or that returns
    what is no array of its own.
    """
    ends: list[int] = []
    cotangents: list[int] = []
    found: list[GraphRecorder] = []

    def run(own: Any, *given: Any) -> Any:
        recorder = next(one for one in recorders if isinstance(one, GraphRecorder))
        found.append(recorder)
        made, back = function(own, *given)
        if not isinstance(made, ArrayValue):
            raise UsageError(f"a stage returned a {type(made).__name__}; one array was expected")
        ends.append(len(recorder.operations))
        kind = settled(made.type)
        cotangent = as_abstract(recorder.runner, kind)
        cotangents.append(recorder.input(cotangent, kind, "cotangent").index)
        slope, rest = back(cotangent)
        if is_split:
            ends.append(len(recorder.operations))
        return made, slope, rest()

    with unrecorded():
        whole = record(run, [own, *given], has_others=True)
    made, slope, gradients = whole.returned
    returned = [_numbers(made), _numbers(slope), []][: len(ends) + 1]
    wanted = {number for tree in whole.returned for number in _numbers(tree)}
    if not wanted.isdisjoint(whole.constants):
        raise UsageError("a stage returned an array that it was not given")
    return RecordedStage(
        whole,
        found[0].types,
        _cut(whole, ends, returned, _numbers(gradients)),
        made.index,
        cotangents[0],
        None if slope is None else slope.index,
        gradients,
    )


def _numbers(tree: Any) -> list[int]:
    return [leaf.index for _, leaf in leaves([tree]) if isinstance(leaf, Value)]


def _cut(
    whole: Graph,
    ends: Sequence[int],
    returned: Sequence[Sequence[int]],
    gradients: Sequence[int],
) -> tuple[PassPart, ...]:
    """The parts of a graph that end behind so many operations.

    Each returns some values; the last one has to have the gradients too.
    """
    own: list[list[Operation]] = [[] for _ in returned]
    needed = {number for some in (*returned, gradients) for number in some}
    for place, operation in reversed(list(enumerate(whole.operations))):
        if needed.intersection(operation.results):
            needed.update(operation.operands)
            own[bisect_right(ends, place)].insert(0, operation)
    parts: list[PassPart] = []
    after: set[int] = set()
    ending = {*gradients}
    for operations, some in zip(reversed(own), reversed(returned), strict=True):
        made = {number for one in operations for number in one.results}
        read = {number for one in operations for number in one.operands}
        reads = (read | ending | {*some}) - made - whole.constants.keys()
        makes = tuple(sorted(made & (after | {*some})))
        parts.insert(0, PassPart(tuple(operations), tuple(sorted(reads)), makes, frozenset(after)))
        after |= {*reads, *some}
        ending = set()
    return tuple(parts)
