"""Control flow: `scan`, `cond` and `while_loop` for functions of sharded arrays.

In eager mode they run as Python loops and branches. In a traced function, the bodies and branches
are recorded once (`traced_function.py`), and the program evaluates the conditions when it runs. A
carried value keeps its shape, element type and sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from reshard.errors import UsageError
from reshard.sharding import DimSpec, ShardingSpec
from reshard.spmd.arrays.argument_tree import arranged_like, leaves, replaced
from reshard.spmd.arrays.sharded_array import ShardedArray, array
from reshard.spmd.core.array_type import ArrayType, settled
from reshard.spmd.core.backend import library_of
from reshard.spmd.core.operator import JointPullback, TapeStep
from reshard.spmd.gradients.tape import Tape, add_step
from reshard.spmd.graph import Body, BodyCosts
from reshard.spmd.ops.movement import pad, stack
from reshard.spmd.programs.traced_function import (
    MakeBack,
    TracedFunction,
    arrays_of,
    as_abstract,
    bring,
    pull_back_body,
)
from reshard.spmd.shards.operation_call import is_watched, recorders
from reshard.spmd.shards.runner import Runner
from reshard.spmd.tracing.graph_recording import (
    GraphRecorder,
    filled_in_order,
    is_recorded,
    listening_recorder,
)
from reshard.spmd.tracing.trace import find_runner


def check_functions(name: str, *functions: object) -> None:
    """Raise UsageError for arguments that are not functions."""
    for function in functions:
        if not callable(function):
            raise UsageError(
                f"sp.{name} with {function!r}, a {type(function).__name__}; a function was expected"
            )


def as_arrays(name: str, tree: Any) -> Any:
    """Return the tree with arrays in shards for all arrays and numbers in it."""

    def convert(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, ShardedArray):
            return leaf
        if library_of(leaf) is None and not isinstance(leaf, bool | int | float | complex):
            raise UsageError(
                f"sp.{name} with {leaf!r}, a {type(leaf).__name__}; arrays were expected, and "
                "lists, tuples and dictionaries of them"
            )
        return array(leaf)

    return replaced(tree, convert)


def types_of(tree: Any) -> Any:
    """Return the tree with the types of its arrays, without pending sums."""
    return replaced(
        tree, lambda leaf: settled(leaf.type) if isinstance(leaf, ShardedArray) else leaf
    )


def check_predicate(name: str, value: Any) -> None:
    """Raise UsageError unless a predicate is a single boolean."""
    if isinstance(value, bool):
        return
    is_array = isinstance(value, ShardedArray)
    if not is_array or value.type.shape != () or value.type.dtype.name != "bool":
        said = str(value.type) if is_array else f"{value!r}, a {type(value).__name__}"
        raise UsageError(
            f"sp.{name} that is decided by {said}; one truth value was expected, an array of bool "
            "without dimensions: x > 0, sp.any(x), sp.all(x)"
        )


def read_predicate(name: str, value: Any) -> bool:
    """Return a predicate as a bool. Raises UsageError if it is invalid."""
    check_predicate(name, value)
    return bool(value if isinstance(value, bool) else value.to_dense())


def split_pair(name: str, returned: Any) -> tuple[Any, Any]:
    """Split the result of a body into carried and collected values, or raise UsageError."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UsageError(
            f"sp.{name} of a body that returned a {type(returned).__name__}; a pair of what is "
            "carried on and what is collected was expected"
        )
    return returned


def read_like(name: str, what: str, like: Any, value: Any) -> Any:
    """Return a tree as arrays in the order of another tree; raise UsageError if they differ.

    Args:
        what: the trees are, for the message.
    """
    arranged = arranged_like(as_arrays(name, value), like, f"sp.{name}: {what}")
    said = [[leaf.type for leaf in arrays_of(tree)] for tree in (like, arranged)]
    check_same(name, what, like, said[0], arranged, said[1])
    return arranged


def check_same(
    name: str,
    what: str,
    tree: Any,
    types: Sequence[ArrayType],
    other_tree: Any,
    other_types: Sequence[ArrayType],
) -> None:
    """Raise UsageError if corresponding leaves of two trees differ in shape or element type."""
    paths = [path for path, _ in leaves(tree)]
    kinds = [_types_at_leaves(tree, types), _types_at_leaves(other_tree, other_types)]
    if kinds[0] != kinds[1]:
        where = ", ".join(path or "one place" for path in paths)
        said = [", ".join(text) for text in kinds]
        raise UsageError(
            f"sp.{name}: {what} {said[0]} at {where}, and then {said[1]}; the same shapes and "
            "element types were expected: cast with sp.astype"
        )


