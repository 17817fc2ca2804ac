"""The shardings of XLA's HLO: tile assignments, as programs and XLA's warnings print them.

A tile assignment is an array of devices with a dimension for each of the tensor, whose lengths are
the numbers of parts, and a last dimension of copies, if there are any::

    {devices=[4,2]<=[8]}                                  rows in 4 parts, columns in 2
    {devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}   rows in 2 parts, 4 copies of each
    {devices=[2,2]0,2,1,3}                                devices listed explicitly
    {devices=[2,4]<=[8] last_tile_dims={unreduced}}       contributions to a sum of 4 devices
    {replicated}, {maximal device=3}                      copies on all devices; on device 3 alone

`<=[4,2]T(1,0)` is an array of 0 to 7 of shape `(4, 2)`, transposed. Numbers are indices in the list
of devices that a program runs on, which JAX takes from its mesh. A text names no mesh axes: over a
given mesh the array is matched with its axes and their parts; without a mesh, a mesh is made whose
axes are the dimensions of the array. Dimensions are split by ceil.

Source: OpenXLA, `xla/hlo/ir/hlo_sharding.h` and `tile_assignment.h`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard.errors import NotationError
from reshard.mesh import Axis, DeviceMesh
from reshard.notation.parsing import Scanner, Vocabulary, reading
from reshard.runs import distinct
from reshard.sharding import DimSpec, ShardingSpec

_VOCABULARY = Vocabulary("HLO", reductions=("sum",), has_sub_axes=True)
_UNREDUCED, _REPLICATED = "unreduced", "replicated"
# A short text may claim any number of devices, and the array of them is built in memory.
_MAX_DEVICES = 1 << 24

Devices = np.ndarray[Any, np.dtype[np.int64]]


def parse_hlo(
    text: str, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> ShardingSpec:
    """Read the sharding of an HLO text.

    Args:
        text: a sharding in braces, alone or in `sharding={...}` or `GSPMDSharding({...})`.
        mesh: the devices in HLO's order, whose axes the sharding is expressed in; None to make a
            mesh with the axes `d0`, `d1`, ... of the tensor's dimensions, `sum` and `copies`, whose
            ranks are the numbers of the text.
        shape: of the tensor, for `{replicated}` and `{maximal ...}`.

    Raises:
        NotationError: a text that cannot be read, a tile assignment that no axes of the mesh make,
            or that has more or fewer dimensions than the shape.

    >>> text = "{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}"
    >>> print(parse_hlo(text), parse_hlo(text, DeviceMesh.of(x=4, y=2)), sep=" ;  ")
    d0, - ;  y, -
    """
    with reading("HLO text", text):
        scanner = Scanner(re.sub(r"^\s*(?:sharding\s*=|(?:\w+\.)*GSPMDSharding\()?", "", text))
        scanner.expect("{")
        # A second brace begins the shardings of a tuple.
        if scanner.looks_at(r"\{"):
            raise NotationError("shardings of a tuple; give the sharding of a single tensor")
        if scanner.accept(_REPLICATED):
            return _read_whole(mesh, shape)
        if scanner.accept("maximal"):
            scanner.expect("device")
            scanner.expect("=")
            return _read_whole(_find_device(scanner.number(), mesh), shape)
        for word in ("manual", "unknown", _UNREDUCED):
            if scanner.accept(word):
                raise NotationError(f"`{word}` does not define the shards; give a tile assignment")
        devices, kinds = _read_tiles(scanner)
        if shape is not None and devices.ndim - len(kinds) != len(shape):
            raise NotationError(
                f"tiles of {devices.ndim - len(kinds)} dimensions for a tensor of shape "
                f"{list(shape)}; give the sharding of this tensor"
            )
        if mesh is None:
            return _over_own_axes(devices, kinds)
        return _over_mesh(devices, kinds, mesh)


def _read_whole(mesh: DeviceMesh | None, shape: Sequence[int] | None) -> ShardingSpec:
    if mesh is None or shape is None:
        missing = "a mesh, such as x=2,y=3" if mesh is None else "the shape of the tensor"
        raise NotationError(f"no devices and no dimensions are written; give {missing}")
    return ShardingSpec(mesh, [()] * len(shape))


def _find_device(number: int, mesh: DeviceMesh | None) -> DeviceMesh:
    if number < 0 or (mesh is not None and number >= mesh.size):
        limit = "" if mesh is None else f" below {mesh.size}"
        raise NotationError(f"device {number}; give a number from 0 on{limit}")
    return DeviceMesh("mesh", (), (), [number if mesh is None else mesh.devices[number]])


def _read_tiles(scanner: Scanner) -> tuple[Devices, list[str]]:
    """Return the array of devices, and the kinds of its dimensions after the tensor's."""
    scanner.expect("devices")
    scanner.expect("=")
    tiles = scanner.listed("[", scanner.number, "]")
    if not tiles or min(tiles) < 1 or math.prod(tiles) > _MAX_DEVICES:
        raise NotationError(f"tiles {tiles}; give positive numbers of parts, such as devices=[2,4]")
    if scanner.accept("<="):
        devices = _read_iota(scanner)
    else:
        numbers = [scanner.number()]
        while scanner.looks_at(r",\s*\d") and scanner.accept(","):
            numbers.append(scanner.number())
        devices = np.array(numbers, np.int64)
    if devices.size != math.prod(tiles):
        raise NotationError(f"{devices.size} devices for tiles {tiles}; give {math.prod(tiles)}")
    if len(distinct(devices)) != devices.size or devices.min() < 0:
        raise NotationError("devices that are negative or repeated; give each device once")
    # The older form of `last_tile_dims={replicated}`.
    kinds = [_REPLICATED] if scanner.accept("last_tile_dim_replicate") else []
    if not kinds and scanner.accept("last_tile_dims"):
        scanner.expect("=")
        kinds = scanner.listed("{", lambda: _read_kind(scanner), "}")
    if len(kinds) > len(tiles):
        raise NotationError(f"{len(kinds)} last dimensions of {len(tiles)}; give at most these")
    if not scanner.looks_at(r"\}|metadata=|shard_as|shard_like"):
        raise scanner.failure("`last_tile_dims={...}` or `}`")
    return devices.reshape(tiles), kinds


