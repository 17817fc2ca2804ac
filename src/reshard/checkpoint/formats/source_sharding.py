"""The shardings of a source whose files do not specify them: a mesh, and rules or a recipe.

Such sources are files of ranks with plain tensors, and arrays of ranks. The mesh of the ranks and
the rules determine the part of a tensor that each rank has. The shapes of whole tensors follow:

1. A rule specifies the axes that shard each dimension. Ranks with equal indices on these axes must
   have equal lengths. The whole dimension is the sum over all indices, or a fraction of it if ranks
   hold copies of parts, such as key/value heads.
2. A rule may depend on shapes: rules are applied again to the shapes that were found.
3. The sharding of the whole shape must give each rank the shape that it has.

The descriptions of parts may lack an axis (`find_missing_axes`): DTensors on a submesh, such as
experts over `fsdp` in each of several groups of ranks, which hold different experts. By their
offsets such groups hold copies; a rule specifies the axis that distinguishes them::

    ranks 0 and 2: w[0:2], w[2:4] of [4]           fsdp=2,ep=2 and w=ep / fsdp
    ranks 1 and 3: w[0:2], w[2:4] of [4]           ranks 0, 2, 1, 3: w[0:2], ... w[6:8] of [8]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

import numpy as np

from reshard._records import Record
from reshard.errors import FormatError, LayoutError, RecipeError, ShardError, UsageError
from reshard.layout import Box, Layout
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import assign
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule, parse_rules
from reshard.sharding import ShardingSpec
from reshard.text import first_text

Shape = tuple[int, ...]
# How often rules are applied again to shapes that depend on them.
_MAX_ROUNDS = 4
# The permutations of more axes than any job has are not tried.
_MAX_AXES = 5


class SourceSharding(Record):
    """A mesh of the source's ranks, and rules or a recipe for its tensors.

    Attributes:
        mesh: of the ranks that wrote the files.
        rules: the user's, which take precedence over the recipe's.
        recipe: of the model, or None.
        config: the model's config.json, for a recipe.

    Raises:
        UsageError: a mesh without rules and recipe.
    """

    mesh: DeviceMesh
    rules: tuple[Rule, ...] = ()
    recipe: Recipe | None = None
    # A dict cannot be hashed.
    config: Mapping[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.rules and self.recipe is None:
            raise UsageError(
                f"a source's mesh {self.mesh.text} without rules; give some, such as '*=tp, -', or "
                "a recipe"
            )

    def __str__(self) -> str:
        rules = "; ".join(map(str, self.rules))
        recipe = "" if self.recipe is None else f" by the recipe {self.recipe.name}"
        return f"{self.mesh.text}: {rules}{recipe}"

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh | str,
        rules: Iterable[Rule | str] = (),
        recipe: Recipe | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> SourceSharding:
        """Parse a mesh and rules.

        >>> print(SourceSharding.of("tp=2", ["*=tp, ..."]).find_shardings({"w": (8, 4)})["w"])
        tp, -
        """
        parsed = mesh if isinstance(mesh, DeviceMesh) else DeviceMesh.parse(mesh)
        return cls(parsed, parse_rules(rules), recipe, config)

    def find_shardings(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ShardingSpec]:
        """Return the shardings of tensors of these shapes.

        Raises:
            RecipeError: rules that do not fit, or do not match all tensors.
        """
        assignment = assign(
            shapes, self.mesh, self.rules, self.recipe, self.config, allow=["uncomputable"]
        )
        return {name: assignment.specs[name] for name in shapes}

    def expect_ranks(self, folder: object, ranks: int) -> None:
        """Raise UsageError if the files in `folder` are of another number of ranks."""
        if sorted(self.mesh.devices) != list(range(ranks)):
            raise UsageError(
                f"the source's mesh {self.mesh.text} has {len(self.mesh.devices)} ranks, and "
                f"{folder} files of {ranks}; give a mesh of {ranks}"
            )


class DescribedPart(Record):
    """A part of a tensor, as the file of its rank describes it: `box` of a tensor of `shape`.

    Parts of one `group`, such as those on one mesh, are parts of the same tensor.
    """

    box: Box
    shape: Shape
    group: object = None


def select_by_rules(names: Iterable[str], sharding: SourceSharding) -> list[str]:
    """Return the names that a rule matches, the recipe's rules included."""
    rules = [*sharding.rules, *(sharding.recipe.rules if sharding.recipe is not None else ())]
    return [name for name in names if any(rule.matches(name) for rule in rules)]


