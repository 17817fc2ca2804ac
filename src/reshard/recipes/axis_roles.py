"""What does a sharding over a recipe's axes become over a mesh?

Each axis of the recipe is played by axes of the mesh: most often by the one of its name, by
none where the mesh lacks it, or by several (`Recipe.players`)::

    players  ep -> dp tp    etp -> none      "ep, etp, -"           ->   "dp tp, -, -"
    dp=2, tp=4                               "-, - | only(ep=5)"    ->   "-, - | only(dp=1 tp=1)"
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from reshard.errors import RecipeError
from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import DimSpec, Level, ShardingSpec

Players = Mapping[str, tuple[Axis, ...]]


def size_of(mesh: DeviceMesh, axes: Iterable[Axis]) -> int:
    """How many coordinates axes have together."""
    return math.prod(mesh.axis_size(axis) for axis in axes)


def on_mesh(
    mesh: DeviceMesh,
    written: ShardingSpec,
    players: Players | None,
    only: Sequence[tuple[str, tuple[int, ...]]],
) -> ShardingSpec:
    """`written` over `mesh`, with the axes that play those it names; levels of none fall out.

    Without `players` it names axes of the mesh itself. Its tensors live at the coordinates
    `only` of axes of the mesh.
    """

    def played(axes: Iterable[Axis]) -> list[Axis]:
        return [player for axis in axes for player in _played(axis, players)]

    dim_specs = []
    for dim in written.dim_specs:
        levels = [(played(level.axes), level.rule) for level in dim.levels]
        kept = [Level(axes, rule) for axes, rule in levels if axes]
        dim_specs.append(DimSpec(kept, dim.is_open, dim.priority))
    return ShardingSpec(
        mesh,
        dim_specs,
        played(written.replicated_axes),
        played(written.partial_axes),
        written.reduction or "sum",
        only,
    )


def _played(axis: Axis, players: Players | None) -> tuple[Axis, ...]:
    """The mesh's axes in place of one that a rule names."""
    if players is None:
        return (axis,)
    found = players[axis.name]
    if axis.is_full or not found:
        return found
    if len(found) > 1 or not found[0].is_full:
        raise RecipeError(
            f"the part {axis} of an axis that {' '.join(map(str, found))} plays; let one whole "
            "axis of the mesh play it"
        )
    return (Axis(found[0].name, axis.pre, axis.size),)


def coordinates_on_mesh(
    mesh: DeviceMesh, only: Iterable[tuple[str, tuple[int, ...]]], players: Players | None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Coordinates of a recipe's axes as coordinates of the mesh's.

    Raises:
        RecipeError: axes of the mesh that cannot say it.

    >>> mesh = DeviceMesh.of(dp=2, tp=4)
    >>> list(coordinates_on_mesh(mesh, [("ep", (5,))], {"ep": (Axis("dp"), Axis("tp"))}))
    [('dp', (1,)), ('tp', (1,))]
    """
    for axis, coordinates in only:
        found = _played(Axis(axis), players)
        if not found:
            continue
        if not all(player.is_full for player in found):
            raise RecipeError(
                f"tensors are dealt out by axis {axis!r}, played by {' '.join(map(str, found))}; "
                "let whole axes of the mesh play it"
            )
        columns = np.unravel_index(coordinates, [mesh.axis_size(player) for player in found])
        chosen = [tuple(sorted({int(at) for at in column})) for column in columns]
        if math.prod(map(len, chosen)) != len(coordinates):
            raise RecipeError(
                f"coordinates {list(coordinates)} of axis {axis!r}, played by "
                f"{' '.join(map(str, found))}, are no product of coordinates of these; let one "
                "axis play it"
            )
        yield from ((player.name, at) for player, at in zip(found, chosen, strict=True))
