"""Operation calls: execution of operations on shards, compiled once per operand types.

`call(name, operands, attributes)` is the only place where operations are executed:

1. The types of the operands, the operator and its attributes are looked up: a repeated operation
   costs a single dictionary access.
2. Otherwise the operation is compiled: the mesh is found; pending sums that the operator cannot
   work on are marked to be reduced (`partial_sums`); the operator's rule determines the shards
   on which it runs (`alignment`); each operand whose sharding differs gets its movement
   (`runner`); each rank gets its kernel.
3. It is run: operands move, every rank of this process computes, the results are wrapped. Common
   cases have specialized short functions (`compute`).

A `Recorder` observes every operation that is executed while it is listening.
"""

from __future__ import annotations

import itertools
import reprlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from reshard.errors import MeshError, ShardError, UsageError
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType, replicated, with_partial, without_partial
from reshard.spmd.core.local_work import LocalWork
from reshard.spmd.core.operator import Operator, find_operator, operator_of
from reshard.spmd.core.result_types import PYTHON_NUMBERS, as_python_number, find_result_types
from reshard.spmd.rules.alignment import aligned_by_bytes
from reshard.spmd.rules.rule_builder import Inferred
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.spmd.shards.array_value import ArrayValue, may_view, take_moved
from reshard.spmd.shards.error_translation import (
    REFUSALS,
    check_types,
    infer_checked,
    make_refusal,
    refuse,
    refuse_traced,
)
from reshard.spmd.shards.partial_sums import (
    are_finite,
    factors_of,
    kept_partial,
    types_allow_partial,
)
from reshard.spmd.shards.runner import MAX_CACHED, Runner
from reshard.spmd.shards.shard_copies import Movement

RunCall = Callable[..., Any]


def compute(
    name: str,
    functions: Sequence[Callable[..., Any]],
    columns: Sequence[Sequence[Any]],
    operands: Sequence[Any],
    runner: Runner,
    shares_failure: bool,
) -> list[Any]:
    """Return the results of every rank here; if the elements of a rank fail, raise on all ranks."""
    rows: list[Any] = []
    failure = None
    try:
        by_rank = zip(*columns, strict=True)
        rows = [function(*row) for function, row in zip(functions, by_rank, strict=True)]
    except REFUSALS as error:
        failure = make_refusal(name, operands, runner, error)
    # Every rank takes part, whether it failed or not: otherwise the others would wait for it.
    if shares_failure:
        failure = runner.failure_of_any(failure)
    if failure is not None:
        raise failure
    return rows


Take = tuple[bool, tuple[ShardingSpec, Movement] | None]
"""How ranks take an operand: whether all take the same, else the sharding that it is moved to."""


def make_run(
    call: CompiledCall,
    operator: Operator,
    takes: Sequence[Take],
    runner: Runner,
    wrap: type[ArrayValue],
) -> RunCall:
    """Return the function that runs a compiled operation; common cases have special functions."""
    name, functions, result = call.name, call.functions, call.made[0]
    views = may_view(operator, len(call.operands))
    new = wrap.__new__
    # If this process has no shards, there are no functions.
    is_same = len({id(function) for function in functions}) == 1
    function: Callable[..., Any] = functions[0] if is_same else compute
    # A single result, one function for all ranks, and no failure that only some ranks could have:
    # operations on arrays of fitting shardings, and on numbers, the most frequent.
    is_final = call.is_single and call.made == call.results
    is_plain = is_final and is_same and not call.shares_failure
    is_plain = is_plain and not any(target for _, target in takes) and not runner.is_abstract
    if is_plain and len(call.operands) == 1:

        def run_one(x: Any) -> Any:
            # Inlined from `of_shards`, which saves a call per operation.
            array = new(wrap)
            array.type = result
            try:
                array._shards = tuple(map(function, x._shards))
            except REFUSALS as error:
                refuse(name, (x,), runner, error)
            array.runner = runner
            if views and x.is_given:
                array.mark_given()
            return array

        return run_one
    if is_plain and len(call.operands) == 2:
        has_left, has_right = (kind is not None for kind in call.operands)

        def run_two(x: Any, y: Any) -> Any:
            array = new(wrap)
            array.type = result
            left = x._shards if has_left else itertools.repeat(x)
            right = y._shards if has_right else itertools.repeat(y)
            try:
                array._shards = tuple(map(function, left, right))
            except REFUSALS as error:
                refuse(name, (x, y), runner, error)
            array.runner = runner
            if views:
                mark_views((x, y), (array,))
            return array

        return run_two
    count = len(functions)

    def run(*operands: Any) -> Any:
        columns = [
            (x,) * count if is_shared else take_moved(x, *target) if target else x._shards
            for x, (is_shared, target) in zip(operands, takes, strict=True)
        ]
        rows = compute(name, functions, columns, operands, runner, call.shares_failure)
        if is_final:
            results: tuple[Any, ...] = (wrap.of_shards(result, tuple(rows), runner),)
        else:
            results = wrap_results(call, rows, runner, wrap)
        if views:
            mark_views(operands, results)
        return results[0] if call.is_single else results

    return run


