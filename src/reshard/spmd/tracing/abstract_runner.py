"""Abstract runner: operations on arrays with a shape, type and sharding, without elements.

An `AbstractRunner` stands where a runner with elements would: operations find their shardings,
movements and results as they always do, and compute nothing. The shapes are those of the
operators' rules, the element types those that their rows name, or what the library that will
compute makes of a few elements.

Functions whose results depend on elements are executed with assumed elements, inside
`abstract_values`, to determine the types of their results. Choices are assumed to be even: every
expert is chosen equally often.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from reshard._contexts import set_context
from reshard.dtypes import DType
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.backend import Library, library
from reshard.spmd.core.local_work import Function, LocalWork
from reshard.spmd.core.operator import Operator
from reshard.spmd.core.result_types import find_result_types
from reshard.spmd.shards.runner import Runner, Transport
from reshard.spmd.shards.shard_copies import Movement, Shards


@dataclass(frozen=True, slots=True)
class AbstractShard:
    """A shard without elements."""

    shape: tuple[int, ...]
    dtype: DType


class AbstractLibrary(Library):
    """NumPy, which also knows the element types of abstract shards."""

    def dtype_of(self, array: Any) -> DType:
        """Return the element type of an array or an abstract shard."""
        return array.dtype if isinstance(array, AbstractShard) else super().dtype_of(array)

    def filled(self, shape: Sequence[int], value: Any, like: Any) -> Any:
        """Return an array filled with a number, of the element type of another array."""
        return np.full(shape, value, dtype=self.dtype_of(like).numpy)


class AbstractRunner(Runner):
    """All shards of arrays without elements.

    Args:
        computing: the library of what its arrays stand for; NumPy when None.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.dtypes import dtype
    >>> from reshard.spmd.arrays.sharded_array import ShardedArray
    >>> rows = ArrayType((4, 8), dtype("float32"), spec(DeviceMesh.of(x=2), "x, -"))
    >>> (AbstractRunner().array(rows, ShardedArray) > 0).type
    ArrayType(bool[4, 8], 'x, -')
    """

    is_abstract = True

    def __init__(self, computing: Library | None = None) -> None:
        super().__init__(AbstractLibrary("numpy", library("numpy").namespace))
        self._computing = library("numpy") if computing is None else computing

    @property
    def computing(self) -> Library:
        """The library of the arrays with elements that its arrays stand for."""
        return self._computing

    def array(self, kind: ArrayType, wrap: type[Any]) -> Any:
        """Return an array of a type, of the class `wrap`."""
        ranks = self.ranks(None if kind.spec is None else kind.spec.mesh)
        return wrap.of_shards(kind, self._shards(kind, ranks), self)

    def functions(self, operator: Operator, work: LocalWork) -> list[Function]:
        """Return the functions that make the results' abstract shards on each rank.

        Raises UsageError for an operator without a rule for its results' shapes.
        """
        if not operator.has_rule:
            raise UsageError(
                f"operator {work.name} has no sharding rule, so that the shape of its result is "
                f'not known before it runs; give it one with @reshard.spmd.rule("{work.name}")'
            )
        result_shapes = work.result_shapes
        specs: Sequence[ShardingSpec | None] = work.result_specs or (None,) * len(result_shapes)
        few = replace(work, library=self._computing)

        # All ranks' shards are made at once and shared by the functions of the ranks. Typed, since
        # 1, 1.0 and True are equal as keys, but promote differently.
        @lru_cache(typed=True)
        def make(*numbers: Any) -> Any:
            dtypes, is_single = find_result_types(operator, few, numbers, len(result_shapes))
            columns = [
                self._shards(ArrayType(shape, dtype, spec), work.ranks)
                for shape, dtype, spec in zip(result_shapes, dtypes, specs, strict=True)
            ]
            return columns[0] if is_single else tuple(zip(*columns, strict=True))

        def function(place: int, *operands: Any) -> Any:
            pairs = zip(operands, work.operands, strict=True)
            return make(*(number for number, kind in pairs if kind is None))[place]

        return [partial(function, place) for place in range(len(work.ranks))]

    def transport(self, source: ArrayType, spec: ShardingSpec) -> Transport:
        """Return how an array is resharded over the processes of a host."""
        return "messages" if self.is_moved(source, spec) else "here"

    def _find_ranks(self, mesh: DeviceMesh) -> tuple[int, ...]:
        return mesh.devices

    def _make_movement(self, source: ArrayType, spec: ShardingSpec, plan: LayoutChange) -> Movement:
        shards = self._shards(source.with_spec(spec), self.ranks(spec.mesh))
        return lambda _: shards

    def _cross_meshes(self, source: ArrayType, mesh: DeviceMesh, spec: ShardingSpec) -> Movement:
        shards = self._shards(source.with_spec(spec), self.ranks(spec.mesh))
        return lambda _: shards

    def _shards(self, kind: ArrayType, ranks: Sequence[int]) -> Shards:
        if kind.spec is None:
            return (AbstractShard(kind.shape, kind.dtype),) * len(ranks)
        # A rank without a part lacks an entry, and gets a shard without dimensions.
        shapes = kind.layout.local_shapes
        return tuple(AbstractShard(shapes.get(rank, ()), kind.dtype) for rank in ranks)

    def dense(self, source: ArrayType, shards: Shards) -> Any:
        """Return the elements of a constant. Raises UsageError for an array that has none."""
        # Constants of a traced function keep their elements.
        if source.spec is None and not isinstance(shards[0], AbstractShard):
            return shards[0]
        raise UsageError(
            f"the elements of {source} were asked for, but a function is traced without any: "
            "bool(x), float(x), masks, nonzero and unique need them; use sp.where and the like, or "
            "do that outside the function"
        )

    def __repr__(self) -> str:
        return f"AbstractRunner({self._computing!r})"


_is_supposed: ContextVar[bool] = ContextVar("is_supposed", default=False)


def abstract_values() -> AbstractContextManager[None]:
    """Assume element values inside, for arrays without elements.

    >>> with abstract_values():
    ...     uses_abstract_values()
    True
    """
    return set_context(_is_supposed, True)


def uses_abstract_values() -> bool:
    """Return whether element values may be assumed here."""
    return _is_supposed.get()
