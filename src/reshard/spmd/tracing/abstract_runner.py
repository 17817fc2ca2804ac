"""Abstract runner: operations on arrays of which only shape, element type and sharding are known.

An `AbstractRunner` stands where a runner with elements would: operations find their shardings,
movements and results as they always do, and compute nothing. The shapes are those of the
operators' rules, the element types those that their rows name, or what the library makes of a few
elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.spmd.array_type import ArrayType
from reshard.spmd.local.library import Library, library
from reshard.spmd.local.local_work import Function, LocalWork
from reshard.spmd.operators.operator import Operator
from reshard.spmd.operators.result_types import meant, stand_in
from reshard.spmd.shards.runner import Runner
from reshard.spmd.shards.shard_copies import Movement, Shards


@dataclass(frozen=True, slots=True)
class AbstractShard:
    """A shard without elements."""

    shape: tuple[int, ...]
    dtype: DType


class AbstractLibrary(Library):
    """NumPy, which also knows the element types of abstract shards."""

    def dtype_of(self, array: Any) -> DType:
        """The element type of an array or an abstract shard."""
        return array.dtype if isinstance(array, AbstractShard) else super().dtype_of(array)

    def filled(self, shape: Sequence[int], value: Any, beside: Any) -> Any:
        """An array of one number, of the element type of another array or abstract shard."""
        return np.full(shape, value, dtype=self.dtype_of(beside).numpy)


class AbstractRunner(Runner):
    """All shards of arrays without elements.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.spmd.arrays.sharded_array import ShardedArray
    >>> rows = ArrayType((4, 8), as_dtype("float32"), spec(DeviceMesh.of(x=2), "x, -"))
    >>> (AbstractRunner().array(rows, ShardedArray) > 0).type
    ArrayType(bool[4, 8], 'x, -')
    """

    is_abstract = True

    def __init__(self) -> None:
        super().__init__(AbstractLibrary("numpy", library("numpy").namespace))

    def array(self, kind: ArrayType, wrap: type[Any]) -> Any:
        """An array of a type, of the class `wrap`."""
        ranks = self.ranks(None if kind.spec is None else kind.spec.mesh)
        return wrap.of_shards(kind, self._shards(kind, ranks), self)

    def functions(self, operator: Operator, work: LocalWork) -> list[Function]:
        """The functions that make the results' abstract shards on each rank.

        Raises UsageError for an operator whose results' shapes no rule tells.
        """
        if not operator.has_rule:
            raise UsageError(
                f"operator {work.name} has no sharding rule, so that the shape of its result is "
                f'not known before it runs; give it one with @reshard.spmd.rule("{work.name}")'
            )
        # Options change how the work is done, not what shape comes out: rules do not take them.
        asked = {k: value for k, value in work.attributes.items() if k not in work.options}
        shapes = [() if one is None else one.shape for one in work.operands]
        result_shapes = operator.result_shapes(shapes, **asked)
        specs: Sequence[ShardingSpec | None] = work.result_specs or (None,) * len(result_shapes)

        # All ranks' shards are made at once and shared by the functions of the ranks. Typed, since
        # 1, 1.0 and True are equal as keys, but promote differently.
        @lru_cache(typed=True)
        def make(*numbers: Any) -> Any:
            dtypes, is_single = _find_result_types(operator, work, numbers, len(result_shapes))
            columns = [
                self._shards(ArrayType(shape, dtype, spec), work.ranks)
                for shape, dtype, spec in zip(result_shapes, dtypes, specs, strict=True)
            ]
            return columns[0] if is_single else tuple(zip(*columns, strict=True))

        def function(place: int, *operands: Any) -> Any:
            pairs = zip(operands, work.operands, strict=True)
            return make(*(number for number, kind in pairs if kind is None))[place]

        return [partial(function, place) for place in range(len(work.ranks))]

    def _find_ranks(self, mesh: DeviceMesh) -> tuple[int, ...]:
        return mesh.devices

    def _make_movement(self, source: ArrayType, spec: ShardingSpec, plan: LayoutChange) -> Movement:
        shards = self._shards(source.with_spec(spec), self.ranks(spec.mesh))
        return lambda _: shards

    def _shards(self, kind: ArrayType, ranks: Sequence[int]) -> Shards:
        if kind.spec is None:
            return (AbstractShard(kind.shape, kind.dtype),) * len(ranks)
        shapes = (kind.layout.local_shape(rank) or () for rank in ranks)
        return tuple(AbstractShard(shape, kind.dtype) for shape in shapes)

    def dense(self, source: ArrayType, shards: Shards) -> Any:
        """The elements of a constant. Raises UsageError for an array that has none."""
        if source.spec is None and not isinstance(shards[0], AbstractShard):
            return shards[0]
        raise UsageError(
            f"the elements of {source} were asked for, but a function is traced without any: "
            "bool(x), float(x), masks, nonzero and unique need them; use sp.where and the like, or "
            "do that outside the function"
        )

    def __repr__(self) -> str:
        return "AbstractRunner()"


_FEW = 2
"""Elements along a dimension that tell the type of a result."""


def _find_result_types(
    operator: Operator, work: LocalWork, numbers: Sequence[Any], count: int
) -> tuple[tuple[DType, ...], bool]:
    """The results' element types, and whether there is one result that stands by itself."""
    # 1. Types that the operator's row names; the last one stands for all results that follow.
    given = [one.dtype for one in work.operands if one is not None]
    if operator.result_types is not None:
        named = operator.result_types(given, work.attributes, "numpy")
        return (*named, *named[-1:] * (count - len(named))), count == 1
    # 2. Else the operator computes a few elements in NumPy, with stand-ins for types NumPy lacks.
    few = tuple(
        None if one is None else ArrayType([min(size, _FEW) for size in one.shape], one.dtype)
        for one in work.operands
    )
    here = LocalWork(
        work.name, _replace_types(work.attributes), few, (), (), (0,), library("numpy")
    )
    (function,) = operator.local_functions(here)
    waiting = list(numbers)
    arrays = [waiting.pop(0) if one is None else _make_elements(one) for one in few]
    with np.errstate(all="ignore"):
        found = function(*arrays)
    is_single = not isinstance(found, tuple | list)
    results = (found,) if is_single else tuple(found)
    asked = [value for value in work.attributes.values() if isinstance(value, DType)]
    return tuple(meant(one.dtype, [*asked, *given]) for one in results), is_single


def _make_elements(kind: ArrayType) -> Any:
    """Ones, and unit matrices, of which decompositions and quotients are found; indices of 0."""
    numpy = stand_in(kind.dtype)
    if numpy.kind in "iub":
        return np.zeros(kind.shape, dtype=numpy)
    if kind.ndim < 2:
        return np.ones(kind.shape, dtype=numpy)
    unit = np.eye(*kind.shape[-2:], dtype=numpy)
    return np.broadcast_to(unit, kind.shape)


def _replace_types(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: as_dtype(stand_in(value)) if isinstance(value, DType) else value
        for name, value in attributes.items()
    }