def wrap_results(
    call: CompiledCall, rows: Sequence[Any], runner: Runner, wrap: type[ArrayValue]
) -> tuple[Any, ...]:
    """Return what the ranks here made, each a result or a tuple of them, in final shardings."""
    columns = (
        [rows] if call.is_single else [[row[n] for row in rows] for n in range(len(call.made))]
    )
    arrays = []
    for computed, column, result in zip(call.made, columns, call.results, strict=True):
        shards = tuple(column)
        if result.spec is not None and computed.spec is not result.spec:
            # Contributions are reduce-scattered.
            shards = runner.movement(computed, result.spec)(shards)
        arrays.append(wrap.of_shards(result, shards, runner))
    return tuple(arrays)


def mark_views(operands: Sequence[Any], results: Sequence[ArrayValue]) -> None:
    """Mark results as given if they may be views of arrays that a program passed."""
    for operand in operands:
        if isinstance(operand, ArrayValue) and operand.is_given:
            for result in results:
                result.mark_given()
            return


Attributes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """An operation, compiled for operands of certain types.

    Args:
        name, attributes, options: of the operator.
        operands: types as they are passed; None for a number.
        runs_with: the shardings that the operator runs with; None for operands without a sharding.
        made: types of the results as the operator makes them.
        results: types of the final results; contributions may have been reduce-scattered.
        rule: the sharding rule for these operands; None if the operator has none.
        factors: operands that contributions are multiplied by. If any is infinite, contributions
            are combined first: `3 inf - 1 inf` is NaN, `2 inf` is not.
        functions: the functions that the ranks here compute.
        is_single: whether the functions return a single result, not a tuple of results.
        shares_failure: whether ranks exchange whether any of them failed.
        run: the function that runs the operation on the operands.
    """

    name: str
    attributes: Attributes
    options: Attributes
    operands: tuple[ArrayType | None, ...]
    runs_with: tuple[ShardingSpec | None, ...]
    made: tuple[ArrayType, ...]
    results: tuple[ArrayType, ...]
    rule: OpShardingRule | None
    factors: tuple[int, ...]
    functions: tuple[Callable[..., Any], ...]
    is_single: bool
    shares_failure: bool
    run: RunCall = compute

    @property
    def looks_at_elements(self) -> bool:
        """Whether any factor is an array, whose elements can change while its type does not."""
        return any(self.operands[number] is not None for number in self.factors)


class Recorder:
    """An observer of operations, in the order in which they are executed.

    A subclass overrides the methods of what it observes; the others do nothing.

    Attributes:
        record_movement: called with the operation, the operand and the sharding before `record`,
            for each operand that an operation itself moves to another sharding; None if these are
            not observed.
        differentiates: whether it records a function to differentiate it.
        takes_bodies: whether loops, branches and eager functions are recorded as an operation, by
            `add_body`; else operation by operation.
    """

    # None instead of an empty method, so that movements are not looked for in vain.
    record_movement: Callable[[CompiledCall, Any, ShardingSpec], object] | None = None
    differentiates = False
    takes_bodies = False

    def record(
        self, call: CompiledCall, operands: Sequence[Any], results: Sequence[ArrayValue]
    ) -> None:
        """Observe an operation that was executed."""

    def record_reshard(self, operand: ArrayValue, result: ArrayValue) -> None:
        """Observe a reshard that the user requested."""

    def record_operands(self, operands: Sequence[Any]) -> None:
        """Observe the operands of a step that is not an operator: a loop, a branch."""

    def record_read(self, array: ArrayValue) -> None:
        """Observe that elements are read, on which no gradient depends."""

    def record_end(self, result: ArrayValue, like: ArrayValue) -> None:
        """Observe that a function's result was resharded to have the sharding of an input."""

    def watches(self, arrays: Sequence[Any]) -> bool:
        """Return whether it has to record the operations on any of the arrays."""
        return False

    @property
    def of_elements(self) -> Recorder | None:
        """The recorder that listens for it while a function is traced; None if none does."""
        return None


