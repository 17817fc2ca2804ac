"""Assignments: the sharding of each tensor of a model over a mesh, and the ranks that hold it.

1. A tensor takes the first rule whose pattern matches its name: rules given by hand first,
   then the recipe's.
2. The rule's variables are replaced by numbers of the model's config and cut rules of the recipe,
   and `...` by as many `-` as the tensor has other dimensions.
3. A rule given by hand is read over the mesh as it is. A recipe's rule is read over the
   recipe's own axes, which are then replaced by the axes of the mesh that they are mapped to::

       mesh dp=2            recipe axes tp             rule "tp@heads12, -"   ->   "-, -"
       mesh dp=2,tp=4       recipe axes tp             rule "tp@heads12, -"   ->   itself

4. The number of a layer or an expert in the name determines the coordinate of an axis at which
   the tensor is held. If layers are divided by bytes, those of all layers are counted first.
5. The stored tensors of a quantised weight are sharded by the rule for the weight, at their
   groups (see `reshard.recipes.quantized_sharding`).
6. Adapters are sharded like the weights that they change (see
   `reshard.recipes.adapters`).
7. The layout of every tensor is built, so a rule that does not fit is an error before anything
   is read.
8. It is an error if ranks could not compute with their shards
   (`reshard.recipes.coupling`), or if no rule matches a tensor. A user who allows it
   gets a list instead, and unknown tensors are replicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from reshard._records import Record
from reshard.cut_rules import CutRule
from reshard.errors import LayoutError, RecipeError, UncomputableError, UnmatchedError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.recipes.adapters import Leader, LowRankAdapters
from reshard.recipes.axis_mapping import (
    AxisMapping,
    find_used_axes,
    map_coordinates,
    map_sharding,
    read_sharding,
)
from reshard.recipes.coupling import (
    ComputabilityCheck,
    ShardBlock,
    find_annotations,
    read_shard_blocks,
)
from reshard.recipes.expressions import (
    NO_NUMBERS,
    Numbers,
    expand,
    fill_in,
    find_expressions,
    parse_expression,
)
from reshard.recipes.layer_placement import BY_BYTES, LayerPlacement, balance_weights, check_cut
from reshard.recipes.overrides import describe_unknown, parse_allowed
from reshard.recipes.quantization import find_quantized
from reshard.recipes.quantized_sharding import FoldedWeights
from reshard.recipes.recipe import REPLICA_AXES, Recipe
from reshard.recipes.rules import Rule, RuleList
from reshard.sharding import DimSpec, ShardingSpec, spec

# For each axis over which layers or experts are divided, the coordinates of a tensor.
_Coordinates = tuple[tuple[str, tuple[int, ...]], ...]
_Placed = tuple[ShardingSpec, Layout]
_Shape = tuple[int, ...]


class Assignment(Record):
    """The sharding of each tensor, and the rule that decided it.

    `specs` and `layouts` have every tensor, in the order given; `matched` has the rule of
    matched tensors. `unknown` tensors are replicated, and `uncomputable` describes shards that
    ranks could not compute; both are empty unless allowed. `unused_rules` (given by hand)
    and `unused_recipe_rules` matched no tensor: no name fits them, or earlier rules match all that
    do. `unused_axes` of the mesh hold copies of every tensor. `notes` are for the user.
    """

    specs: dict[str, ShardingSpec]
    layouts: dict[str, Layout]
    matched: dict[str, Rule]
    unknown: tuple[str, ...]
    unused_rules: tuple[Rule, ...]
    unused_recipe_rules: tuple[Rule, ...]
    unused_axes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    uncomputable: tuple[str, ...] = ()

    @property
    def unused(self) -> tuple[Rule, ...]:
        """All rules that decided no tensor, those given by hand first."""
        return self.unused_rules + self.unused_recipe_rules

    def list_idle_axes(self, mesh: DeviceMesh, recipe: Recipe | None) -> list[str]:
        """Return the unused axes of several ranks that the recipe does not declare as replicas.

        An option that maps an axis of the recipe to none (`tp=`) declares it as well.
        """
        replicas: tuple[str, ...] = REPLICA_AXES
        if recipe is not None:
            unmapped = [axis for axis, mapped in recipe.mesh_axes.items() if not mapped.strip()]
            replicas = (*recipe.replicas, *unmapped)
        long = mesh.list_long_axes()
        return [axis for axis in self.unused_axes if axis in long and axis not in replicas]

    def rank_bytes(self, itemsizes_bytes: Mapping[str, int]) -> dict[int, int]:
        """Return the bytes that each rank holds, pads included, from those of an element."""
        # Layers share layouts: equal pairs are counted, and each is added once.
        counts: dict[tuple[Layout, int], int] = {}
        for name, layout in self.layouts.items():
            key = (layout, itemsizes_bytes[name])
            counts[key] = counts.get(key, 0) + 1
        slots = max((layout.slots for layout in self.layouts.values()), default=0)
        total = np.zeros(slots, dtype=np.int64)
        for (layout, itemsize), count in counts.items():
            np.add.at(total, layout.cell_slot, layout.cell_shape.prod(axis=1) * itemsize * count)
        return {rank: int(size) for rank, size in enumerate(total)}

    def follow(
        self, shapes: Mapping[str, tuple[int, ...]], leaders: Mapping[str, Leader]
    ) -> Assignment:
        """Return the assignment of tensors that are sharded like those of this one.

        Args:
            shapes: of all tensors.
            leaders: for a tensor, the tensor that it is sharded like, and the dimension there of
                each of its dimensions; None for a dimension that is not sharded. Other tensors are
                those of this assignment.
        """
        specs, layouts, matched = {}, {}, {}
        for name, shape in shapes.items():
            leader, dims = leaders.get(name, (name, None))
            specs[name] = self.specs[leader] if dims is None else _pick(self.specs[leader], dims)
            layouts[name] = self.layouts[leader] if dims is None else specs[name].layout(shape)
            if leader in self.matched:
                matched[name] = self.matched[leader]
        unknown = tuple(name for name in self.unknown if name in shapes)
        return self.replace(specs=specs, layouts=layouts, matched=matched, unknown=unknown)

    def local_names(self, rank: int) -> dict[str, str]:
        """Return the name that a rank gives each tensor it holds, by the tensor's name.

        A module on a rank often has only its own layers and experts and counts them from 0: on
        stage 1 of 2, `model.layers.0` is layer 16 of 32. Numbers are renumbered in rising order.

        Args:
            rank: in the layouts.

        >>> from reshard.recipes.library import load_recipe
        >>> shapes = {f"model.layers.{i}.input_layernorm.weight": (4,) for i in range(4)}
        >>> config = {"num_hidden_layers": 4}
        >>> found = assign(shapes, DeviceMesh.of(pp=2), (), load_recipe("llama"), config)
        >>> found.local_names(1)["model.layers.2.input_layernorm.weight"]
        'model.layers.0.input_layernorm.weight'
        """
        held = [
            name
            for name, layout in self.layouts.items()
            if rank < layout.slots and layout.cells_of(rank)
        ]
        numbers = {
            name: self.matched[name].numbers_in(name) or {} for name in held if name in self.matched
        }
        counted: dict[str, set[int]] = {}
        for name_numbers in numbers.values():
            for counter, number in name_numbers.items():
                counted.setdefault(counter, set()).add(number)
        local = {
            counter: {number: index for index, number in enumerate(sorted(held_numbers))}
            for counter, held_numbers in counted.items()
        }
        names = dict(zip(held, held, strict=True))
        for name, name_numbers in numbers.items():
            renumbered = {
                counter: local[counter][number] for counter, number in name_numbers.items()
            }
            names[name] = self.matched[name].with_numbers(name, renumbered)
        return names


# Layers repeat: a few shardings serve all tensors that follow others.
@lru_cache(maxsize=1024)
def _pick(sharding: ShardingSpec, dims: tuple[int | None, ...]) -> ShardingSpec:
    """Return the sharding of a tensor with some of the dimensions of another."""
    if dims == tuple(range(len(sharding.dim_specs))):
        return sharding
    return sharding.with_dims([DimSpec() if d is None else sharding.dim_specs[d] for d in dims])


class _Match(NamedTuple):
    """The rule that matches a tensor, by its index among all rules, and the numbers of its name."""

    number: int
    numbers: tuple[tuple[str, int], ...]
    # The names of numbers that are beyond the last layer or expert.
    after_last: frozenset[str] = frozenset()


class _AssignmentBuilder:
    """The state of an assignment: rules over a mesh, for a model."""

    def __init__(
        self,
        mesh: DeviceMesh,
        rules: Sequence[Rule],
        recipe: Recipe | None,
        config: Mapping[str, object] | None,
        aliases: Mapping[str, str],
    ) -> None:
        self.mesh, self.recipe, self.config, self.aliases = mesh, recipe, config, aliases
        # Rules by hand come first, so numbers below `by_hand` are theirs. Conditions
        # that differ by layer are evaluated where a name is matched.
        from_recipe = [
            rule
            for rule in (recipe.rules if recipe else ())
            if (condition := rule.condition) is None
            or condition.index_names
            or condition.holds(config)
        ]
        self.rules = (*rules, *from_recipe)
        self.listed = RuleList(self.rules, config)
        self.by_hand = len(rules)
        self.mapping = recipe.map_axes(mesh) if recipe else {}
        sizes = [mesh.joint_size(self.mapping[axis]) for axis in recipe.axes] if recipe else []
        self.recipe_mesh = (
            DeviceMesh(f"recipe {recipe.name}", sizes, recipe.axes) if recipe else None
        )
        self.placements: dict[str, LayerPlacement] = {}
        self.texts = self._write_out_cuts(recipe)
        self.index_names = [
            {name for variable in find_expressions(text) for name in variable.index_names}
            for text in self.texts
        ]
        # Layers repeat: tensors of the same rule, shape and place share a sharding and a layout.
        self.read_sharding = cache(read_sharding)
        self.lay_out = cache(self._lay_out)
        self.hold = cache(self._hold)
        # Of the recipe's rules, by their numbers.
        words = recipe.words if recipe else {}
        numbered = list(enumerate(self.rules))[self.by_hand :]
        self.annotations = {number: find_annotations(rule.spec, words) for number, rule in numbered}

    def _write_out_cuts(self, recipe: Recipe | None) -> list[str]:
        """Return the specs with the recipe's own cuts written out; other braces need a config."""
        words = recipe.words if recipe else {}
        return [
            rule.spec if number < self.by_hand else expand(rule.spec, words)
            for number, rule in enumerate(self.rules)
        ]

    def name_of(self, number: int) -> str:
        """Return the name of a rule in messages."""
        where = f"recipe {self.recipe.name!r}, " if self.recipe and number >= self.by_hand else ""
        return f"{where}rule `{self.rules[number]}`"

    def describe(self, name: str, shape: _Shape, match: _Match) -> str:
        """Return the name of a tensor and of its rule in errors."""
        return f"tensor {name!r} of shape {list(shape)}, {self.name_of(match.number)}"

    def match(self, name: str, first: int = 0) -> _Match | None:
        """Return the first rule that matches a tensor, from rule number `first` on."""
        called = (name, self.aliases[name]) if name in self.aliases else (name,)
        matches = [(*match, text) for text in called if (match := self.listed.find(text, first))]
        # If a rule matches both names, the tensor's own is used.
        number, name_numbers, text = min(matches, key=itemgetter(0), default=(-1, {}, ""))
        if number < 0:
            return None
        numbers = self.recipe.numbers if self.recipe else {}
        after_last = [
            what for what in name_numbers if what in numbers and numbers[what].is_beyond_last(text)
        ]
        return _Match(number, tuple(name_numbers.items()), frozenset(after_last))

    def match_all(self, folded: FoldedWeights) -> dict[str, _Match]:
        """Match all tensors; stored tensors of an unmatched weight are matched by their names."""
        by_name: dict[str, _Match | None] = {}
        for name in folded.shapes:
            by_name[name] = self.match(name)
            if by_name[name] is None and name in folded.weights:
                by_name |= {member: self.match(member) for member in folded.drop(name)}
        matches = {name: match for name, match in by_name.items() if match is not None}
        if self.recipe is not None:
            by_recipe = {
                name: self.rules[match.number]
                for name, match in matches.items()
                if name in folded.weights and match.number >= self.by_hand
            }
            self.texts = self._write_out_cuts(folded.with_units(self.recipe, by_recipe))
        return matches

    def sharding(
        self, number: int, ndim: int, coordinates: _Coordinates = (), numbers: Numbers = NO_NUMBERS
    ) -> ShardingSpec:
        """Return a rule's sharding for tensors of `ndim` dimensions at some coordinates.

        `numbers` of their names are the indices into lists of the config.
        """
        written, mapping = self.written(number, ndim, numbers)
        return map_sharding(
            self.mesh, written, mapping, self.restrict(written, mapping, coordinates)
        )

    def written(
        self, number: int, ndim: int, numbers: Numbers
    ) -> tuple[ShardingSpec, AxisMapping | None]:
        """Parse a rule's spec over the axes of the mesh or the recipe, and return their mapping."""
        text = fill_in(self.texts[number], self.config, numbers)
        if self.recipe_mesh is None or number < self.by_hand:
            return self.read_sharding(self.mesh, text, ndim), None
        return self.read_sharding(self.recipe_mesh, text, ndim), self.mapping

    def restrict(
        self, written: ShardingSpec, mapping: AxisMapping | None, coordinates: _Coordinates
    ) -> _Coordinates:
        """Return the coordinates of the mesh at which a rule's tensors are held."""
        restricted = [*map_coordinates(self.mesh, written.only, mapping)]
        restricted += map_coordinates(self.mesh, coordinates, self.mapping)
        return tuple(restricted)

    def _lay_out(
        self,
        number: int,
        shape: _Shape,
        coordinates: _Coordinates,
        indices: tuple[tuple[str, int], ...],
    ) -> _Placed:
        sharding = self.sharding(number, len(shape), coordinates, dict(indices))
        return sharding, sharding.layout(shape)

    def list_indices(self, match: _Match) -> tuple[tuple[str, int], ...]:
        """Return the numbers of a name by which its rule indexes lists of the config."""
        names = self.index_names[match.number]
        return tuple(pair for pair in match.numbers if pair[0] in names) if names else ()

    def lay_out_match(self, match: _Match, shape: _Shape, coordinates: _Coordinates) -> _Placed:
        """Return the sharding and the layout of a tensor at some coordinates."""
        return self.lay_out(match.number, shape, coordinates, self.list_indices(match))

    def read_blocks(
        self,
        name: str,
        match: _Match,
        coordinates: _Coordinates,
        shape: _Shape,
        sharding: ShardingSpec,
    ) -> tuple[_Match | None, tuple[ShardBlock, ...]]:
        """Return the blocks of a tensor that ranks hold, for cut rules with names.

        Also return the match of the recipe's rule, which a rule given by hand may precede.
        """
        if self.recipe is None:
            return None, ()
        own = match if match.number >= self.by_hand else self.match(name, self.by_hand)
        if own is None or not self.annotations[own.number]:
            return own, ()
        # By a rule given by hand, or moved to groups of a quantised weight.
        is_other = (
            own is not match or sharding is not self.lay_out_match(match, shape, coordinates)[0]
        )
        if own is not match:
            coordinates = self.find_coordinates(own)
        instead = sharding if is_other else None
        return own, self.hold(own.number, shape, coordinates, self.list_indices(own), instead)

    def _hold(
        self,
        number: int,
        shape: _Shape,
        coordinates: _Coordinates,
        indices: tuple[tuple[str, int], ...],
        instead: ShardingSpec | None,
    ) -> tuple[ShardBlock, ...]:
        try:
            written, mapping = self.written(number, len(shape), dict(indices))
            only = self.restrict(written, mapping, coordinates)
            storage = self.recipe.storage if self.recipe else ()
            names = self.annotations[number]
            return read_shard_blocks(
                self.mesh, self.mapping, storage, names, written, only, shape, instead
            )
        except (LayoutError, RecipeError):
            # A recipe's rule that does not fit does not apply to a tensor with a rule by hand.
            return ()

    def find_coordinates(self, match: _Match) -> _Coordinates:
        """Return the coordinates of a tensor, for the numbers whose placement is known."""
        result: dict[str, tuple[int, ...]] = {}
        for what, number in match.numbers:
            if what in self.placements:
                placement = self.placements[what]
                coordinates = (
                    placement.of_ends(["last"])
                    if what in match.after_last
                    else placement.of_number(number)
                )
                self._add_coordinates(result, what, coordinates)
        for what, ends in self.rules[match.number].at:
            if what in self.placements:
                self._add_coordinates(result, what, self.placements[what].of_ends(ends))
        return tuple(result.items())

    def _add_coordinates(
        self, result: dict[str, tuple[int, ...]], what: str, coordinates: tuple[int, ...]
    ) -> None:
        axis = self.recipe.numbers[what].axis if self.recipe else what
        if axis in result:
            raise RecipeError(f"two numbers of a name are distributed over axis {axis!r}")
        result[axis] = coordinates

    def find_placements(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        matches: Mapping[str, _Match],
        itemsizes_bytes: Mapping[str, float] | None,
    ) -> None:
        """Find the coordinates of each layer and expert, for the numbers that some tensor needs."""
        needed = {what for match in matches.values() for what, _ in match.numbers}
        needed |= {what for match in matches.values() for what, _ in self.rules[match.number].at}
        numbers = self.recipe.numbers if self.recipe else {}
        for what in needed - numbers.keys():
            raise RecipeError(f"no recipe defines the number {{{what}}} of a rule's pattern")
        # Numbers divided by bytes come last: the bytes of a layer depend on its experts' ranks.
        for by_bytes in (False, True):
            for what, numbering in numbers.items():
                parts = self.mesh.joint_size(self.mapping[numbering.axis])
                # An axis of size 1 restricts nothing.
                if what not in needed or (numbering.cut == BY_BYTES) != by_bytes or parts == 1:
                    continue
                with _name_in_errors(f"recipe {self.recipe.name if self.recipe else ''!r}, {what}"):
                    count = parse_expression(numbering.count).value(self.config)
                    if by_bytes:
                        first, *things, last = self._weigh(
                            what, count, shapes, matches, itemsizes_bytes
                        )
                        rule: CutRule = balance_weights(things, parts, first, last)
                    else:
                        rule = check_cut(numbering.cut)
                    self.placements[what] = LayerPlacement.cut(
                        rule, count, parts, numbering.beyond_last
                    )

    def _weigh(
        self,
        what: str,
        count: int,
        shapes: Mapping[str, tuple[int, ...]],
        matches: Mapping[str, _Match],
        itemsizes_bytes: Mapping[str, float] | None,
    ) -> list[float]:
        """Return the bytes that ranks hold of each layer or expert, and of both ends.

        The result has shape `(1 + count + 1,)`.
        """
        weights = [0.0] * (count + 2)
        for name, match in matches.items():
            rule = self.rules[match.number]
            numbers, ends = dict(match.numbers).get(what), dict(rule.at).get(what, ())
            if numbers is None and not ends:
                continue
            with _name_in_errors(self.describe(name, shapes[name], match)):
                _, layout = self.lay_out_match(match, shapes[name], self.find_coordinates(match))
            elements = float(layout.cell_shape.prod(axis=1).sum())
            weight = elements * (itemsizes_bytes[name] if itemsizes_bytes else 1)
            if numbers is not None:
                # Entry 0 is the first end, entry -1 the last, with all numbers beyond the count.
                weights[1 + (count if what in match.after_last else min(numbers, count))] += weight
            for end in ends:
                weights[0 if end == "first" else -1] += weight
        return weights


