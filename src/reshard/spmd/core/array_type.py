"""Array types: shape, element type and sharding of an array, as an interned object."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from reshard._interning import Interned
from reshard.dtypes import DType
from reshard.errors import SpecError
from reshard.layout import Layout
from reshard.sharding import ShardingSpec


class ArrayType(Interned):
    """Shape, element type and sharding of an array, interned.

    Operations are compiled once per types of their operands, so equal types are the same object.

    Args:
        shape: of the full array.
        dtype: the element type.
        spec: the sharding; None for an array that is replicated wherever it is used.

    Raises:
        SpecError: a sharding with another number of dimensions.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.dtypes import dtype
    >>> rows = ArrayType((4, 8), dtype("float32"), spec(DeviceMesh.of(x=2), "x, -"))
    >>> rows
    ArrayType(float32[4, 8], 'x, -')
    >>> rows.layout.local_shape(1)
    (2, 8)
    """

    field_names = ("shape", "dtype", "spec")

    def __init__(
        self, shape: Iterable[int], dtype: DType, spec: ShardingSpec | None = None
    ) -> None:
        self.shape = tuple(int(size) for size in shape)
        self.dtype = dtype
        self.spec = spec
        if spec is not None and spec.ndim != len(self.shape):
            raise SpecError(
                f"`{spec}` is for arrays of {spec.ndim} dimensions, not for shape "
                f"{list(self.shape)}; give one DimSpec a dimension"
            )

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @cached_property
    def layout(self) -> Layout:
        """The layout of the elements; all of them on slot 0 if the array is not sharded."""
        if self.spec is None:
            return Layout.replicated(self.shape)
        return self.spec.layout(self.shape)

    @cached_property
    def is_cut(self) -> bool:
        """Whether devices have different elements."""
        spec = self.spec
        if spec is None:
            return False
        return bool(spec.partial_axes) or any(dim.levels for dim in spec.dim_specs)

    def with_spec(self, spec: ShardingSpec | None) -> ArrayType:
        """Return the same array sharded another way."""
        return self if spec is self.spec else ArrayType(self.shape, self.dtype, spec)

    def with_dtype(self, dtype: DType) -> ArrayType:
        """Return the same array of another element type."""
        return ArrayType(self.shape, dtype, self.spec)

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        return f"{self.dtype.name}[{sizes}]"

    def __repr__(self) -> str:
        return f"ArrayType({self}{'' if self.spec is None else f', {str(self.spec)!r}'})"