def describe_no_lacking(folder: object, lacking: Collection[str]) -> str:
    """Return the error text for rules that match no tensor whose own description lacks an axis."""
    if not lacking:
        return (
            f"the files in {folder} specify how tensors are sharded; leave out the source's mesh "
            "and rules"
        )
    return (
        f"no source rule matches a tensor whose files lack an axis in {folder}, which they do for "
        f"{first_text(list(lacking), 3)}. Give a rule for these, such as --source-rule "
        "'*experts.*=ep / fsdp, ...'"
    )


def find_missing_axes(
    parts: Mapping[str, Mapping[int, DescribedPart]], sharding: SourceSharding, folder: object
) -> tuple[dict[str, tuple[ShardingSpec, Layout]], DeviceMesh]:
    """Return the sharding and layout of tensors whose own descriptions lack an axis.

    The mesh numbers ranks in the order of its axes, the last fastest. If the descriptions
    contradict that, the order of axes that agrees with them is used.

    Args:
        parts: of each tensor, by rank.
        sharding: the mesh and the rules.
        folder: of the files, for errors.

    Returns:
        The shardings and layouts by name, and the mesh with its ranks in the order that was used.

    Raises:
        FormatError: parts that fit no order of the axes.
        RecipeError: rules that cannot be applied.
    """
    shapes = {
        name: {rank: part.box.shape for rank, part in of_tensor.items()}
        for name, of_tensor in parts.items()
    }
    problem = ""
    for mesh in _list_numberings(sharding.mesh):
        numbered = sharding.replace(mesh=mesh)
        try:
            result = find_layouts(shapes, mesh, numbered.find_shardings, may_lack=True)
        except ShardError as error:
            problem = problem or str(error)
            continue
        wrong = next(
            filter(
                None,
                (_find_contradiction(n, parts[n], *placement) for n, placement in result.items()),
            ),
            None,
        )
        if wrong is None:
            return result, mesh
        problem = problem or wrong
    raise FormatError(f"{folder}: tensor {problem}")


def describe_numbering(sharding: SourceSharding, mesh: DeviceMesh) -> tuple[str, ...]:
    """Return a note if the ranks of a mesh were numbered in another order of its axes."""
    if mesh.devices == sharding.mesh.devices:
        return ()
    ranks = ", ".join(map(str, mesh.devices[:16]))
    return (
        f"the ranks of the source's mesh {mesh.text} are {ranks}, as the meshes in its files "
        "require, and not in the order of the text",
    )


