"""Devices in a grid with named axes.

A mesh is a shape, a name for each axis, and the ranks of the devices in row-major order::

    DeviceMesh.of(dp=2, tp=3)          tp 0   tp 1   tp 2
                                 dp 0     0      1      2
                                 dp 1     3      4      5

A sub-axis is a part of an axis. `x:(pre)size` divides the axis `x` into `pre` x `size` x the rest,
major to minor, and is the middle factor: on an axis of 8, `x:(1)2` is the most significant bit and
`x:(4)2` the least significant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard._interning import Interned
from reshard._validation import MAX_RANKS, check_int, check_ints
from reshard.errors import MeshError, NotationError
from reshard.runs import IntArray

_NAME = r"[A-Za-z_][A-Za-z0-9_.]*"
_AXIS = rf"({_NAME})(?::\((\d+)\)(\d+))?"


@dataclass(frozen=True, slots=True, order=True)
class Axis:
    """A mesh axis by name, or its part `name:(pre)size`.

    >>> Axis("x"), Axis("x", 2, 4), Axis.parse("x:(2)4") == Axis("x", 2, 4)
    (x, x:(2)4, True)
    """

    name: str
    pre: int = 1
    size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(_NAME, self.name):
            raise MeshError(
                f"axis name {self.name!r} must be letters, digits, `_` and `.`, not beginning "
                "with a digit"
            )
        if self.size is None:
            if self.pre != 1:
                raise MeshError(f"sub-axis of {self.name!r} with pre {self.pre} needs a size")
            return
        for field in ("pre", "size"):
            number = check_int(
                getattr(self, field), f"{field} of a sub-axis", MeshError, minimum=-1
            )
            object.__setattr__(self, field, number)
        if self.pre < 1 or self.size < 1:
            raise MeshError(f"sub-axis {self}: pre and size must be at least 1")

    @classmethod
    def parse(cls, text: str) -> Axis:
        """Parse `x` or `x:(2)4`. Raises NotationError for any other text."""
        if not isinstance(text, str):
            raise NotationError(f"axis {text!r}; give its name, such as 'x' or 'x:(2)4'")
        match = re.fullmatch(_AXIS, text.strip())
        if not match:
            raise NotationError(f"cannot read the axis {text!r}; write `x`, or `x:(2)4` for a part")
        return cls(match[1]) if match[2] is None else cls(match[1], int(match[2]), int(match[3]))

    @property
    def is_full(self) -> bool:
        """Whether this is the whole axis."""
        return self.size is None

    def __str__(self) -> str:
        return self.name if self.size is None else f"{self.name}:({self.pre}){self.size}"

    __repr__ = __str__


def as_axis(axis: str | Axis) -> Axis:
    """Return an axis, or the axis named by a string. Raises MeshError for anything else."""
    if isinstance(axis, Axis):
        return axis
    if isinstance(axis, str):
        return Axis.parse(axis)
    raise MeshError(f"axis {axis!r}; give the name of a mesh axis, or an Axis")


def as_axes(axes: Iterable[str | Axis]) -> list[Axis]:
    """Return axes, or the axes named by strings. Raises MeshError for anything else.

    A string is refused: its letters would be taken for axes.
    """
    if isinstance(axes, str) or not isinstance(axes, Iterable):
        raise MeshError(f"axes {axes!r}; give a list of axes, such as ['dp', 'tp']")
    return [as_axis(axis) for axis in axes]


class DeviceMesh(Interned):
    """A grid of devices with named axes, interned.

    Args:
        name: for messages and texts, but part of the identity of the mesh.
        shape: number of devices along each axis.
        axis_names: a name per axis.
        devices: the ranks in row-major order; 0, 1, 2... if None.

    Raises:
        MeshError: sizes below 1, a wrong number of names or devices, duplicate names or devices.

    >>> mesh = DeviceMesh("cluster", (2, 4), ("dp", "tp"))
    >>> mesh is DeviceMesh.of(name="cluster", dp=2, tp=4)
    True
    >>> mesh.size, mesh.groups(["dp"])
    (8, ((0, 4), (1, 5), (2, 6), (3, 7)))
    """

    field_names = ("name", "shape", "axis_names", "devices")

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        axis_names: Sequence[str],
        devices: Iterable[int] | None = None,
    ) -> None:
        if not isinstance(name, str):
            raise MeshError(f"name {name!r} of a mesh; give a text, then its shape and axis names")
        if isinstance(axis_names, str) or not isinstance(axis_names, Iterable):
            raise MeshError(f"axis names {axis_names!r}; give a list of them, such as ['dp', 'tp']")
        self.name = name
        self.shape = check_ints(shape, "shape of a mesh", MeshError, minimum=None)
        self.axis_names = tuple(axis_names)
        if len(self.shape) != len(self.axis_names):
            raise MeshError(
                f"{len(self.axis_names)} axis names {list(self.axis_names)} for a mesh of "
                f"{len(self.shape)} axes {list(self.shape)}; give one name per axis"
            )
        for axis, size in zip(self.axis_names, self.shape, strict=True):
            # Raises MeshError for an invalid name.
            Axis(axis)
            if size < 1:
                raise MeshError(f"axis {axis!r} has size {size}, at least 1 was expected")
        if len(set(self.axis_names)) != len(self.axis_names):
            raise MeshError(f"axis names {list(self.axis_names)} must differ from each other")
        self.size = math.prod(self.shape)
        if self.size > MAX_RANKS:
            raise MeshError(
                f"a mesh of {self.size} devices ({' x '.join(map(str, self.shape))}); at most "
                f"{MAX_RANKS} are supported"
            )
        ranks = range(self.size) if devices is None else devices
        self.devices = check_ints(ranks, "devices", MeshError, minimum=None)
        if len(self.devices) != self.size:
            raise MeshError(
                f"{len(self.devices)} devices for a mesh of {self.size} "
                f"({' x '.join(map(str, self.shape))}); give one per position, in row-major order"
            )
        in_range = min(self.devices) >= 0 and max(self.devices) < MAX_RANKS
        if len(set(self.devices)) != self.size or not in_range:
            raise MeshError(
                f"devices {list(self.devices)} must be ranks from 0 up and below {MAX_RANKS}, "
                "each once"
            )

    @classmethod
    def of(
        cls, *, name: str = "mesh", devices: Iterable[int] | None = None, **axes: int
    ) -> DeviceMesh:
        """Return a mesh from its axes, major to minor: `DeviceMesh.of(dp=2, tp=4)`."""
        for axis, size in axes.items():
            check_int(size, f"size of axis {axis!r}", MeshError)
        shape = tuple(axes.values())
        return cls(name, shape, tuple(axes), devices)

    @classmethod
    def parse(cls, text: str, name: str = "mesh") -> DeviceMesh:
        """Parse the text of a mesh, `tp=2,dp=2`, major to minor.

        >>> DeviceMesh.parse("dp=2, tp=4").shape
        (2, 4)
        """
        if not isinstance(text, str):
            raise NotationError(f"mesh {text!r}; give its axes as a text, such as 'tp=2,dp=4'")
        axes: list[tuple[str, int]] = []
        for item in text.split(",") if text.strip() else ():
            axis, equals, size = (word.strip() for word in item.partition("="))
            if not equals or not size.isdecimal():
                raise NotationError(
                    f"cannot read {item.strip()!r} in the mesh {text!r}; write axes with their "
                    "sizes, such as tp=2,dp=4"
                )
            axes.append((axis, int(size)))
        return cls(name, [size for _, size in axes], [axis for axis, _ in axes])

    def axis_size(self, axis: str | Axis) -> int:
        """Return the number of devices along an axis or a sub-axis.

        Raises MeshError if it is unknown.
        """
        axis = as_axis(axis)
        if axis.name not in self.axis_names:
            raise MeshError(
                f"unknown axis {axis.name!r}; the mesh {self.name!r} has "
                f"{', '.join(self.axis_names) or 'no axes'}"
            )
        full = self.shape[self.axis_names.index(axis.name)]
        if axis.size is None:
            return full
        if full % (axis.pre * axis.size):
            raise MeshError(
                f"sub-axis {axis} does not divide axis {axis.name!r} of size {full}: "
                f"{axis.pre} x {axis.size} must be a divisor of {full}"
            )
        return axis.size

    def joint_size(self, axes: Iterable[str | Axis]) -> int:
        """Return the number of coordinates that axes have together. Raises MeshError.

        >>> DeviceMesh.of(dp=2, tp=4).joint_size(["dp", "tp"])
        8
        """
        return math.prod(map(self.axis_size, axes))

    def coordinates(self, axes: Iterable[str | Axis]) -> IntArray:
        """Return the coordinate of each device along `axes`, combined, major to minor.

        Shape `(size,)`, in the order of `devices`.

        >>> DeviceMesh.of(x=2, y=2).coordinates(["y", "x"]).tolist()
        [0, 2, 1, 3]
        """
        index = np.zeros(self.size, dtype=np.int64)
        for axis in as_axes(axes):
            size = self.axis_size(axis)
            position = self.axis_names.index(axis.name)
            full = self.shape[position]
            # The coordinate along the whole axis, for each device in row-major order.
            along = np.arange(self.size) // math.prod(self.shape[position + 1 :]) % full
            # A sub-axis is the middle digit of that coordinate: `pre`, `size`, the rest.
            index = index * size + along // (full // (axis.pre * size)) % size
        return index

    def groups(self, axes: Iterable[str | Axis]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ along `axes` only, each in the order of those
        axes.
        """
        chosen = as_axes(axes)
        along = self.coordinates(chosen)
        rest = self.coordinates(self.remaining_axes(chosen))
        # Sort by group, then by coordinate along the axes, so that each group is a row.
        order = np.lexsort((along, rest))
        width = int(along.max()) + 1
        ranks = np.array(self.devices)[order].reshape(-1, width)
        return tuple(tuple(row) for row in ranks.tolist())

    def remaining_axes(self, used: Iterable[Axis]) -> tuple[Axis, ...]:
        """Return the axes that `used` leaves over, in mesh order, as full axes and sub-axes.

        >>> DeviceMesh.of(x=8, y=2).remaining_axes([Axis("x", 2, 2)])
        (x:(1)2, x:(4)2, y)
        """
        used = as_axes(used)
        left: list[Axis] = []
        for name, full in zip(self.axis_names, self.shape, strict=True):
            parts = sorted((a for a in used if a.name == name), key=lambda a: a.pre)
            if not parts:
                left.append(Axis(name))
                continue
            # From the major end: `pre` is the product of the sizes so far; gaps remain.
            pre = 1
            for axis in parts:
                if axis.pre > pre:
                    left.append(Axis(name, pre, axis.pre // pre))
                pre = axis.pre * self.axis_size(axis)
            if pre < full:
                left.append(Axis(name, pre, full // pre))
        return tuple(left)

    def axis_boundaries(self, used: Iterable[Axis]) -> dict[str, list[int]]:
        """Return the positions in each axis at which sub-axes of `used` begin and end, ascending.

        The first is 1, the last the size of the axis.

        >>> DeviceMesh.of(x=8, y=2).axis_boundaries([Axis("x", 2, 2)])
        {'x': [1, 2, 4, 8], 'y': [1, 2]}
        """
        bounds = {name: {1, size} for name, size in zip(self.axis_names, self.shape, strict=True)}
        for axis in used:
            bounds[axis.name] |= {axis.pre, axis.pre * self.axis_size(axis)}
        return {name: sorted(ends) for name, ends in bounds.items()}

    def list_long_axes(self) -> tuple[str, ...]:
        """Return the names of the axes of size 2 or more.

        >>> DeviceMesh.of(dp=1, tp=4).list_long_axes()
        ('tp',)
        """
        pairs = zip(self.axis_names, self.shape, strict=True)
        return tuple(name for name, size in pairs if size > 1)

    @cached_property
    def text(self) -> str:
        """The axes with their sizes, as `parse` reads them: `dp=2,tp=4`."""
        pairs = zip(self.axis_names, self.shape, strict=True)
        return ",".join(f"{name}={size}" for name, size in pairs)

    def __repr__(self) -> str:
        order = "" if self.devices == tuple(range(self.size)) else f", devices={list(self.devices)}"
        name = "" if self.name == "mesh" else f"{self.name!r}, "
        return f"DeviceMesh({name}{self.text}{order})"
