"""Shardings: how a tensor is laid out over the named axes of a mesh.

A `ShardingSpec` is symbolic: it names mesh axes, not devices, and applies to any tensor with the
right number of dimensions. Each dimension has a `DimSpec`: levels of mesh axes, major to minor. A
level of several axes splits once over their product; each further level splits the parts of the
level before it::

    6 rows over dp=2, tp=2        "dp tp"   2 2 2 0      one level, by ceil over 4 parts
                                  "dp / tp" 2 1 2 1      halves of 3, each split again

The tensor is replicated along axes that no dimension uses. Along partial axes, devices hold partial
results to be reduced. A tensor may be present at some coordinates of an axis only, as a layer on
its pipeline stage.

`spec(mesh, text)` reads the text that `str(sharding)` writes::

    dp tp, -                     rows over dp x tp in a single split, columns not split
    dp / tp, -                   rows over dp, each part again over tp
    -, x:(1)2 y                  columns over a part of x, and y
    tp@stride2, -                rows by another cut rule (see `reshard.cut_rules`)
    tp ?, - !1                   open to propagation; priority 1
    tp, - | replicated(dp) sum(pp)   replicated along dp, partial sums along pp
    tp, - | only(pp=0,3)         present only where the coordinate along pp is 0 or 3

There is an item for each dimension, separated by commas; in an item, axes from major to minor,
separated by spaces, and ` / ` between levels. The text of a tensor without dimensions is empty. If
the number of dimensions is given, `...` stands for the missing `-`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache

import numpy as np

from reshard._interning import Interned
from reshard._validation import check_int, check_ints
from reshard.cut_rules import Ceil, CutRule, Nested, expect_rule, parse_rule, split_outside_brackets
from reshard.errors import LayoutError, NotationError, SpecError
from reshard.layout import REDUCTIONS, Layout
from reshard.mesh import Axis, DeviceMesh
from reshard.runs import IntArray, RunTable


def join_axes(axes: Iterable[str | Axis]) -> tuple[Axis, ...]:
    """Return axes with adjacent parts of an axis joined.

    >>> join_axes([Axis("x", 1, 2), Axis("x", 2, 2), "y"])
    (x:(1)4, y)
    """
    if isinstance(axes, str) or not isinstance(axes, Iterable):
        raise SpecError(f"axes {axes!r}; give a list of mesh axes, such as ['dp', 'tp']")
    joined: list[Axis] = []
    for item in axes:
        axis = Axis.parse(item) if isinstance(item, str) else item
        if not isinstance(axis, Axis):
            raise SpecError(f"axis {item!r} of a dimension; give the name of a mesh axis")
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.name == axis.name
            and last.size is not None
            and axis.size is not None
            and axis.pre == last.pre * last.size
        ):
            # Adjacent: this part begins where the sizes of the last end.
            joined[-1] = Axis(axis.name, last.pre, last.size * axis.size)
        else:
            joined.append(axis)
    return tuple(joined)


def expect_mesh(mesh: object) -> None:
    """Raise SpecError for anything but a mesh, with a hint on how to convert it to a mesh."""
    if isinstance(mesh, DeviceMesh):
        return
    make = "reshard.DeviceMesh.of(dp=2, tp=4)"
    if isinstance(mesh, str) and "=" in mesh:
        make = f"reshard.DeviceMesh.parse({mesh!r})"
    raise SpecError(f"mesh {mesh!r} is not a DeviceMesh; make one, such as {make}")


class Level(Interned):
    """Mesh axes, major to minor, and the rule that splits over their product.

    >>> Level(["dp", "tp"])
    Level('dp tp')
    """

    field_names = ("axes", "rule")

    def __init__(self, axes: Iterable[str | Axis], rule: CutRule | None = None) -> None:
        self.axes = join_axes(axes)
        self.rule = Ceil() if rule is None else rule
        expect_rule(self.rule)
        if not self.axes:
            raise SpecError("a level of a dimension needs at least one mesh axis")

    def __str__(self) -> str:
        rule = "" if self.rule.is_default else f"@{self.rule.text}"
        return " ".join(map(str, self.axes)) + rule

    def __repr__(self) -> str:
        return f"Level({str(self)!r})"


class DimSpec(Interned):
    """The sharding of a dimension.

    Args:
        levels: `Level`s, major to minor; axes (or their names) alone make a single level.
        is_open: whether propagation may shard it further.
        priority: of this annotation in propagation; lower is stronger.

    >>> DimSpec(["x"]) is DimSpec([Level(["x"])])
    True
    >>> DimSpec([Level(["dp"]), Level(["tp"])], is_open=True, priority=2)
    DimSpec('dp / tp ?!2')
    """

    field_names = ("levels", "is_open", "priority")

    def __init__(
        self,
        levels: Iterable[Level | str | Axis] = (),
        is_open: bool = False,
        priority: int = 0,
    ) -> None:
        if isinstance(levels, str) or not isinstance(levels, Iterable):
            raise SpecError(
                f"levels {levels!r} of a dimension; give a list of mesh axes, such as ['dp', "
                "'tp']; a text is read by reshard.spec(mesh, 'dp tp, -')"
            )
        items = list(levels)
        levels_given = [item for item in items if isinstance(item, Level)]
        axes = [item for item in items if not isinstance(item, Level)]
        if levels_given and axes:
            raise SpecError(
                f"levels {levels_given} and axes {axes} in one DimSpec; give one or the other"
            )
        # A list of axes is a single level.
        self.levels = (Level(axes),) if axes else tuple(levels_given)
        if not isinstance(is_open, bool | np.bool_):
            raise SpecError(f"is_open {is_open!r}; give True or False")
        self.is_open = bool(is_open)
        self.priority = check_int(priority, "priority", SpecError)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of all levels, major to minor."""
        return tuple(itertools.chain.from_iterable(level.axes for level in self.levels))

    def table(self, mesh: DeviceMesh, length: int) -> RunTable:
        """Return the run table of a dimension of `length` sharded this way over `mesh`."""
        levels = tuple((level.rule, mesh.joint_size(level.axes)) for level in self.levels)
        if len(levels) == 1:
            rule, parts = levels[0]
            return rule.table(length, parts)
        return Nested(levels).table(length, math.prod(parts for _, parts in levels))

    def __str__(self) -> str:
        words = [" / ".join(map(str, self.levels))] if self.levels else []
        mark = "?" * self.is_open + (f"!{self.priority}" if self.priority else "")
        words += [mark] if mark else []
        return " ".join(words) or "-"

    def __repr__(self) -> str:
        return f"DimSpec({str(self)!r})"