def _types_at_leaves(tree: Any, types: Sequence[ArrayType]) -> list[str]:
    """Return the type at each leaf as text, or None."""
    left = iter(types)
    return ["None" if leaf is None else str(next(left)) for _, leaf in leaves(tree)]


Function = Callable[..., Any]

# For messages.
CARRIED = "what is carried"
COLLECTED = "what is collected"


def scan(
    body: Function, init: Any, xs: Any = None, *, length: int | None = None, reverse: bool = False
) -> tuple[Any, Any]:
    """Loop over the first dimension of arrays, with carried values.

    Args:
        body: a function of the carried values and of the slices of `xs` at a position. It returns
            the next carried values and the values to collect: arrays, or None.
        init: the initial carried values: arrays, and lists, tuples and dictionaries of them.
            Dictionary entries are matched with the carried ones by key.
        xs: arrays, in such a tree, whose first dimensions have the same length; or None with a
            `length`.
        length: the number of iterations, if there are no `xs`.
        reverse: whether to iterate from the last position to the first.

    Returns:
        The final carried values, and the collected values, each array with a new first dimension in
        the order of the positions.

    Raises:
        UsageError: arrays of different lengths, or no length; a body that does not return a pair,
            or whose carried values change shape, element type or tree structure.

    >>> import reshard.spmd as sp
    >>> total, sums = sp.scan(lambda c, x: (c + x, c + x), sp.array(0), sp.array([1, 2, 3]))
    >>> int(total), sums.to_dense().tolist()
    (6, [1, 3, 6])
    """
    check_functions("scan", body)
    carried, sequences = as_arrays("scan", init), as_arrays("scan", xs)
    count = _read_length(sequences, length)
    parts = replaced(sequences, lambda x: None if x is None else _whole_first(x))
    recorder = listening_recorder()
    # A gradient sees each step by itself.
    is_seen = any(isinstance(listener, Tape) for listener in recorders.active)
    if recorder is not None and not is_seen and count and arrays_of([carried, parts]):
        return _record_scan(body, carried, parts, count, reverse, recorder)
    return _run_scan(body, carried, parts, count, reverse)


def _read_length(xs: Any, length: int | None) -> int:
    shapes = {path: x.type.shape[:1] for path, x in leaves(xs) if x is not None}
    sizes = {shape[0] if shape else None for shape in shapes.values()}
    if length is not None:
        sizes.add(length)
    if len(sizes) != 1 or None in sizes:
        raise UsageError(
            f"sp.scan over arrays of {sorted(map(str, sizes)) or 'no'} lengths; xs of one first "
            "dimension were expected, or None and length="
        )
    (count,) = sizes
    # A bool is an int in Python.
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise UsageError(f"sp.scan with length={count!r}; a whole number, 0 or more, was expected")
    return count


def _whole_first(x: Any) -> Any:
    """Return the array with its first dimension whole, so that parts of it move nothing."""
    spec = x.type.spec
    if spec is None or not spec.dim_specs[0].levels:
        return x
    return x.shard(
        ShardingSpec(
            spec.mesh,
            [DimSpec(), *spec.dim_specs[1:]],
            partial_axes=spec.partial_axes,
            reduction=spec.reduction,
        )
    )


def _run_scan(
    body: Function, carried: Any, parts: Any, count: int, reverse: bool
) -> tuple[Any, Any]:
    first = carried
    collected: list[Any] = []
    positions = range(count - 1, -1, -1) if reverse else range(count)
    for position in positions:
        at = replaced(parts, lambda x, at=position: None if x is None else x[at])  # type: ignore[misc]
        carried, y = split_pair("scan", body(carried, at))
        carried = _restore_shardings(read_like("scan", CARRIED, first, carried), first)
        if collected:
            collected.append(read_like("scan", COLLECTED, collected[0], y))
        else:
            collected.append(as_arrays("scan", y))
    if not collected:
        return carried, _collect_nothing(body, carried, parts)
    if reverse:
        collected.reverse()
    rows = [[leaf for _, leaf in leaves(y)] for y in collected]
    columns = iter(zip(*rows, strict=True))

    def stacked(_: Any) -> Any:
        column = next(columns)
        return None if column[0] is None else stack(list(column))

    return carried, replaced(collected[0], stacked)


