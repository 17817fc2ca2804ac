"""Array types: shape, element type and sharding of an array, as an interned object.

Shardings that follow from others are here too: plain, without contributions, of a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache

from reshard._interning import Interned
from reshard._validation import check_type
from reshard.dtypes import DType
from reshard.errors import SpecError
from reshard.layout import Layout
from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import DimSpec, ShardingSpec


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
        self.shape = tuple(map(int, shape))
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


@lru_cache(maxsize=1024)
def replicated(mesh: DeviceMesh, ndim: int) -> ShardingSpec:
    """Return the sharding with a whole copy on every device."""
    return ShardingSpec(mesh, [DimSpec()] * ndim)


def plain_spec(spec: ShardingSpec) -> ShardingSpec:
    """Return a sharding without open dimensions, priorities and replicated axes.

    Raises SpecError for a sharding that leaves devices out, and UsageError for other values.
    """
    check_type(spec, ShardingSpec, "sharding", "give reshard.spec(mesh, 'x, -')")
    if spec.only:
        raise SpecError(
            f"`{spec}` leaves out devices; every device computes its part of an operation, so "
            "give a sharding without only(...)"
        )
    # Open dimensions, priorities and replicated axes are for propagation, not for where elements
    # are.
    if not spec.replicated_axes and not any(d.is_open or d.priority for d in spec.dim_specs):
        return spec
    return _make_plain(spec)


@lru_cache(maxsize=4096)
def _make_plain(spec: ShardingSpec) -> ShardingSpec:
    return ShardingSpec(
        spec.mesh,
        [DimSpec(dim.levels) for dim in spec.dim_specs],
        partial_axes=spec.partial_axes,
        reduction=spec.reduction,
    )


@lru_cache(maxsize=4096)
def without_partial(spec: ShardingSpec) -> ShardingSpec:
    """Return the sharding that is left when all contributions are combined."""
    return ShardingSpec(spec.mesh, spec.dim_specs) if spec.partial_axes else spec


def settled(kind: ArrayType) -> ArrayType:
    """Return the type without pending sums."""
    return kind if kind.spec is None else kind.with_spec(without_partial(kind.spec))


def with_partial(spec: ShardingSpec, axes: Sequence[Axis], reduction: str | None) -> ShardingSpec:
    """Return the sharding with further partial axes."""
    if not axes:
        return spec
    return ShardingSpec(
        spec.mesh,
        spec.dim_specs,
        partial_axes=(*axes, *spec.partial_axes),
        reduction=reduction,
    )


def gradient_spec(spec: ShardingSpec) -> ShardingSpec:
    """Return the sharding of an array's gradient, which swaps copies and contributions.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(x=2, y=2)
    >>> for text in ("x, -", "-, -", "x, - | sum(y)"):
    ...     print(gradient_spec(reshard.spec(mesh, text)))
    x, - | sum(y)
    -, - | sum(x y)
    x, -
    """
    used = [axis for dim in spec.dim_specs for axis in dim.axes] + list(spec.partial_axes)
    return ShardingSpec(spec.mesh, spec.dim_specs, partial_axes=spec.mesh.remaining_axes(used))


def with_cut(spec: ShardingSpec, dim: int, cut: DimSpec) -> ShardingSpec:
    """Return a sharding with another sharding of a dimension."""
    dims = [*spec.dim_specs[:dim], cut, *spec.dim_specs[dim + 1 :]]
    return ShardingSpec(spec.mesh, dims, partial_axes=spec.partial_axes, reduction=spec.reduction)