# A model has few shardings and many tensors, so most layouts share these parts.
@lru_cache(maxsize=1024)
def _table(dim: DimSpec, mesh: DeviceMesh, length: int) -> RunTable:
    return dim.table(mesh, length) if dim.levels else RunTable(length, 1, [(0, 0, length, 0)])


@lru_cache(maxsize=256)
def _coordinates(mesh: DeviceMesh, axes: tuple[Axis, ...]) -> IntArray:
    coordinates = mesh.coordinates(axes)
    coordinates.flags.writeable = False
    return coordinates


def _as_dim_spec(item: object) -> DimSpec:
    if isinstance(item, DimSpec):
        return item
    if isinstance(item, str) or not isinstance(item, Iterable):
        raise SpecError(
            f"dimension {item!r} of a sharding; give a DimSpec or a list of mesh axes, such as "
            "['tp'], [] for a dimension that is not sharded; a text is read by reshard.spec"
        )
    return DimSpec(item)


class ShardingSpec(Interned):
    """A sharding of a tensor over a mesh.

    Args:
        mesh: the devices.
        dim_specs: a `DimSpec` per dimension of the tensor.
        replicated_axes: axes that propagation must keep replicated; other unused axes are
            replicated too.
        partial_axes: axes along which devices hold contributions, major to minor.
        reduction: how contributions combine: sum, max, min, mean or product; the sum if None.
        only: coordinates by axis; devices at other coordinates hold nothing.

    Raises:
        SpecError: an axis used twice, sub-axes that overlap, an unknown reduction, coordinates
            outside an axis.
        MeshError: an axis or sub-axis that is not in the mesh.

    >>> mesh = DeviceMesh.of(dp=2, tp=4)
    >>> spec = ShardingSpec(mesh, [DimSpec(["tp"]), DimSpec()], partial_axes=["dp"])
    >>> spec
    ShardingSpec(DeviceMesh(dp=2,tp=4), 'tp, - | sum(dp)')
    >>> spec.layout((6, 4)).local_shape(1)
    (2, 4)
    >>> ShardingSpec(mesh, [["tp"]], only={"dp": [1]}).layout((6,)).holders
    (4, 5, 6, 7)
    """

    field_names = ("mesh", "dim_specs", "replicated_axes", "partial_axes", "reduction", "only")

    def __init__(
        self,
        mesh: DeviceMesh,
        dim_specs: Iterable[DimSpec | Sequence[str]],
        replicated_axes: Iterable[str | Axis] = (),
        partial_axes: Iterable[str | Axis] = (),
        reduction: str | None = "sum",
        only: Mapping[str, Iterable[int]] | Iterable[tuple[str, Iterable[int]]] = (),
    ) -> None:
        expect_mesh(mesh)
        self.mesh = mesh
        if reduction is None:
            reduction = "sum"
        if not isinstance(reduction, str) or reduction not in REDUCTIONS:
            raise SpecError(
                f"unknown reduction {reduction!r}; it is one of {', '.join(REDUCTIONS)}"
            )
        if isinstance(dim_specs, str):
            raise SpecError(
                f"dimensions {dim_specs!r}; a text is read by reshard.spec(mesh, {dim_specs!r})"
            )
        if not isinstance(dim_specs, Iterable):
            raise SpecError(f"dimensions {dim_specs!r}; give a list with a DimSpec for each")
        self.dim_specs = tuple(map(_as_dim_spec, dim_specs))
        # Joined and without whole sub-axes, so that shardings that mean the same are the same
        # object.
        self.partial_axes = self._without_full_parts(join_axes(partial_axes))
        # Without partial axes the reduction is None, so that equal shardings are interned.
        self.reduction = reduction if self.partial_axes else None
        # In mesh order, since the order of replicated axes is irrelevant.
        replicated = sorted(
            join_axes(replicated_axes), key=lambda axis: (self._position(axis), axis.pre)
        )
        self.replicated_axes = self._without_full_parts(join_axes(replicated))
        self.dim_specs = tuple(map(self._dim_without_full_parts, self.dim_specs))
        self.only = self._restrictions(only)
        self._check_disjoint()

    def _restrictions(
        self, only: Mapping[str, Iterable[int]] | Iterable[tuple[str, Iterable[int]]]
    ) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the effective restrictions, in mesh order."""
        try:
            pairs = dict(only).items() if isinstance(only, Mapping) else [(a, c) for a, c in only]
        except (TypeError, ValueError):
            raise SpecError(
                f"only {only!r}; give coordinates by axis, such as {{'pp': [0]}}"
            ) from None
        restrictions: dict[str, tuple[int, ...]] = {}
        for axis, chosen in pairs:
            size = self.mesh.axis_size(Axis(axis))
            numbers = check_ints(chosen, f"coordinates of axis {axis}", SpecError, minimum=None)
            coordinates = tuple(sorted(set(numbers)))
            if axis in restrictions:
                raise SpecError(
                    f"axis {axis} is restricted twice; give all its coordinates at once, such as "
                    f"only({axis}=0,1)"
                )
            if not coordinates or coordinates[0] < 0 or coordinates[-1] >= size:
                raise SpecError(
                    f"only coordinates {list(coordinates)} of axis {axis}, whose coordinates are 0 "
                    f"to {size - 1}; give at least one of them"
                )
            restrictions[axis] = coordinates
        return tuple(
            (axis, restrictions[axis])
            for axis, size in zip(self.mesh.axis_names, self.mesh.shape, strict=True)
            # All coordinates of an axis together restrict nothing.
            if axis in restrictions and len(restrictions[axis]) < size
        )

    def _position(self, axis: Axis) -> int:
        self.mesh.axis_size(axis)
        return self.mesh.axis_names.index(axis.name)

    def _without_full_parts(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Validate the axes, and replace a sub-axis that is the whole axis by the axis."""
        return tuple(
            Axis(axis.name) if self.mesh.axis_size(axis) == self.mesh.axis_size(axis.name) else axis
            for axis in axes
        )

    def _dim_without_full_parts(self, dim: DimSpec) -> DimSpec:
        """Validate the axes of a dimension, and normalize its sub-axes."""
        axes = [self._without_full_parts(level.axes) for level in dim.levels]
        # A fast path: rebuilding levels takes the most time here, and is rarely needed.
        if all(new == level.axes for new, level in zip(axes, dim.levels, strict=True)):
            return dim
        levels = [Level(new, level.rule) for new, level in zip(axes, dim.levels, strict=True)]
        return DimSpec(levels, dim.is_open, dim.priority)

    def _check_disjoint(self) -> None:
        uses = [
            (axis, f"dimension {d}") for d, dim in enumerate(self.dim_specs) for axis in dim.axes
        ]
        uses += [(axis, "the replicated axes") for axis in self.replicated_axes]
        uses += [(axis, "the partial axes") for axis in self.partial_axes]
        uses += [(Axis(axis), "the restricted axes") for axis, _ in self.only]
        for (a, place_a), (b, place_b) in itertools.combinations(uses, 2):
            if a.name != b.name:
                continue
            places = f"{place_a} and {place_b}" if place_a != place_b else f"{place_a}, twice"
            if a.size is None or b.size is None or a == b:
                raise SpecError(
                    f"axis {a if a.size is None else b} is used in {places}; an axis has one use, "
                    f"use sub-axes such as {a.name}:(1)2 to share it"
                )
            # Sub-axes are disjoint if the minor begins at a multiple of the end of the major.
            low, high = sorted((a, b), key=lambda axis: axis.pre)
            if high.pre % (low.pre * (low.size or 1)):
                raise SpecError(
                    f"sub-axes {a} and {b} of {places} overlap; {low} ends at "
                    f"{low.pre * (low.size or 1)}, and {high} must begin at a multiple of that"
                )

    @property
    def used_axes(self) -> tuple[Axis, ...]:
        """The axes that shard a dimension, and the partial axes."""
        return (*(axis for dim in self.dim_specs for axis in dim.axes), *self.partial_axes)

    @property
    def ndim(self) -> int:
        """Number of tensor dimensions."""
        return len(self.dim_specs)

    def with_dims(self, dim_specs: Sequence[DimSpec]) -> ShardingSpec:
        """Return the sharding with other dimensions, on the same ranks.

        >>> print(spec(DeviceMesh.of(x=2), "x, -").with_dims([DimSpec(), DimSpec(["x"])]))
        -, x
        """
        return self.replace(dim_specs=dim_specs)

    def layout(self, shape: Sequence[int]) -> Layout:
        """Return the layout of a tensor of `shape`. Its ranks are the devices of the mesh.

        Raises:
            SpecError: a shape with another number of dimensions.
            RuleError: a cut rule that does not fit a dimension.

        >>> mesh = DeviceMesh.of(x=2, devices=[5, 3])
        >>> ShardingSpec(mesh, [DimSpec(["x"])]).layout((4,)).boxes(5)
        (Box(start=(0,), stop=(2,)),)
        """
        shape = check_ints(shape, "shape", SpecError)
        if len(shape) != self.ndim:
            raise SpecError(
                f"`{self}` is for tensors of {self.ndim} dimensions, not for shape {list(shape)}; "
                "write one item per dimension, `-` for one that is not sharded"
            )
        return _lay_out(self, shape)

    def __str__(self) -> str:
        text = ", ".join(map(str, self.dim_specs))
        marks = []
        if self.replicated_axes:
            marks.append(f"replicated({' '.join(map(str, self.replicated_axes))})")
        if self.partial_axes:
            marks.append(f"{self.reduction}({' '.join(map(str, self.partial_axes))})")
        if self.only:
            held = [f"{axis}={','.join(map(str, at))}" for axis, at in self.only]
            marks.append(f"only({' '.join(held)})")
        return f"{text} | {' '.join(marks)}".strip() if marks else text

    def __repr__(self) -> str:
        return f"ShardingSpec({self.mesh!r}, {str(self)!r})"