def _collect_nothing(body: Function, carried: Any, parts: Any) -> Any:
    """Return the collected values of a loop without iterations, which are empty."""
    first = replaced(
        # No position can be read, so the body sees zeros; only the types of its results count.
        parts,
        lambda x: x if x is None else pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1))[0],
    )
    _, y = split_pair("scan", body(carried, first))
    # Stacked and sliced, which gives the type and sharding of a loop with iterations.
    return replaced(as_arrays("scan", y), lambda x: x if x is None else stack([x])[:0])


def _record_scan(
    body: Function,
    carried: Any,
    parts: Any,
    count: int,
    reverse: bool,
    recorder: GraphRecorder,
) -> tuple[Any, Any]:
    # Traced without contributions that wait: an iteration reduces them, and a loop keeps its types.
    first = types_of(carried)
    at = replaced(parts, lambda x: None if x is None else _without_first(x.type))

    def checked(c: Any, x: Any) -> Any:
        c_after, y = split_pair("scan", body(c, x))
        return read_like("scan", CARRIED, c, c_after), as_arrays("scan", y)

    traced = TracedFunction(checked, [first, at], recorder)
    starts, sequences = arrays_of(carried), arrays_of(parts)
    lead, rest_from = len(starts), len(starts) + len(sequences)

    def find_kinds(types: Sequence[ArrayType]) -> tuple[list[ArrayType], list[ArrayType]]:
        rest = [*map(_without_first, types[lead:rest_from]), *types[rest_from:]]
        kinds = _find_stable(traced, types[:lead], rest)
        return kinds, [_with_first(y, count) for y in traced.result_types([*kinds, *rest])[lead:]]

    def run(arrays: Sequence[Any], runner: Runner) -> list[Any]:
        sequence = list(map(_whole_first, arrays[lead:rest_from]))
        rest = list(arrays[rest_from:])
        kinds, of_ys = find_kinds([x.type for x in (*arrays[:lead], *sequence, *rest)])
        if runner.is_abstract and not is_recorded(runner):
            return [as_abstract(runner, kind) for kind in (*kinds, *of_ys)]
        state = list(map(bring, arrays[:lead], kinds))

        def step(c: list[Any], x: list[Any]) -> Any:
            outputs = arrays_of(traced.run([*c, *x, *rest], runner))
            return outputs[:lead], outputs[lead:]

        last, ys = _run_scan(step, state, sequence, count, reverse)
        return [*map(bring, last, kinds), *map(bring, ys, of_ys)]

    def count_within(types: Sequence[ArrayType]) -> BodyCosts:
        rest = [*map(_without_first, types[lead:rest_from]), *types[rest_from:]]
        kinds, of_ys = find_kinds(types)
        # An iteration has the carried and all collected values; at the end these are stacked.
        once = traced.count_within([*kinds, *rest]).plus([*kinds, *of_ys])
        costs = once.maximum(BodyCosts().plus([*kinds, *of_ys, *of_ys]))
        return replace(costs, moved_bytes=count * once.moved_bytes)

    operands = [*starts, *sequences, *traced.captured]
    kinds = find_kinds([operand.type for operand in operands])
    results = recorder.add_body(
        "scan",
        Body(run, count_within, traced.meshes),
        operands,
        [*kinds[0], *kinds[1]],
    )
    carried, ys = filled_in_order(traced.results, results)
    return carried, ys


def _find_stable(
    traced: TracedFunction, types: Sequence[ArrayType], rest: Sequence[ArrayType]
) -> list[ArrayType]:
    """Return the types of what a loop carries: as it begins, sharded where the body makes it so."""
    kinds = [settled(kind) for kind in types]
    # Each round gives a sharding to a further value at least, or is the last.
    for _ in range(len(kinds) + 1):
        after = traced.result_types([*kinds, *rest])[: len(kinds)]
        updated = [
            kind if kind.spec is not None else later
            for kind, later in zip(kinds, after, strict=True)
        ]
        if updated == kinds:
            break
        kinds = updated
    return kinds


def _without_first(kind: ArrayType) -> ArrayType:
    spec = kind.spec
    if spec is not None:
        spec = ShardingSpec(
            spec.mesh,
            spec.dim_specs[1:],
            partial_axes=spec.partial_axes,
            reduction=spec.reduction,
        )
    return ArrayType(kind.shape[1:], kind.dtype, spec)


def _with_first(kind: ArrayType, count: int) -> ArrayType:
    spec = kind.spec
    if spec is not None:
        spec = ShardingSpec(spec.mesh, [DimSpec(), *spec.dim_specs])
    return ArrayType((count, *kind.shape), kind.dtype, spec)