def assign(
    shapes: Mapping[str, tuple[int, ...]],
    mesh: DeviceMesh,
    rules: Sequence[Rule] = (),
    recipe: Recipe | None = None,
    config: Mapping[str, object] | None = None,
    itemsizes_bytes: Mapping[str, int] | None = None,
    logical_shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    allow: Iterable[str] = (),
    aliases: Mapping[str, str] | None = None,
) -> Assignment:
    """Return the sharding of each tensor of `shapes` over `mesh`.

    Args:
        shapes: of the tensors, by name.
        mesh: the devices.
        rules: given by hand; they come before the recipe's, and every axis they name must be
            in the mesh.
        recipe: of the model; an axis of it that the mesh lacks counts as size 1.
        config: the model's config.json, for the variables of the rules.
        itemsizes_bytes: of an element by tensor, if layers are divided by bytes; equal
            when None.
        logical_shapes: of quantised weights whose stored tensors do not determine it (bitsandbytes
            4-bit), by the weight's name.
        allow: errors that are accepted: `uncomputable` shards, `unknown` tensors.
        aliases: other names of tensors, which rules match as well: those of a recipe, for tensors
            with a prefix before it.

    Raises:
        RecipeError: a rule that cannot be read or does not fit a tensor it matches, an axis or
            an undefined variable, a number beyond the count in the config,
            a quantised weight that is not known or would be cut through a group.
        UncomputableError: a cut of the recipe's tensors that ranks could not compute with.
        UnmatchedError: rules or a recipe are given, and match not all tensors.
        UsageError: an unknown word in `allow`.

    >>> shapes = {"up.weight": (8, 4), "up.bias": (8,), "norm": (4,)}
    >>> rules = [Rule("up.*", "tp, ...")]
    >>> found = assign(shapes, DeviceMesh.of(tp=2), rules, allow=["unknown"])
    >>> print(found.specs["up.weight"], found.specs["up.bias"], found.unknown, sep=" | ")
    tp, - | tp | ('norm',)
    """
    allowed = parse_allowed(allow)
    builder = _AssignmentBuilder(mesh, rules, recipe, config, aliases or {})
    for number in range(len(rules)):
        # An invalid rule is an error even if it matches nothing; rules by layer need a name.
        with _name_in_errors(builder.name_of(number)):
            if not builder.index_names[number]:
                builder.sharding(number, ndim=0)
    # Adapters are sharded like the weights that they change, so those are assigned first.
    if adapters := LowRankAdapters(shapes, config, rules):
        sizes = adapters.weigh_bases(itemsizes_bytes)
        arguments = (adapters.base_shapes, mesh, rules, recipe, config, sizes, logical_shapes)
        base = assign(*arguments, allow=allow, aliases=aliases)
        result = base.follow(shapes, adapters.leaders)
        matched = {name: adapters.name_rule(name, rule) for name, rule in result.matched.items()}
        unknown = tuple(name for name in shapes if name not in matched)
        return result.replace(matched=matched, unknown=unknown)
    # An unknown method matters only if ranks must be able to compute with their shards.
    quantized = find_quantized(
        shapes, config, itemsizes_bytes, logical_shapes, is_lenient="uncomputable" in allowed
    )
    folded = FoldedWeights(quantized, shapes, rules)
    matches = builder.match_all(folded)
    whole = folded.shapes
    builder.find_placements(
        whole, matches, folded.itemsizes_bytes(itemsizes_bytes) if itemsizes_bytes else None
    )
    cut: dict[str, _Placed] = {}
    decided: dict[str, Rule] = {}
    cut_through: list[str] = []
    check = ComputabilityCheck(mesh, recipe.coupled if recipe else {}, config)
    # Unmatched tensors are replicated, so one sharding for each rank of tensors serves all.
    replicated = cache(lambda ndim: spec(mesh, "...", ndim=ndim))
    for name, shape in whole.items():
        match = matches.get(name)
        if match is None:
            cut[name] = replicated(len(shape)), replicated(len(shape)).layout(shape)
            continue
        # Not `_name_in_errors`, which would write a text for each of very many tensors.
        try:
            coordinates = builder.find_coordinates(match)
            placed = {name: builder.lay_out_match(match, shape, coordinates)}
            sharding, _ = placed[name]
            if name in folded.weights:
                sharding = folded.align(name, sharding)
                cut_through += folded.describe_cut_groups(name, sharding)
                placed = folded.spread(name, sharding)
        except (LayoutError, RecipeError) as error:
            raise RecipeError(f"{builder.describe(name, shape, match)}: {error}") from error
        own, blocks = builder.read_blocks(name, match, coordinates, shape, sharding)
        if own is not None:
            check.add(name, (own.numbers, own.after_last), blocks)
        cut |= placed
        decided |= dict.fromkeys(placed, builder.rules[match.number])
    specs = {name: cut[name][0] for name in shapes}
    layouts = {name: cut[name][1] for name in shapes}
    unknown = tuple(name for name in shapes if name not in decided)
    # Without rules and a recipe, copies of everything are the intended result.
    if unknown and (rules or recipe) and "unknown" not in allowed:
        by = f"of the recipe {recipe.name!r}" if recipe else "given"
        raise UnmatchedError(describe_unknown(unknown, len(shapes), by))
    uncomputable = (*check.list_problems(), *cut_through)
    if uncomputable and "uncomputable" not in allowed:
        more = f" (and {len(uncomputable) - 1} more such)" if len(uncomputable) > 1 else ""
        raise UncomputableError(
            f"{uncomputable[0]}{more}. Shards that are stored and not computed with may be "
            "accepted: --allow uncomputable, in Python allow=['uncomputable']"
        )
    used = {match.number for match in matches.values()}
    unused = [n for n in range(len(builder.rules)) if n not in used]
    used_axes = {axis for sharding in set(specs.values()) for axis in find_used_axes(sharding)}
    return Assignment(
        specs,
        layouts,
        {name: decided[name] for name in shapes if name in decided},
        unknown=unknown,
        unused_rules=tuple(builder.rules[n] for n in unused if n < builder.by_hand),
        unused_recipe_rules=tuple(builder.rules[n] for n in unused if n >= builder.by_hand),
        unused_axes=tuple(axis for axis in mesh.axis_names if axis not in used_axes),
        notes=_collect_notes(builder, matches),
        uncomputable=uncomputable,
    )


def _collect_notes(builder: _AssignmentBuilder, matches: Mapping[str, _Match]) -> tuple[str, ...]:
    """Return the notes of rules that matched tensors which not all ranks hold."""
    notes: dict[str, str] = {}
    for name, match in matches.items():
        rule = builder.rules[match.number]
        if rule.note and all(what in builder.placements for what, _ in rule.at):
            notes.setdefault(rule.note, name)
    return tuple(f"{name}: {note}" for note, name in notes.items())


@contextmanager
def _name_in_errors(where: str) -> Iterator[None]:
    """Begin the text of an error with `where`."""
    try:
        yield
    except (LayoutError, RecipeError) as error:
        raise RecipeError(f"{where}: {error}") from error