# Many tensors of a model are sharded alike.
@lru_cache(maxsize=1024)
def _lay_out(sharding: ShardingSpec, shape: tuple[int, ...]) -> Layout:
    mesh = sharding.mesh
    tables = [_table(dim, mesh, size) for dim, size in zip(sharding.dim_specs, shape, strict=True)]
    # For each dimension, the part of each device.
    parts = [_coordinates(mesh, dim.axes) for dim in sharding.dim_specs]
    contributions = mesh.joint_size(sharding.partial_axes)
    # Devices whose coordinates are not in `only` hold nothing.
    holds = np.ones(mesh.size, dtype=bool)
    for axis, coordinates in sharding.only:
        holds &= np.isin(_coordinates(mesh, (Axis(axis),)), coordinates)
    return Layout(
        shape,
        tables,
        max(mesh.devices) + 1,
        np.array(mesh.devices, dtype=np.int64)[holds],
        np.array(parts, dtype=np.int64).reshape(len(shape), mesh.size).T[holds],
        _coordinates(mesh, sharding.partial_axes)[holds],
        contributions,
        sharding.reduction if contributions > 1 else None,
    )


# A word and its brackets, which may contain the brackets of sub-axes: `sum(x:(1)2 y)`.
_MARK = r"(\w+)\(([^()]*(?:\(\d+\)[^()]*)*)\)\s*"
_COORDINATES = r"([^=]+)=(\d+(?:,\d+)*)"
_OPEN = r"(\?)?(?:!(\d+))?"