def cond(predicate: Any, true_function: Function, false_function: Function, *arguments: Any) -> Any:
    """Call one of two functions, selected by a boolean array.

    Args:
        predicate: an array of a single boolean, or a Python bool.
        true_function, false_function: functions of the arguments. They return arrays with the same
            tree structure, shapes and element types. Dictionary entries are matched by key.
        arguments: arrays, and lists, tuples and dictionaries of them.

    Raises:
        UsageError: a predicate that is not a single boolean; functions that return anything other
            than arrays, or, where both are traced, different structures.

    >>> import reshard.spmd as sp
    >>> x = sp.array([3.0, -4.0])
    >>> sp.cond(sp.sum(x) > 0, lambda x: x, lambda x: -x, x).to_dense().tolist()
    [-3.0, 4.0]
    """
    check_functions("cond", true_function, false_function)
    inputs = as_arrays("cond", list(arguments))
    recorder = listening_recorder()
    # A Python bool is known while a function is traced, so only the chosen function is.
    if isinstance(predicate, bool) or recorder is None:
        chosen = true_function if read_predicate("cond", predicate) else false_function
        return as_arrays("cond", chosen(*inputs))
    check_predicate("cond", predicate)
    return _record_cond(predicate, (true_function, false_function), inputs, recorder)


def _record_cond(
    predicate: Any,
    functions: tuple[Function, Function],
    inputs: list[Any],
    recorder: GraphRecorder,
) -> Any:
    def first(*arguments: Any) -> Any:
        return as_arrays("cond", functions[0](*arguments))

    def second(*arguments: Any) -> Any:
        result = as_arrays("cond", functions[1](*arguments))
        return arranged_like(result, branches[0].results, "sp.cond: what its second function gives")

    branches = [TracedFunction(first, types_of(inputs), recorder)]
    # Traced second, because its results are arranged like the first branch's.
    branches.append(TracedFunction(second, types_of(inputs), recorder))
    input_arrays = arrays_of(inputs)
    operands = [*input_arrays, *branches[0].captured, *branches[1].captured]
    middle = len(input_arrays) + len(branches[0].captured)

    def choose(number: int, arrays: Sequence[Any]) -> list[Any]:
        captured = arrays[len(input_arrays) : middle] if number == 0 else arrays[middle:]
        return [*arrays[: len(input_arrays)], *captured]

    def inline(number: int, arrays: Sequence[Any], runner: Runner) -> list[Any]:
        return arrays_of(branches[number].inline(choose(number, arrays), runner))

    def find_kinds(types: Sequence[ArrayType]) -> list[ArrayType]:
        both = [branches[n].result_types(choose(n, types)) for n in (0, 1)]
        true_result, false_result = (
            [branch.results, kinds] for branch, kinds in zip(branches, both, strict=True)
        )
        check_same("cond", "its functions return", *true_result, *false_result)
        return [kind if kind.spec is not None else other for kind, other in zip(*both, strict=True)]

    def run(arrays: Sequence[Any], runner: Runner) -> list[Any]:
        decided, *rest = arrays
        kinds = find_kinds([x.type for x in rest])
        if is_recorded(runner):
            outputs = cond(decided, *(partial(inline, number, rest, runner) for number in (0, 1)))
        elif runner.is_abstract:
            return [as_abstract(runner, kind) for kind in kinds]
        else:
            number = 0 if read_predicate("cond", decided) else 1
            outputs = arrays_of(branches[number].run(choose(number, rest), runner))
        return [bring(output, kind) for output, kind in zip(outputs, kinds, strict=True)]

    def count_within(types: Sequence[ArrayType]) -> BodyCosts:
        true_costs, false_costs = (branches[n].count_within(choose(n, types[1:])) for n in (0, 1))
        return true_costs.maximum(false_costs)

    kinds = find_kinds([operand.type for operand in operands])
    body = Body(run, count_within, (*branches[0].meshes, *branches[1].meshes))
    results = recorder.add_body("cond", body, [predicate, *operands], kinds)

    def pull_back(step: TapeStep, cotangents: Any) -> list[Any]:
        decided, *branch_operands = step.operands

        def call_back(back: MakeBack, slopes: list[Any]) -> Any:
            # The cotangents are those of the branch that was taken, which is computed again.
            true_back, false_back = (
                back(lambda arrays, number=number: inline(number, arrays, find_runner(arrays)))  # type: ignore[misc]
                for number in (0, 1)
            )
            return cond(decided, true_back, false_back, branch_operands, slopes)

        # The predicate, a boolean, is without a gradient.
        return [None, *pull_back_body(branch_operands, step.results, cotangents, call_back)]

    pullback = JointPullback(pull_back)
    add_step(TapeStep("cond", {}, (predicate, *operands), tuple(results), pullback))
    return filled_in_order(branches[0].results, results)