class _Forwarding(Recorder):
    """A recorder that forwards to the methods of an object of another class."""

    def __init__(self, observer: Any) -> None:
        for name in ("record", "record_reshard", "record_movement", "record_read"):
            if hasattr(observer, name):
                setattr(self, name, getattr(observer, name))
        self.differentiates = hasattr(observer, "record_read")


class _Listening(threading.local):
    """The recorders of a thread, which observe only the operations of that thread."""

    active: tuple[Recorder, ...] = ()


recorders = _Listening()
"""The recorders that are listening in this thread; `recording` adds a recorder for a while."""


@contextmanager
def recording(recorder: object) -> Iterator[None]:
    """Let a recorder observe the operations inside.

    Args:
        recorder: a `Recorder`, or another object with its methods `record` and `record_reshard`.

    Raises UsageError if it is neither.
    """
    if not hasattr(recorder, "record") or not hasattr(recorder, "record_reshard"):
        raise UsageError(
            f"recording by {recorder!r}, a {type(recorder).__name__}; an object with the methods "
            "record and record_reshard was expected: see sp.Recorder"
        )
    before = recorders.active
    added = recorder if isinstance(recorder, Recorder) else _Forwarding(recorder)
    recorders.active = (*before, added)
    try:
        yield
    finally:
        recorders.active = before


@contextmanager
def unrecorded() -> Iterator[None]:
    """Hide the operations inside from all recorders except recorders that are added inside.

    If a function is traced inside, tapes see only its operations on arrays from outside.
    """
    before = recorders.active
    recorders.active = tuple(
        inner for recorder in before if (inner := recorder.of_elements) is not None
    )
    try:
        yield
    finally:
        recorders.active = before


def is_watched(arrays: Sequence[Any]) -> bool:
    """Return whether a listening tape has to record operations on any of the arrays."""
    return any(recorder.watches(arrays) for recorder in recorders.active)


def placed(x: Any, spec: ShardingSpec) -> Any:
    """Reshard an array; if it has the sharding, return it, so that a trace shows no operation."""
    return x if x.type.spec is spec else x.shard(spec)


def call(
    name: str,
    operands: Sequence[Any],
    attributes: Attributes | None = None,
    options: Attributes | None = None,
) -> Any:
    """Execute an operation.

    Args:
        name: of the operator, as in the table of rules.
        operands: arrays in shards, and numbers.
        attributes: of the operator, hashable.
        options: attributes that its rule does not depend on, such as the results' element type;
            hashable.

    Returns:
        An array in shards; a tuple of them from an operator with several results.

    Raises:
        MeshError: operands over different meshes.
        UsageError: operands of different runners, or no sharded array among them.
        SpecError: shapes or attributes that the operator cannot have.
    """
    parts: list[Any] = [name]
    runner: Runner | None = None
    for x in operands:
        if isinstance(x, ArrayValue):
            parts.append(x.type)
            if x.runner is not runner:
                runner = x.runner if runner is None else _common_runner(name, runner, x.runner)
        elif x.__class__ in PYTHON_NUMBERS or as_python_number(x) is x:
            # Only the class of a number: its value is an operand of the compiled operation.
            parts.append(x.__class__)
        else:
            return call(name, [*map(as_python_number, operands)], attributes, options)
    if runner is None:
        raise _refuse_operands(name, operands)
    if attributes or options:
        # As text, in which 1, 1.0 and True are different.
        parts += repr(attributes), repr(options)
    key = tuple(parts)
    compiled = runner.calls.get(key)
    # Factors are checked at each call, because arrays of equal types may differ in elements.
    if compiled is None or (
        compiled.factors and not are_finite(compiled.factors, operands, runner)
    ):
        return _compile(name, operands, attributes or {}, options or {}, runner, key)
    results = compiled.run(*operands)
    if recorders.active:
        _notify(compiled, operands, results)
    return results