def _read_iota(scanner: Scanner) -> Devices:
    """Read the devices 0, 1, 2... in an array of given lengths, transposed: `[4,2]T(1,0)`."""
    lengths = scanner.listed("[", scanner.number, "]")
    if not lengths or min(lengths) < 1 or math.prod(lengths) > _MAX_DEVICES:
        raise NotationError(f"an array of devices of shape {lengths}; give positive lengths")
    order = [*range(len(lengths))]
    if scanner.accept("T"):
        order = scanner.listed("(", scanner.number, ")")
        if sorted(order) != [*range(len(lengths))]:
            raise NotationError(f"T{tuple(order)} of {len(lengths)} dimensions; name each once")
    return np.arange(math.prod(lengths)).reshape(lengths).transpose(order).ravel()


def _read_kind(scanner: Scanner) -> str:
    match = scanner.take(r"\w+")
    if match is None or match[0] not in (_UNREDUCED, _REPLICATED):
        raise NotationError(
            f"last dimensions of kind {match[0] if match else ''!r}; they are {_REPLICATED} or "
            f"{_UNREDUCED}: others do not define the shards"
        )
    return match[0]


def _over_own_axes(devices: Devices, kinds: Sequence[str]) -> ShardingSpec:
    """Return the sharding over a mesh with an axis for each dimension of several tiles."""
    dims = devices.ndim - len(kinds)
    words = {_UNREDUCED: "sum", _REPLICATED: "copies"}
    names = [f"d{dim}" for dim in range(dims)] + [words[kind] for kind in kinds]
    # Several last dimensions of a kind would have equal names.
    names = [name if names.count(name) == 1 else f"{name}{i}" for i, name in enumerate(names)]
    axes = [
        [] if length == 1 else [name] for name, length in zip(names, devices.shape, strict=True)
    ]
    used = [number for number, axis in enumerate(axes) if axis]
    mesh = DeviceMesh(
        "mesh",
        [devices.shape[number] for number in used],
        [names[number] for number in used],
        devices.ravel().tolist(),
    )
    return _make_spec(mesh, [[Axis(name) for name in own] for own in axes], kinds)


def _over_mesh(devices: Devices, kinds: Sequence[str], mesh: DeviceMesh) -> ShardingSpec:
    # HLO numbers devices by their position in the mesh, not by rank.
    if not np.array_equal(np.sort(devices, axis=None), np.arange(mesh.size)):
        raise NotationError(
            f"{devices.size} devices up to {devices.max()}, where the mesh {mesh.text} has "
            f"{mesh.size}; give the mesh of these devices, or none"
        )
    axes: list[list[Axis] | None] = []
    for dim in range(devices.ndim):
        # The devices at index 0 of all other dimensions determine the axes; the comparison below
        # covers the others.
        along = devices[tuple(slice(None) if d == dim else 0 for d in range(devices.ndim))]
        axes.append(_find_axes(along - along[0], mesh))
    complete = [dim_axes for dim_axes in axes if dim_axes is not None]
    spec = _make_spec(mesh, complete, kinds) if len(complete) == len(axes) else None
    # Tiles of a single part, which a text may contain anywhere, have no axes.
    if spec is None or not np.array_equal(_assign_tiles(spec)[0].squeeze(), devices.squeeze()):
        raise NotationError(
            f"no axes of the mesh {mesh.text} make these tiles; leave the mesh out, and a mesh is "
            "made for them"
        )
    return spec


def _find_axes(offsets: Devices, mesh: DeviceMesh) -> list[Axis] | None:
    """Return the parts of axes, major to minor, along which positions have these offsets."""
    axes: list[Axis] = []
    done = 1
    while done < len(offsets):
        # The next part: the most equal steps whose number divides the number of offsets left.
        stride, left = int(offsets[done]), len(offsets) // done
        steps = offsets[::done]
        is_even = steps == stride * np.arange(len(steps))
        run = len(steps) if is_even.all() else int(np.argmin(is_even))
        size = max((n for n in range(2, run + 1) if left % n == 0), default=1)
        parts = _split_stride(stride, size, mesh) if stride > 0 and size > 1 else None
        if parts is None:
            return None
        axes = [*parts, *axes]
        done *= size
    return axes