def while_loop(condition: Function, body: Function, init: Any) -> Any:
    """Loop while a condition holds, and return the carried values. Not differentiable: see `scan`.

    Args:
        condition: a function of the carried values that returns an array of a single boolean.
        body: a function of the carried values that returns the next ones, with the same tree
            structure, shapes and element types.
        init: the initial carried values: arrays, and lists, tuples and dictionaries of them.
            Dictionary entries are matched with the carried ones by key.

    Raises:
        UsageError: a condition that does not return such an array; a body whose carried values
            change shape, element type or tree structure; a gradient through the loop.

    >>> import reshard.spmd as sp
    >>> halve = sp.while_loop(lambda x: sp.max(x) > 1, lambda x: x / 2, sp.array([12.0, 5.0]))
    >>> halve.to_dense().tolist()
    [0.75, 0.3125]
    """
    check_functions("while_loop", condition, body)
    carried = as_arrays("while_loop", init)
    recorder = listening_recorder()
    if recorder is not None and arrays_of(carried):
        return _record_while(condition, body, carried, recorder)
    first = carried
    while read_predicate("while_loop", condition(carried)):
        carried = _restore_shardings(read_like("while_loop", CARRIED, first, body(carried)), first)
        _refuse_gradients(arrays_of(carried))
    return carried


def _record_while(
    condition: Function, body: Function, carried: Any, recorder: GraphRecorder
) -> Any:
    first = types_of(carried)

    def checked(c: Any) -> Any:
        return read_like("while_loop", CARRIED, c, body(c))

    def asked(c: Any) -> Any:
        predicate = condition(c)
        check_predicate("while_loop", predicate)
        return predicate

    decide = TracedFunction(asked, [first], recorder)
    advance = TracedFunction(checked, [first], recorder)
    starts = arrays_of(carried)
    middle = len(starts) + len(decide.captured)

    def find_kinds(types: Sequence[ArrayType]) -> list[ArrayType]:
        return _find_stable(advance, types[: len(starts)], types[middle:])

    def run(arrays: Sequence[Any], runner: Runner) -> list[Any]:
        kinds = find_kinds([x.type for x in arrays])
        state = list(map(bring, arrays[: len(starts)], kinds))
        asks, changes = arrays[len(starts) : middle], arrays[middle:]
        if is_recorded(runner):
            outputs = while_loop(
                lambda c: decide.inline([*c, *asks], runner),
                lambda c: arrays_of(advance.inline([*c, *changes], runner)),
                state,
            )
            return list(map(bring, outputs, kinds))
        if runner.is_abstract:
            return [as_abstract(runner, kind) for kind in kinds]
        while read_predicate("while_loop", decide.run([*state, *asks], runner)):
            outputs = arrays_of(advance.run([*state, *changes], runner))
            state = [bring(output, kind) for output, kind in zip(outputs, kinds, strict=True)]
            _refuse_gradients(state)
        return state

    def count_within(types: Sequence[ArrayType]) -> BodyCosts:
        kinds = find_kinds(types)
        condition_costs = decide.count_within([*kinds, *types[len(starts) : middle]])
        body_costs = advance.count_within([*kinds, *types[middle:]])
        moved_bytes = condition_costs.moved_bytes + body_costs.moved_bytes
        return replace(condition_costs.maximum(body_costs).plus(kinds), moved_bytes=moved_bytes)

    operands = [*starts, *decide.captured, *advance.captured]
    _refuse_gradients(operands)
    kinds = find_kinds([operand.type for operand in operands])
    loop = Body(run, count_within, (*decide.meshes, *advance.meshes))
    results = recorder.add_body("while_loop", loop, operands, kinds)
    return filled_in_order(advance.results, results)


def _refuse_gradients(arrays: Sequence[Any]) -> None:
    if is_watched(arrays):
        raise UsageError(
            "the gradient of sp.while_loop: how often it runs is known when it has, and no step "
            "is kept; use sp.scan with a length, or take sp.stop_gradient(x) before"
        )


def _restore_shardings(after: Any, before: Any) -> Any:
    """Return carried values in their original shardings."""
    kinds = iter([settled(x.type) for x in arrays_of(before)])
    return replaced(after, lambda x: x if x is None else bring(x, next(kinds)))