def spec(mesh: DeviceMesh, text: str, *, ndim: int | None = None) -> ShardingSpec:
    """Parse the text of a sharding over `mesh`.

    Args:
        mesh: the devices whose axes the text names.
        text: in the native notation.
        ndim: number of dimensions of the tensors, for `...`.

    Raises:
        NotationError: text that cannot be read.
        SpecError, MeshError: axes that are unknown, used twice, or overlap.

    >>> mesh = DeviceMesh.of(dp=2, tp=4)
    >>> print(spec(mesh, "dp / tp@stride2 ?, -"))
    dp / tp@stride2 ?, -
    >>> print(spec(mesh, "tp, ...", ndim=3))
    tp, -, -
    """
    expect_mesh(mesh)
    if not isinstance(text, str):
        raise NotationError(f"sharding {text!r}; give it as a text, such as 'dp, tp'")
    if ndim is not None:
        ndim = check_int(ndim, "ndim")
    try:
        return _parse(mesh, text, ndim)
    except LayoutError as error:
        # Some errors quote the text already.
        if f"`{text}`" in str(error):
            raise
        raise type(error)(f"{error} (in the sharding `{text}` over the mesh {mesh.text})") from None


def split_dims(text: str, ndim: int | None) -> list[str]:
    """Return the text of each dimension of a sharding, with a single `...` written out.

    >>> split_dims("ep / fsdp, ...", 3)
    ['ep / fsdp', '-', '-']
    """
    items = [item.strip() for item in split_outside_brackets(text, ",")] if text.strip() else []
    if items.count("...") == 1 and ndim is not None:
        at = items.index("...")
        items[at : at + 1] = ["-"] * max(0, ndim - len(items) + 1)
    return items


