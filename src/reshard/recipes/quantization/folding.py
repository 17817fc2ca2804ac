"""Quantised weights in assignments: rules cut logical weights, stored tensors follow.

1. The stored tensors of each quantised weight give place to the one logical weight, for which a
   recipe has a rule as for any other.
2. Cuts by name (`tp@{feed_forward}`) are moved to groups that all weights with this cut have in
   common, since their members are cut together: rows of gate and up, columns of down.
3. Each logical weight's sharding is moved to its groups where it is free; where it cuts one, that
   is said.
4. The stored tensors come back, each cut as the logical weight is.

A weight that no rule matches, and a stored tensor that has a rule by hand for its own name, are
left as they are.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from reshard.layout import Layout
from reshard.recipes.quantization.group_cuts import (
    StoredDimension,
    at_groups,
    describe_cut_group,
    in_groups,
    move_rule,
)
from reshard.recipes.quantization.weights import QuantizedWeight, Shape, Shapes
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule
from reshard.rule_text import parse_rule
from reshard.sharding import DimSpec, ShardingSpec

_OUTSIDE_BRACKETS = r"(?![^\[]*\])"


class FoldedWeights:
    """The quantised weights of a checkpoint in place of their stored tensors.

    Args:
        weights: by logical name.
        shapes: of all stored tensors.
        by_hand: rules by hand; one that matches a stored tensor and not the weight keeps it apart.
    """

    def __init__(
        self, weights: Mapping[str, QuantizedWeight], shapes: Shapes, by_hand: Sequence[Rule] = ()
    ) -> None:
        self.weights = dict(weights)
        self.stored = dict(shapes)
        apart = {
            member
            for weight in weights.values()
            for member in (weight.members if by_hand else ())
            if any(rule.matches(member) and not rule.matches(weight.name) for rule in by_hand)
        }
        self._weight_of = {
            member: name
            for name, weight in weights.items()
            for member in weight.members
            if member not in apart
        }

    def drop(self, name: str) -> tuple[str, ...]:
        """Leave a weight's stored tensors as they are; returns them."""
        weight = self.weights.pop(name)
        kept = tuple(one for one in weight.members if self._weight_of.get(one) == name)
        for member in kept:
            del self._weight_of[member]
        return kept

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes, with logical weights at the place of their first stored tensor."""
        found: dict[str, Shape] = {}
        for name, shape in self.stored.items():
            logical = self._weight_of.get(name)
            if logical is None:
                found[name] = shape
            else:
                found[logical] = self.weights[logical].shape
        return found

    def itemsizes_bytes(self, stored: Mapping[str, int]) -> dict[str, float]:
        """Bytes of an element of each tensor; of a logical weight those of all that is stored."""
        sizes: dict[str, float] = {n: size for n, size in stored.items() if n in self.stored}
        for name, weight in self.weights.items():
            total = sum(math.prod(self.stored[one]) * stored[one] for one in weight.members)
            sizes[name] = total / max(math.prod(weight.shape), 1)
        return sizes

    def with_units(self, recipe: Recipe, matched: Mapping[str, Rule]) -> Recipe:
        """The recipe with its cuts by name moved to the groups of the weights that they cut.

        Args:
            recipe: whose rules they are.
            matched: the rule of each weight.
        """
        units: dict[str, int] = {}
        pairs = {
            (matched[name], len(weight.shape), weight.groups, tuple(weight.uncut))
            for name, weight in self.weights.items()
            if name in matched
        }
        for rule, ndim, groups, uncut in pairs:
            for dimension, cut in _list_named_cuts(rule.spec, ndim):
                if cut in recipe.cuts and dimension not in uncut:
                    units[cut] = math.lcm(units.get(cut, 1), groups[dimension])
        moved = {
            name: move_rule(parse_rule(recipe.cuts[name]), unit).text or "ceil"
            for name, unit in units.items()
            if unit > 1
        }
        return dataclasses.replace(recipe, cuts={**recipe.cuts, **moved}) if moved else recipe

    def align(self, name: str, sharding: ShardingSpec) -> ShardingSpec:
        """The sharding of a logical weight, at its groups where it is free."""
        weight = self.weights[name]
        groups = tuple(1 if d in weight.uncut else n for d, n in enumerate(weight.groups))
        return _align(sharding, groups)

    def describe_cut_groups(self, name: str, sharding: ShardingSpec) -> Iterator[str]:
        """Where a weight's sharding goes through groups, with what would do."""
        weight = self.weights[name]
        for d, cause, found in _find_cut_groups(
            sharding, weight.shape, weight.groups, tuple(weight.uncut)
        ):
            if cause:
                yield (
                    f"{name!r}: dimension {d} is cut over {cause}, and {weight.uncut[d]!r} "
                    f"({weight.method}) ties its {weight.shape[d]} elements together; it cannot be "
                    "cut, take a size of 1 there"
                )
            else:
                yield (
                    f"{name!r}: dimension {d}: {found}. The groups are those of "
                    f"{weight.grouped_by[d]!r} ({weight.method})"
                )

    def spread(self, name: str, sharding: ShardingSpec) -> dict[str, tuple[ShardingSpec, Layout]]:
        """The shardings and layouts of a weight's stored tensors, from that of the logical one."""
        weight = self.weights[name]
        return {
            member: _lay_out_stored(sharding, weight.shape, dims, self.stored[member])
            for member, dims in weight.members.items()
            if self._weight_of.get(member) == name
        }


