"""Recipes: rules for how the tensors of a kind of model are sharded.

A recipe is a named list of rules in a TOML file (`reshard.recipes.recipe_file`). Its rules are
written over axes of its own: `tp`, `fsdp`, `ep`... Over a mesh, each recipe axis is mapped to

1. the mesh axes that the user names for it, if any;
2. the mesh axis of the same name;
3. the axes of its stand-in: experts are sharded over `tp` on a mesh without `etp`;
4. no axis: the recipe axis is dropped from the rules, and nothing is sharded over it.

So a recipe serves every mesh; a mesh axis that it does not know holds copies.

A recipe may also list the names of its tensors in other programs (`Recipe.naming`), as a table of
names and of fused parameters for each convention.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from reshard._records import Record
from reshard._validation import check_used
from reshard.cut_rules import split_outside_brackets
from reshard.errors import LayoutError, MeshError, RecipeError
from reshard.mesh import Axis, DeviceMesh
from reshard.recipes.coupling import Coupling
from reshard.recipes.expressions import BRACES, find_expressions, parse_expression
from reshard.recipes.layer_placement import Numbering, check_cut
from reshard.recipes.naming import Fusion
from reshard.recipes.rules import Rule

# Axes that divide the storage of weights: tensors are gathered over them before computing.
STORAGE_AXES = ("fsdp", "dp")
# Axes along which weights are replicated: data and context parallelism.
REPLICA_AXES = ("dp", "cp")


class Recipe(Record):
    """A set of rules for the tensors of a kind of model.

    Args:
        name: for people and messages.
        description: one line about its purpose.
        model_types: the `model_type` in config.json of its models.
        axes: the axes that its rules may name.
        rules: in order; a tensor takes the first that matches.
        cuts: cut rules by name, for rules with `tp@{name}`.
        numbers: the numberings of the numbers in its patterns, by name. A rule with `ep@{expert}`
            shards a dimension as these are divided.
        coupled: couplings by name, for rules with `tp@{heads.query}`.
        storage: the axes that divide storage only: tensors are gathered over them before computing.
        replicas: the axes whose ranks hold copies unless a rule shards over them.
        sizes: expressions of config.json by name, for rules with `{name}`.
        stand_ins: for an axis, another whose mesh axes it takes if the mesh lacks it.
        mesh_axes: for an axis, the mesh axes it is mapped to, separated by spaces.
        names: by convention, the name in this recipe, or the `Fusion` of names, for each name or
            pattern of the convention.

    Raises:
        RecipeError: no name, no rules, invalid axes, or an undefined name in a rule, a numbering, a
            stand-in or a mapping.

    >>> Recipe("rows", "", (), ("tp",), (Rule("*", "tp, ..."),)).axes
    ('tp',)
    """

    name: str
    description: str
    model_types: tuple[str, ...]
    axes: tuple[str, ...]
    rules: tuple[Rule, ...]
    cuts: Mapping[str, str] = {}
    numbers: Mapping[str, Numbering] = {}
    stand_ins: Mapping[str, str] = {}
    mesh_axes: Mapping[str, str] = {}
    names: Mapping[str, Mapping[str, str | Fusion]] = {}
    coupled: Mapping[str, Coupling] = {}
    storage: tuple[str, ...] = STORAGE_AXES
    replicas: tuple[str, ...] = REPLICA_AXES
    sizes: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise RecipeError(f"the recipe name {self.name!r} is empty; give the recipe a name")
        if not self.rules:
            raise RecipeError(
                f"recipe {self.name!r} has no rules; give at least one, such as pattern `*` with "
                "spec `...`"
            )
        try:
            # A mesh of these axes checks their names.
            DeviceMesh(self.name, [1] * len(self.axes), self.axes)
        except MeshError as error:
            raise RecipeError(f"axes of recipe {self.name!r}: {error}") from error
        for cut in self.cuts.values():
            check_cut(cut)
        for size in self.sizes.values():
            parse_expression(size)
        named = [*self.cuts, *self.numbers, *self.coupled, *self.sizes]
        for name in named:
            if name in self.axes or named.count(name) > 1:
                raise RecipeError(f"recipe {self.name!r} has two things named {name!r}; rename one")
        for what, axis in (
            *((f"number {name!r}", numbering.axis) for name, numbering in self.numbers.items()),
            *(("a stand-in", axis) for pair in self.stand_ins.items() for axis in pair),
            *(("a mapping", axis) for axis in self.mesh_axes),
        ):
            if axis not in self.axes:
                raise RecipeError(
                    f"recipe {self.name!r}: {what} refers to axis {axis!r}; its axes are "
                    f"{', '.join(self.axes)}"
                )
        for rule in self.rules:
            for number in (*rule.numbers, *(number for number, _ in rule.at)):
                if number not in self.numbers:
                    raise RecipeError(
                        f"recipe {self.name!r}, rule `{rule}`: the number {number!r} is "
                        f"undefined; add a table [numbers.{number}] with `axis` and `count`"
                    )
            for variable in find_expressions(rule.spec):
                coupling, dot, _ = variable.text.partition(".")
                if dot and coupling in self.coupled and variable.text not in self.words:
                    members = ", ".join(name for name, _ in self.coupled[coupling].members)
                    raise RecipeError(
                        f"recipe {self.name!r}, rule `{rule}`: the coupling {coupling!r} has no "
                        f"member as in {{{variable.text}}}; its members are {members}"
                    )

    @property
    def words(self) -> dict[str, str]:
        """The texts that rules name in braces: cuts, numberings, couplings and sizes."""
        result = {name: numbering.cut for name, numbering in self.numbers.items()} | dict(self.cuts)
        result |= {name: f"{{{size}}}" for name, size in self.sizes.items()}
        for name, coupling in self.coupled.items():
            result |= coupling.words(name)
        return result

    def with_options(self, options: Mapping[str, str]) -> Recipe:
        """Return the recipe with a user's cuts, cuts of numbers, and mesh axes.

        Raises:
            RecipeError: a name that is not an option, or text that is not a cut rule.

        >>> rules = (Rule("embed", "tp@{vocabulary}, -"),)
        >>> recipe = Recipe("r", "", (), ("tp",), rules, cuts={"vocabulary": "ceil"})
        >>> recipe.with_options({"vocabulary": "pad128"}).cuts
        {'vocabulary': 'pad128'}
        """
        cuts, numbers, mesh_axes = dict(self.cuts), dict(self.numbers), dict(self.mesh_axes)
        for name, value in options.items():
            if name in cuts:
                cuts[name] = value
            elif name in numbers:
                numbers[name] = numbers[name].replace(cut=value)
            elif name in self.axes:
                mesh_axes[name] = value
            else:
                names = ", ".join([*cuts, *numbers, *self.axes])
                raise RecipeError(
                    f"recipe {self.name!r} has no option {name!r}; its options are {names}"
                )
        return self.replace(cuts=cuts, numbers=numbers, mesh_axes=mesh_axes)

    def expect_options_read(
        self, options: Iterable[str], mesh: DeviceMesh, deciding: Iterable[Rule]
    ) -> None:
        """Raise an error for options that have no effect.

        Args:
            options: the names of the user's options.
            mesh: the devices.
            deciding: the rules that decide tensors.

        Raises:
            UsageError: an option that is not used by any of these rules over this mesh.

        >>> rules = (Rule("embed", "tp@{vocabulary}, -"),)
        >>> recipe = Recipe("r", "", (), ("tp", "pp"), rules, cuts={"vocabulary": "ceil"})
        >>> recipe.expect_options_read(["vocabulary"], DeviceMesh.of(tp=2), rules)
        >>> recipe.expect_options_read(["vocabulary"], DeviceMesh.of(pp=2), rules)
        Traceback (most recent call last):
        reshard.errors.UsageError: the option 'vocabulary' of the recipe 'r' has no effect here: it
        is for tensors sharded over tp, and the mesh pp=2 has no such axis; leave it out
        """
        mapping = self.map_axes(mesh)
        decided = {*deciding}
        for name in options:
            is_axis = name not in self.cuts and name not in self.numbers
            axes_by_rule = {rule: self._find_axes(rule, name) for rule in self.rules}
            readers = [rule for rule, axes in axes_by_rule.items() if axes]
            # An option that maps an axis to no mesh axis has an effect as well.
            effective = [
                rule
                for rule in readers
                if is_axis or any(mapping[axis] for axis in axes_by_rule[rule])
            ]
            if effective:
                reason = f"it is for rules such as `{effective[0]}`, which match no tensor here"
            elif readers:
                axes = sorted({axis for rule in readers for axis in axes_by_rule[rule]})
                reason = (
                    f"it is for tensors sharded over {' or '.join(axes)}, and the mesh {mesh.text} "
                    "has no such axis"
                )
            else:
                reason = "no rule of the recipe uses it"
            option = f"the option {name!r} of the recipe {self.name!r}"
            check_used(option, not decided.isdisjoint(effective), reason)

    def _find_axes(self, rule: Rule, option: str) -> set[str]:
        """Return the axes over which a rule shards by an option; empty if it does not use it."""
        numbered = {*rule.numbers, *(number for number, _ in rule.at)}
        if option in self.axes:
            # An axis that the mesh lacks is mapped as its stand-in.
            own = {option, *(axis for axis, other in self.stand_ins.items() if other == option)}
            named = {*re.findall(r"\w+", BRACES.sub("", rule.spec))}
            return own & (named | {self.numbers[name].axis for name in numbered & {*self.numbers}})
        if option in numbered:
            return {self.numbers[option].axis}
        result = set()
        # Expressions in other braces may contain `/` and `,`.
        spec = BRACES.sub(lambda braces: "<>" if braces[1].strip() == option else "", rule.spec)
        for item in split_outside_brackets(spec, ","):
            for level in split_outside_brackets(item, "/"):
                axes, _, cut = level.partition("@")
                result |= {*axes.split()} & {*self.axes} if "<>" in cut else set()
        return result

    def naming(
        self, convention: str, config: Mapping[str, object] | None = None
    ) -> dict[str, str | Fusion]:
        """Return the recipe's names for those of a convention, such as `megatron`.

        A table for `refit(source_names=...)` and `refit(target_names=...)`.

        Args:
            convention: its key in `names`.
            config: the model's config.json, for the numbers of fused parameters.

        Raises:
            RecipeError: an unknown convention, or a number missing in the config.

        >>> names = {"theirs": {"*.fc": Fusion(("*.gate", "*.up"))}}
        >>> recipe = Recipe("r", "", (), ("tp",), (Rule("*", "..."),), names=names)
        >>> recipe.naming("theirs")["*.fc"].members
        ('*.gate', '*.up')
        """
        if convention not in self.names:
            conventions = ", ".join(self.names) or "none"
            raise RecipeError(
                f"recipe {self.name!r} has no names of {convention!r}; it has names of: "
                f"{conventions}. Add a table [names.{convention}], or give a table of your own"
            )
        return {
            theirs: entry.filled_in(config) if isinstance(entry, Fusion) else entry
            for theirs, entry in self.names[convention].items()
            if not isinstance(entry, Fusion) or entry.applies(config)
        }

    def map_axes(self, mesh: DeviceMesh) -> dict[str, tuple[Axis, ...]]:
        """Return the mesh axes that each axis of the recipe is mapped to, major to minor.

        Raises:
            RecipeError: a mapping to an axis that is missing in the mesh.

        >>> rules = (Rule("*", "..."),)
        >>> recipe = Recipe("r", "", (), ("tp", "etp"), rules, stand_ins={"etp": "tp"})
        >>> recipe.map_axes(DeviceMesh.of(tp=2))
        {'tp': (tp,), 'etp': (tp,)}
        """
        return {axis: self._map_axis(mesh, axis, self.axes) for axis in self.axes}

    def _map_axis(self, mesh: DeviceMesh, axis: str, others: tuple[str, ...]) -> tuple[Axis, ...]:
        if axis in self.mesh_axes:
            try:
                result = tuple(Axis.parse(word) for word in self.mesh_axes[axis].split())
                for mesh_axis in result:
                    mesh.axis_size(mesh_axis)
            except LayoutError as error:
                raise RecipeError(
                    f"recipe {self.name!r}: axis {axis!r} cannot be mapped to "
                    f"{self.mesh_axes[axis]!r}: {error}"
                ) from error
            return result
        if axis in mesh.axis_names:
            return (Axis(axis),)
        stand_in = self.stand_ins.get(axis)
        if stand_in is None or stand_in not in others:
            return ()
        # Excluding itself, so that stand-ins for each other terminate.
        return self._map_axis(mesh, stand_in, tuple(name for name in others if name != axis))


def parse_options(options: Mapping[str, str] | Iterable[str]) -> dict[str, str]:
    """Return options by name, given as a mapping or as texts `name=value`.

    Raises:
        RecipeError: text without `=`, or a name twice.

    >>> parse_options(["vocabulary=pad128", "etp="])
    {'vocabulary': 'pad128', 'etp': ''}
    """
    if isinstance(options, str) or not isinstance(options, Iterable):
        raise RecipeError(f"options {options!r}; give a dict, or a list of texts name=value")
    if isinstance(options, Mapping):
        for name, value in options.items():
            if not isinstance(value, str):
                raise RecipeError(f"the option {name!r} is {value!r}; expected a text")
        return dict(options)
    result: dict[str, str] = {}
    for text in options:
        if not isinstance(text, str):
            raise RecipeError(f"the option {text!r}; expected a text name=value")
        name, equals, value = (word.strip() for word in text.partition("="))
        if not equals or not name or name in result:
            wrong = "is given twice; give it once" if name in result else "has no name or no value"
            raise RecipeError(
                f"the option {text!r} {wrong}; write name=value, such as vocabulary=pad128"
            )
        result[name] = value
    return result