def _notify(done: CompiledCall, operands: Sequence[Any], results: Any) -> None:
    arrays = results if isinstance(results, tuple) else (results,)
    for recorder in recorders.active:
        notify_recorder(recorder, done, operands, arrays)


def notify_recorder(
    recorder: Recorder, done: CompiledCall, operands: Sequence[Any], results: Sequence[ArrayValue]
) -> None:
    """Show a recorder the movements of an operation's operands, and the operation."""
    record_movement = recorder.record_movement
    if record_movement is not None:
        for operand, kind, spec in zip(operands, done.operands, done.runs_with, strict=True):
            own = None if kind is None else kind.spec
            if own is not None and spec is not None and own is not spec:
                record_movement(done, operand, spec)
    recorder.record(done, operands, results)


def _common_runner(name: str, runner: Runner, other: Runner) -> Runner:
    """Return the runner of operands of two runners. Raises UsageError unless one is abstract."""
    # An abstract runner takes arrays with elements, the constants of a traced function, as
    # operands.
    if other.is_abstract or runner.is_abstract:
        return other if other.is_abstract else runner
    raise UsageError(
        f"{name} of arrays of {runner!r} and of {other!r}; make both with one runner: "
        "sp.array(x.to_dense(), spec)"
    )


def _refuse_operands(name: str, operands: Sequence[Any]) -> UsageError:
    for operand in operands:
        refuse_traced(name, operand)
    said = ", ".join(map(reprlib.repr, operands))
    return UsageError(f"{name} of {said}; at least one sp.array(...) was expected")


def common_mesh(name: str, types: Sequence[ArrayType | None]) -> DeviceMesh | None:
    """Return the mesh of the sharded operands. Raises MeshError if they have different meshes."""
    mesh: DeviceMesh | None = None
    for array_type in types:
        if array_type is None or array_type.spec is None:
            continue
        if mesh is None:
            mesh = array_type.spec.mesh
        # Equal meshes are the same object.
        elif array_type.spec.mesh is not mesh:
            raise MeshError(
                f"{name} of arrays over {mesh!r} and over {array_type.spec.mesh!r}; an "
                "operation has one mesh: bring one array to the other's with x.shard(spec)"
            )
    return mesh


@dataclass(frozen=True, slots=True)
class OperationSpecs:
    """The rule and the shardings of an operation that is to run."""

    inferred: Inferred
    runs_with: tuple[ShardingSpec | None, ...]
    computed_specs: tuple[ShardingSpec, ...]
    result_specs: tuple[ShardingSpec, ...]
    keeps_pending: bool


def infer_specs(
    operator: Operator,
    operands: Sequence[ArrayType | None],
    attributes: Attributes,
    mesh: DeviceMesh,
    allows_partial: bool = True,
) -> OperationSpecs:
    """Return the shardings of operands and results of an operation over a mesh.

    Pending sums are reduced first where the operator cannot work on contributions.
    """
    shapes = [() if operand is None else operand.shape for operand in operands]
    inferred = infer_checked(operator, operands, attributes)
    axes, reduction = kept_partial(operator, operands, attributes) if allows_partial else ((), None)
    specs = [
        replicated(mesh, len(shape))
        if operand is None or operand.spec is None
        else without_partial(operand.spec)
        for operand, shape in zip(operands, shapes, strict=True)
    ]
    if operator.placed is not None:
        chosen = operator.placed(specs, shapes, attributes)
        if chosen is not None:
            runs, computed = chosen
            return OperationSpecs(inferred, runs, computed, computed, False)
    # Adjusted factors are sharded only if the local function finds the offset of its part.
    knows_place = operator.knows_place
    is_known = knows_place is not None and knows_place(specs, shapes, attributes)
    placed, computed, results = aligned_by_bytes(
        inferred.rule,
        tuple(specs),
        tuple(shapes),
        tuple(inferred.result_shapes),
        () if is_known else inferred.adjusted,
        inferred.leading,
    )
    if any(
        spec.partial_axes and spec.reduction != (reduction or spec.reduction) for spec in computed
    ):
        # An array is partial by a single reduction, so the operands are combined first.
        return infer_specs(operator, operands, attributes, mesh, allows_partial=False)
    if axes:
        computed = tuple(with_partial(spec, axes, reduction) for spec in computed)
        results = tuple(with_partial(spec, axes, reduction) for spec in results)
    runs_with: list[ShardingSpec | None] = []
    for operand, spec in zip(operands, placed, strict=True):
        pending = () if operand is None or operand.spec is None else operand.spec.partial_axes
        partial_axes = tuple(axis for axis in pending if axis in axes)
        runs_with.append(None if operand is None else with_partial(spec, partial_axes, reduction))
    return OperationSpecs(inferred, tuple(runs_with), computed, results, bool(axes))