def _list_numberings(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Yield the mesh, and the same with its ranks numbered in other orders of its axes."""
    yield mesh
    # Ranks that the user listed are not numbered again.
    if mesh.devices != tuple(range(mesh.size)) or len(mesh.shape) > _MAX_AXES:
        return
    for order in itertools.permutations(range(len(mesh.shape))):
        ranks = np.arange(mesh.size).reshape([mesh.shape[axis] for axis in order])
        devices = ranks.transpose(np.argsort(order)).reshape(-1).tolist()
        if devices != list(mesh.devices):
            yield mesh.replace(devices=devices)


def _find_contradiction(
    name: str, parts: Mapping[int, DescribedPart], spec: ShardingSpec, layout: Layout
) -> str | None:
    """Return how a layout contradicts the files' descriptions of a tensor's parts, or None."""
    offsets: dict[tuple[int, ...], set[Box]] = {}
    of_group: dict[object, tuple[int, tuple[int, ...]]] = {}
    for rank, part in sorted(parts.items()):
        if not part.box.elements:
            continue
        boxes = layout.boxes(rank)
        if len(boxes) != 1:
            return f"{name!r} sharded by `{spec}`: rank {rank} has {len(boxes)} parts, expected one"
        offset = tuple(a - b for a, b in zip(boxes[0].start, part.box.start, strict=True))
        offsets.setdefault(offset, set()).add(part.box)
        first, expected = of_group.setdefault(part.group, (rank, offset))
        if part.group is not None and offset != expected:
            return (
                f"{name!r} sharded by `{spec}` over {_describe_ranks(spec)}: ranks {first} "
                f"and {rank} hold parts of the same tensor of {list(part.shape)} by their files, "
                "and not by the rule; correct the mesh, the order of its axes, or the rule"
            )
    whole = math.prod(next(iter(parts.values())).shape)
    for boxes_of in offsets.values():
        if sum(box.elements for box in boxes_of) != whole:
            return (
                f"{name!r} sharded by `{spec}` over {_describe_ranks(spec)}: the rule "
                f"distinguishes parts that are, by their files, parts of the same tensor of "
                f"{list(next(iter(parts.values())).shape)}; correct the mesh, the order of its "
                "axes, or the rule"
            )
    return None


def _describe_ranks(spec: ShardingSpec) -> str:
    """Return the mesh of a sharding as text, with its ranks."""
    return f"{spec.mesh.text} (ranks {', '.join(map(str, spec.mesh.devices[:16]))})"


def find_layouts(
    parts: Mapping[str, Mapping[int, Shape]],
    mesh: DeviceMesh,
    find_shardings: Callable[[Mapping[str, Shape]], Mapping[str, ShardingSpec]],
    *,
    may_lack: bool = False,
) -> dict[str, tuple[ShardingSpec, Layout]]:
    """Return the shardings and layouts of whole tensors by the shapes of their parts.

    Args:
        parts: the shape of each rank's part of each tensor; each tensor has at least one part.
        mesh: of the ranks.
        find_shardings: returns the shardings of tensors of such shapes.
        may_lack: whether a rank may lack a part that the sharding gives it.

    Raises:
        ShardError: parts that contradict each other or their sharding; the first is named.
        RecipeError: from `find_shardings`.

    >>> from reshard.sharding import spec
    >>> rows = spec(DeviceMesh.of(tp=2), "tp, -")
    >>> found = find_layouts({"w": {0: (3, 4), 1: (2, 4)}}, rows.mesh, lambda _: {"w": rows})
    >>> found["w"][1].shape
    (5, 4)
    """
    # At first as if every axis sharded every dimension: a shape that any rule can shard.
    shapes = {
        name: tuple(length * mesh.size for length in next(iter(own.values())))
        for name, own in parts.items()
    }
    result: dict[str, tuple[ShardingSpec, Layout]] = {}
    for _ in range(_MAX_ROUNDS):
        specs = find_shardings(shapes)
        result = {
            name: (specs[name], join_shapes(name, own, specs[name], may_lack=may_lack))
            for name, own in parts.items()
        }
        again = {name: layout.shape for name, (_, layout) in result.items()}
        if again == shapes:
            break
        shapes = again
    return result


def join_shapes(
    name: str, parts: Mapping[int, Shape], spec: ShardingSpec, *, may_lack: bool = False
) -> Layout:
    """Return the layout of the whole tensor whose parts have these shapes, as in `find_layouts`."""
    candidates = [_list_lengths(name, parts, spec, d) for d in range(spec.ndim)]
    problem = ""
    for shape in itertools.product(*candidates):
        try:
            layout = spec.layout(shape)
        except (LayoutError, RecipeError) as error:
            problem = problem or str(error)
            continue
        wrong = _find_misfit(layout, parts, may_lack)
        if wrong is None:
            return layout
        rank, expected = wrong
        has = list(parts[rank]) if rank in parts else "nothing"
        problem = problem or (
            f"rank {rank} has {has}, expected {'nothing' if expected is None else list(expected)} "
            f"of {list(shape)}"
        )
    raise ShardError(f"{name!r} sharded by `{spec}`: {problem}; correct the rule, or the parts")


def _find_misfit(
    layout: Layout, parts: Mapping[int, Shape], may_lack: bool
) -> tuple[int, Shape | None] | None:
    """Return the first rank whose shape differs from the layout's, and the layout's shape."""
    for rank in sorted({*parts} if may_lack else {*layout.holders, *parts}):
        expected = layout.local_shape(rank) if rank < layout.slots else None
        held = parts.get(rank)
        is_empty = 0 in (expected or (0,)) and 0 in (held or (0,))
        if expected != held and not is_empty:
            return rank, expected
    return None


def _list_lengths(
    name: str, parts: Mapping[int, Shape], spec: ShardingSpec, dimension: int
) -> list[int]:
    """Return the possible lengths of a whole dimension, the most likely first."""
    mesh = spec.mesh
    ranks = np.array(mesh.devices).reshape(mesh.shape)
    names = {axis.name for level in spec.dim_specs[dimension].levels for axis in level.axes}
    axes = [mesh.axis_names.index(name) for name in sorted(names)]
    lengths: dict[tuple[int, ...], tuple[int, int]] = {}
    for rank, shape in parts.items():
        index = np.argwhere(ranks == rank)[0].tolist()
        key = tuple(index[axis] for axis in axes)
        first, length = lengths.setdefault(key, (rank, shape[dimension]))
        if length != shape[dimension]:
            raise ShardError(
                f"{name!r} sharded by `{spec}`: dimension {dimension} is {length} long on rank "
                f"{first} and {shape[dimension]} on rank {rank}, which have the same part of it; "
                "correct the rule, or the parts"
            )
    total = sum(length for _, length in lengths.values())
    # Several ranks may hold copies of a part: the whole is then shorter than the sum.
    shared = [total // n for n in range(2, len(lengths) + 1) if total % n == 0]
    return [total, *shared]