def _split_stride(stride: int, size: int, mesh: DeviceMesh) -> list[Axis] | None:
    """Return the parts of axes, major to minor, that `size` steps of `stride` positions are."""
    axes: list[Axis] = []
    below = 1
    # From the minor axis on: `below` is the product of the sizes of the axes after this axis.
    for name, length in zip(reversed(mesh.axis_names), reversed(mesh.shape), strict=True):
        if size > 1 and below <= stride < below * length:
            inner = stride // below
            taken = min(size, length // inner)
            if stride % below or length % (inner * taken) or size % taken:
                return None
            is_full = taken == length
            axes.insert(0, Axis(name) if is_full else Axis(name, length // (inner * taken), taken))
            stride, size = stride * taken, size // taken
        below *= length
    return axes if size == 1 else None


def _make_spec(
    mesh: DeviceMesh, axes: Sequence[Sequence[Axis]], kinds: Sequence[str]
) -> ShardingSpec:
    dims = len(axes) - len(kinds)
    last = zip(axes[dims:], kinds, strict=True)
    partial = [axis for own, kind in last if kind == _UNREDUCED for axis in own]
    return ShardingSpec(mesh, [DimSpec(own) for own in axes[:dims]], partial_axes=partial)


def hlo_text(spec: ShardingSpec) -> str:
    """Return the HLO text of a sharding.

    Raises:
        NotationError: a part of the sharding that HLO cannot express, such as a cut rule.

    >>> from reshard.sharding import spec
    >>> print(hlo_text(spec(DeviceMesh.of(x=4, y=2), "y, -")))
    {devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}
    """
    _VOCABULARY.check(spec)
    _, lengths, order, tiles, kinds = _assign_tiles(spec)
    # XLA prints tiles of size 1 as replicated.
    if spec.mesh.size == 1 or (max(tiles[:-1], default=1) == 1 and kinds == [_REPLICATED]):
        return f"{{{_REPLICATED}}}"
    text = f"devices=[{','.join(map(str, tiles))}]"
    text += f"<=[{','.join(map(str, lengths))}]"
    text += f"T({','.join(map(str, order))})" if len(order) > 1 else ""
    if kinds == [_REPLICATED]:
        text += " last_tile_dim_replicate"
    elif kinds:
        text += f" last_tile_dims={{{', '.join(kinds)}}}"
    return f"{{{text}}}"


def _assign_tiles(
    spec: ShardingSpec,
) -> tuple[Devices, list[int], list[int], list[int], list[str]]:
    """Return the array of devices, its reshape lengths and transposition, tiles, last kinds."""
    mesh = spec.mesh
    dims = [[*dim.axes] for dim in spec.dim_specs]
    last = [[*spec.partial_axes]]
    parts = _split_axes(mesh, [axis for own in [*dims, *last] for axis in own])
    used = {part for own in [*dims, *last] for axis in own for part in _bounds(mesh, axis)}
    last.append([Axis(*part) for part in parts if part not in used])
    kinds = [kind for kind, own in zip((_UNREDUCED, _REPLICATED), last, strict=True) if own]
    groups = [
        [part for axis in own for part in _bounds(mesh, axis)]
        for own in (*dims, *filter(None, last))
    ]
    order = [parts.index(part) for own in groups for part in own]
    tiles = [math.prod(size for _, _, size in own) for own in groups]
    lengths = [size for _, _, size in parts]
    devices = np.arange(mesh.size).reshape(lengths).transpose(order).reshape(tiles)
    return devices, *_merge_lengths(lengths, order), tiles, kinds


def _bounds(mesh: DeviceMesh, axis: Axis) -> list[tuple[str, int, int]]:
    size = mesh.axis_size(axis)
    # `_split_axes` returns no part for an axis of size 1.
    return [(axis.name, axis.pre, size)] if size > 1 else []


def _split_axes(mesh: DeviceMesh, used: Sequence[Axis]) -> list[tuple[str, int, int]]:
    """Return the mesh's axes, in its order, divided such that the used parts are among them."""
    return [
        (name, low, high // low)
        for name, bounds in mesh.axis_boundaries(used).items()
        for low, high in itertools.pairwise(bounds)
    ]


def _merge_lengths(lengths: Sequence[int], order: Sequence[int]) -> tuple[list[int], list[int]]:
    """Merge dimensions that stay adjacent in the transposition, as XLA prints them."""
    runs: list[list[int]] = []
    for place in order:
        if runs and runs[-1][-1] + 1 == place:
            runs[-1].append(place)
        else:
            runs.append([place])
    by_start = sorted(runs)
    merged = [math.prod(lengths[place] for place in run) for run in by_start]
    return merged, [by_start.index(run) for run in runs]