def _compile(
    name: str,
    operands: Sequence[Any],
    attributes: Attributes,
    options: Attributes,
    runner: Runner,
    key: Any,
    allows_partial: bool = True,
) -> Any:
    """Compile an operation, run it for the first time, and cache it."""
    # 1. Check the operands, and find the mesh and the operator.
    for operand in operands:
        if not isinstance(operand, ArrayValue | int | float | complex):
            refuse_traced(name, operand)
            raise UsageError(
                f"{name} of {operand!r}, a {type(operand).__name__}; numbers and arrays were "
                "expected: make it one with sp.array"
            )
    types = tuple(x.type if isinstance(x, ArrayValue) else None for x in operands)
    mesh = common_mesh(name, types)
    op_specs = inferred = None
    if mesh is None:
        operator = find_operator(name)
        if operator.has_rule:
            # Libraries accept arguments that rules reject, for instance axis 0 of a number.
            inferred = infer_checked(operator, types, attributes)
    else:
        operator = operator_of(name)
        if operator.has_rule:
            op_specs = infer_specs(operator, types, attributes, mesh, allows_partial)
            inferred = op_specs.inferred
    # 2. Without a rule or a mesh each rank works on whole operands.
    if op_specs is None:
        runs_with = tuple(
            None if array_type is None or mesh is None else replicated(mesh, array_type.ndim)
            for array_type in types
        )
    else:
        runs_with = op_specs.runs_with
    # 3. Sums stay partial only if they are multiplied by finite elements. The operation that
    # combines them first is compiled under a separate key, in addition to this key.
    factors = factors_of(operands, runs_with) if op_specs and op_specs.keeps_pending else ()
    if factors and not are_finite(factors, operands, runner):
        key = (*key, "contributions combined before")
        compiled = runner.calls.get(key)
        if compiled is None:
            return _compile(name, operands, attributes, options, runner, key, False)
        made_again = compiled.run(*operands)
        if recorders.active:
            _notify(compiled, operands, made_again)
        return made_again
    # 4. Movements of operands, and the function that each rank computes.
    ranks = runner.ranks(mesh)
    targets = [
        None
        if kind is None or spec is None or kind.spec is spec
        else (spec, runner.movement(kind, spec))
        for kind, spec in zip(types, runs_with, strict=True)
    ]
    # In an abstract runner all ranks take the same operand: it has no elements, or is a constant of
    # a traced function, which has only the shards of this process.
    takes = [
        (kind is None or runner.is_abstract, target)
        for kind, target in zip(types, targets, strict=True)
    ]
    work = LocalWork(
        name,
        {**attributes, **options},
        tuple(
            None if array_type is None else array_type.with_spec(spec)
            for array_type, spec in zip(types, runs_with, strict=True)
        ),
        () if op_specs is None else op_specs.computed_specs,
        () if inferred is None else tuple(inferred.result_shapes),
        ranks,
        runner.library,
        tuple(options),
    )
    functions = runner.functions(operator, work)
    columns = [
        (x,) * len(ranks) if is_shared else take_moved(x, *target) if target else x._shards
        for x, (is_shared, target) in zip(operands, takes, strict=True)
    ]
    # 5. The first run, which determines the results' element types.
    shares_failure = operator.may_fail(work, runner.has_everyone(mesh))
    # Where ranks share failures, an error of another rank is raised here as well.
    if not (shares_failure or runner.has_every_shard):
        check_types(operator, work, operands, runner)
    rows = compute(name, functions, columns, operands, runner, shares_failure)
    # 6. Types of the results. If they do not allow partial sums, it is compiled again without.
    if rows:
        is_single = not isinstance(rows[0], tuple | list)
        outputs = [(row,) for row in rows] if is_single else [tuple(row) for row in rows]
        computed_types = _find_result_types(work, outputs, mesh, op_specs, runner)
    else:
        computed_types, is_single = _suppose_result_types(operator, work, operands, op_specs)
    if (
        op_specs is not None
        and op_specs.keeps_pending
        and not types_allow_partial(types, computed_types)
    ):
        return _compile(name, operands, attributes, options, runner, key, False)
    specs = (
        [array_type.spec for array_type in computed_types]
        if op_specs is None
        else op_specs.result_specs
    )
    results = tuple(
        array_type.with_spec(spec) for array_type, spec in zip(computed_types, specs, strict=True)
    )
    # 7. Cache the compiled operation for later calls.
    wrap = next(type(x) for x in operands if isinstance(x, ArrayValue))
    done = CompiledCall(
        name,
        attributes,
        options,
        types,
        runs_with,
        computed_types,
        results,
        None if inferred is None else inferred.rule,
        factors,
        tuple(functions),
        is_single,
        shares_failure,
    )
    # Set afterwards, since the function is made from the record that it belongs to.
    object.__setattr__(done, "run", make_run(done, operator, takes, runner, wrap))
    if len(runner.calls) >= MAX_CACHED:
        runner.calls.clear()
    runner.calls[key] = done
    wrapped = wrap_results(done, rows, runner, wrap)
    if may_view(operator, len(operands)):
        mark_views(operands, wrapped)
    if recorders.active:
        _notify(done, operands, wrapped)
    return wrapped[0] if is_single else wrapped