def _parse(mesh: DeviceMesh, text: str, ndim: int | None) -> ShardingSpec:
    # Without blanks in brackets, items can be split at the remaining blanks.
    dims, bar, marks = _pack_brackets(text).partition("|")
    items = split_dims(dims, ndim)
    if "..." in items:
        raise NotationError("`...` can be used once, and only if the number of dimensions is known")
    replicated, partial, reduction, only = _parse_marks(marks if bar else "")
    return ShardingSpec(
        mesh,
        [_parse_dim(item) for item in items],
        replicated,
        partial,
        reduction,
        only,
    )


def _pack_brackets(text: str) -> str:
    depth, letters = 0, []
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if not (depth > 0 and letter.isspace()):
            letters.append(letter)
    return "".join(letters)


def _parse_dim(item: str) -> DimSpec:
    if not item:
        raise NotationError("an empty item; write `-` for a dimension that is not sharded")
    words = item.split()
    match = re.fullmatch(_OPEN, words[-1]) if words else None
    is_open, priority = False, 0
    if match:
        is_open, priority = match[1] is not None, int(match[2] or 0)
        words = words[:-1]
    if words == ["-"]:
        words = []
    body = " ".join(words)
    levels = split_outside_brackets(body, "/") if body else []
    return DimSpec([_parse_level(level.strip(), item) for level in levels], is_open, priority)