def _list_named_cuts(spec: str, ndim: int) -> list[tuple[int, str]]:
    """The dimensions of a spec's text that are cut by names in braces, with the names.

    >>> _list_named_cuts("ep / fsdp, etp@{feed_forward}@blocks[{a},{b}], ...", 4)
    [(1, 'feed_forward'), (1, 'a'), (1, 'b')]
    """
    items = [item.strip() for item in re.split("," + _OUTSIDE_BRACKETS, spec.partition("|")[0])]
    if "..." in items:
        at = items.index("...")
        items[at : at + 1] = ["-"] * max(0, ndim - len(items) + 1)
    return [
        (d, name.strip())
        for d, item in enumerate(items)
        for name in re.findall(r"\{([^{}]*)\}", item)
        if d < ndim
    ]


# Layers repeat: a few shardings serve all weights.
@lru_cache(maxsize=1024)
def _align(sharding: ShardingSpec, groups: tuple[int, ...]) -> ShardingSpec:
    dims = [at_groups(dim, n) for dim, n in zip(sharding.dim_specs, groups, strict=True)]
    return _replace_dims(sharding, dims)


@lru_cache(maxsize=1024)
def _find_cut_groups(
    sharding: ShardingSpec, shape: Shape, groups: tuple[int, ...], uncut: tuple[int, ...]
) -> tuple[tuple[int, str, str], ...]:
    """The dimensions that a sharding cuts through groups: over what, or how, as text.

    The first is said of dimensions that cannot be cut at all, the second of the others.
    """
    mesh, found = sharding.mesh, []
    for d, (dim, length) in enumerate(zip(sharding.dim_specs, shape, strict=True)):
        parts = math.prod(mesh.axis_size(axis) for axis in dim.axes)
        if d in uncut and parts > 1:
            found.append((d, f"{' '.join(map(str, dim.axes))} of {parts}", ""))
            continue
        text = describe_cut_group(dim, mesh, length, groups[d])
        if text is not None:
            found.append((d, "", text))
    return tuple(found)


@lru_cache(maxsize=4096)
def _lay_out_stored(
    sharding: ShardingSpec, shape: Shape, dims: tuple[StoredDimension, ...], stored: Shape
) -> tuple[ShardingSpec, Layout]:
    """The sharding of a stored tensor of shape `stored`, and its layout."""
    found = []
    for one, length in zip(dims, stored, strict=True):
        if one.dimension is None:
            found.append(DimSpec())
            continue
        dim = sharding.dim_specs[one.dimension]
        found.append(in_groups(dim, sharding.mesh, shape[one.dimension], one, length))
    spec = _replace_dims(sharding, found)
    return spec, spec.layout(stored)


def _replace_dims(sharding: ShardingSpec, dims: Sequence[DimSpec]) -> ShardingSpec:
    return ShardingSpec(
        sharding.mesh,
        dims,
        sharding.replicated_axes,
        sharding.partial_axes,
        sharding.reduction or "sum",
        sharding.only,
    )