def _suppose_result_types(
    operator: Operator, work: LocalWork, operands: Sequence[Any], op_specs: OperationSpecs | None
) -> tuple[tuple[ArrayType, ...], bool]:
    """Return the results' types and whether there is a single result, without any shard here."""
    if op_specs is None:
        raise MeshError(
            f"{work.name}, which has no sharding rule, over a mesh without this process: what "
            "comes out is not known here; use a mesh of all processes"
        )
    numbers = [x for x in operands if not isinstance(x, ArrayValue)]
    dtypes, is_single = find_result_types(operator, work, numbers, len(work.result_shapes))
    kinds = zip(work.result_shapes, dtypes, op_specs.computed_specs, strict=True)
    return tuple(ArrayType(*kind) for kind in kinds), is_single


def _find_result_types(
    work: LocalWork,
    outputs: list[tuple[Any, ...]],
    mesh: DeviceMesh | None,
    op_specs: OperationSpecs | None,
    runner: Runner,
) -> tuple[ArrayType, ...]:
    """Return the results' types, checked against what the ranks computed."""
    types = []
    # Element types are read off the first rank's shards; shapes and shardings come from the rule.
    for number, array in enumerate(outputs[0]):
        dtype = runner.library.dtype_of(array)
        if op_specs is None:
            shape = tuple(array.shape)
            types.append(
                ArrayType(shape, dtype, None if mesh is None else replicated(mesh, len(shape)))
            )
        else:
            types.append(
                ArrayType(work.result_shapes[number], dtype, op_specs.computed_specs[number])
            )
    for number, array_type in enumerate(types):
        shapes = array_type.layout.local_shapes
        for rank, row in zip(work.ranks, outputs, strict=True):
            expected = shapes.get(rank)
            if tuple(row[number].shape) != expected:
                raise ShardError(
                    f"{work.name} made a shard of shape {list(row[number].shape)} on rank {rank}, "
                    f"but result {number} sharded by `{array_type.spec}` has "
                    f"{list(expected or ())} there; its rule and what it computes do not fit"
                )
    return tuple(types)