def _parse_level(level: str, item: str) -> Level:
    axes, at, rule = level.partition("@")
    if at and (not rule.strip() or not axes.strip()):
        raise NotationError(f"cannot read {level!r}; write `axis@rule`, such as tp@stride2")
    if not axes.strip():
        raise NotationError(f"an empty level in {item!r}; write axes on both sides of `/`")
    return Level(axes.split(), parse_rule(rule.strip()) if at else None)


def _parse_marks(
    text: str,
) -> tuple[list[str], list[str], str | None, list[tuple[str, list[int]]]]:
    """Parse the text after the bar: replicated and partial axes, the reduction, and `only`."""
    replicated: list[str] = []
    partial: list[str] = []
    reduction: str | None = None
    only: list[tuple[str, list[int]]] = []
    rest = text.strip()
    while rest:
        match = re.match(_MARK, rest)
        words = ("replicated", "only", *REDUCTIONS)
        if not match or match[1] not in words or not match[2].split():
            raise NotationError(
                f"cannot read {rest!r} after the bar; write replicated(axes), only(axis=0), or a "
                f"reduction with its axes such as sum(x y): {', '.join(REDUCTIONS)}"
            )
        if match[1] == "replicated":
            replicated += match[2].split()
        elif match[1] == "only":
            only += _parse_coordinates(match[2])
        elif reduction is None:
            partial, reduction = match[2].split(), match[1]
        else:
            raise NotationError(
                f"two reductions, {reduction} and {match[1]}; a tensor has one "
                "reduction, reduce the other axes first"
            )
        rest = rest[match.end() :]
    return replicated, partial, reduction, only


def _parse_coordinates(text: str) -> list[tuple[str, list[int]]]:
    pairs = []
    for item in re.sub(r"\s*([=,])\s*", r"\1", text).split():
        match = re.fullmatch(_COORDINATES, item)
        if not match:
            raise NotationError(
                f"cannot read {item!r} in only({text}); write an axis and its coordinates, such as "
                "only(pp=0) or only(pp=0,3 ep=1)"
            )
        pairs.append((match[1], [int(number) for number in match[2].split(",")]))
    return pairs
