"""How is each tensor of a model cut over a mesh?

1. A tensor takes the first rule whose pattern matches its name: rules given by hand first,
   then the recipe's.
2. The rule's variables become numbers of the model's config, and `...` as many `-` as the
   tensor's rank asks for.
3. A rule given by hand is read over the mesh as it is. A recipe's rule is read over the
   recipe's own axes, and the axes that the mesh lacks then fall out of it::

       mesh dp=2            recipe axes tp             rule "tp@heads12, -"   ->   "-, -"
       mesh dp=2,tp=4       recipe axes tp             rule "tp@heads12, -"   ->   itself

4. A tensor that no rule matches is replicated, and listed.
5. The layout of every tensor is built, so a rule that does not fit is known before anything
   is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from reshard.errors import LayoutError, RecipeError
from reshard.layout import Layout
from reshard.mesh import Axis, DeviceMesh
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule
from reshard.recipes.variables import fill_in
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.sharding_text import spec


@dataclass(frozen=True, slots=True)
class Assignment:
    """How each tensor is cut, and by which rule.

    `specs` and `layouts` have every tensor, in the order given; `matched` has the rule of
    those that one matched. `unmatched` tensors are replicated. `unused_rules` (given by hand)
    and `unused_recipe_rules` decided no tensor: nothing matches them, or earlier rules took it
    all. `unused_axes` of the mesh hold copies of every tensor.
    """

    specs: dict[str, ShardingSpec]
    layouts: dict[str, Layout]
    matched: dict[str, Rule]
    unmatched: tuple[str, ...]
    unused_rules: tuple[Rule, ...]
    unused_recipe_rules: tuple[Rule, ...]
    unused_axes: tuple[str, ...]

    @property
    def unused(self) -> tuple[Rule, ...]:
        """All rules that decided no tensor, those given by hand first."""
        return self.unused_rules + self.unused_recipe_rules


@dataclass(frozen=True, slots=True)
class _Source:
    """A rule and the recipe it comes from; None for a rule given by hand."""

    rule: Rule
    recipe: Recipe | None

    def spec(
        self, mesh: DeviceMesh, config: Mapping[str, object] | None, ndim: int
    ) -> ShardingSpec:
        text = fill_in(self.rule.spec, config)
        if self.recipe is None:
            return spec(mesh, text, ndim=ndim)
        axes = self.recipe.axes
        sizes = [mesh.axis_size(axis) if axis in mesh.axis_names else 1 for axis in axes]
        known = DeviceMesh(f"recipe {self.recipe.name}", sizes, axes)
        return _on_mesh(mesh, spec(known, text, ndim=ndim))

    def __str__(self) -> str:
        recipe = f"recipe {self.recipe.name!r}, " if self.recipe else ""
        return f"{recipe}rule `{self.rule}`"


def assign(
    shapes: Mapping[str, tuple[int, ...]],
    mesh: DeviceMesh,
    rules: Sequence[Rule] = (),
    recipe: Recipe | None = None,
    config: Mapping[str, object] | None = None,
) -> Assignment:
    """How each tensor of `shapes` is cut over `mesh`.

    Args:
        shapes: of the tensors, by name.
        mesh: the devices.
        rules: given by hand; they come before the recipe's, and every axis they name must be
            in the mesh.
        recipe: of the model; an axis of it that the mesh lacks counts as one of size 1.
        config: the model's config.json, for the variables of the rules.

    Raises:
        RecipeError: a rule that cannot be read or does not fit a tensor it matches, an axis or
            a variable that is not there.

    >>> shapes = {"up.weight": (8, 4), "up.bias": (8,), "norm": (4,)}
    >>> found = assign(shapes, DeviceMesh.of(tp=2), [Rule("up.*", "tp, ...")])
    >>> print(found.specs["up.weight"], found.specs["up.bias"], found.unmatched, sep=" | ")
    tp, - | tp | ('norm',)
    """
    by_hand = [_Source(rule, None) for rule in rules]
    for source in by_hand:
        # A wrong rule given by hand is a mistake even where it matches nothing.
        with _naming(str(source)):
            source.spec(mesh, config, ndim=0)
    from_recipe = [_Source(rule, recipe) for rule in recipe.rules] if recipe else []
    sources = by_hand + from_recipe

    @cache
    def lay_out(source: _Source, shape: tuple[int, ...]) -> tuple[ShardingSpec, Layout]:
        sharding = source.spec(mesh, config, len(shape))
        return sharding, sharding.layout(shape)

    specs: dict[str, ShardingSpec] = {}
    layouts: dict[str, Layout] = {}
    matched: dict[str, Rule] = {}
    used: set[int] = set()
    for name, shape in shapes.items():
        number = next((n for n, source in enumerate(sources) if source.rule.matches(name)), None)
        if number is None:
            specs[name], layouts[name] = lay_out(_REPLICATED, shape)
            continue
        source = sources[number]
        with _naming(f"tensor {name!r} of shape {list(shape)}, {source}"):
            specs[name], layouts[name] = lay_out(source, shape)
        matched[name] = source.rule
        used.add(number)
    unused = [n for n in range(len(sources)) if n not in used]
    used_axes = {axis for sharding in set(specs.values()) for axis in _used_axes(sharding)}
    return Assignment(
        specs,
        layouts,
        matched,
        unmatched=tuple(name for name in shapes if name not in matched),
        unused_rules=tuple(sources[n].rule for n in unused if n < len(by_hand)),
        unused_recipe_rules=tuple(sources[n].rule for n in unused if n >= len(by_hand)),
        unused_axes=tuple(axis for axis in mesh.axis_names if axis not in used_axes),
    )


_REPLICATED = _Source(Rule("*", "..."), None)


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Say of an error in a rule which rule it is, and for which tensor."""
    try:
        yield
    except (LayoutError, RecipeError) as error:
        raise RecipeError(f"{where}: {error}") from error


def _on_mesh(mesh: DeviceMesh, written: ShardingSpec) -> ShardingSpec:
    """`written` over `mesh`, without the axes that `mesh` lacks and levels that have no other."""

    def present(axes: Iterable[Axis]) -> list[Axis]:
        return [axis for axis in axes if axis.name in mesh.axis_names]

    dim_specs = []
    for dim in written.dim_specs:
        levels = [(present(level.axes), level.rule) for level in dim.levels]
        kept = [Level(axes, rule) for axes, rule in levels if axes]
        dim_specs.append(DimSpec(kept, dim.is_open, dim.priority))
    return ShardingSpec(
        mesh,
        dim_specs,
        present(written.replicated_axes),
        present(written.partial_axes),
        written.reduction or "sum",
    )


def _used_axes(sharding: ShardingSpec) -> set[str]:
    axes = [axis for dim in sharding.dim_specs for axis in dim.axes]
    return {axis.name for axis in (*axes, *sharding.partial_axes)}
