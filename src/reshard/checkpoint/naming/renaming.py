"""Translating a checkpoint to another program's names, with parameters fused or split.

Programs have different names for the tensors of the same model, and fuse some of them into a single
parameter. Translating does not copy anything: a renamed tensor is bound to the same bytes of the
same files (`reshard.checkpoint.blocks.fusing`).

A tensor that is only renamed keeps its digest. The blocks of a fused parameter differ from those of
its members, so there is no digest to compare, and a note reports that.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.checkpoint.blocks.fusing import fuse_members, split_into_members
from reshard.checkpoint.contents import Checkpoint, StoredTensor, read_again
from reshard.checkpoint.training.state import find_training_state
from reshard.errors import RecipeError, UsageError
from reshard.recipes.naming import (
    Fusion,
    Meaning,
    compile_pattern,
    find_by_pattern,
    find_foreign_name,
)
from reshard.recipes.recipe import Recipe

# A convention of a recipe, or a table of names.
Names = str | Mapping[str, Meaning]

# The convention of checkpoints that keep all experts of a layer in a single tensor.
STACKED = "stacked"


# A text that identifies a table in journals, and the table from names to a recipe's names.
NameTable = tuple[str, Mapping[str, Meaning]]


def names_of(
    argument: str,
    names: Names | None,
    recipe: Recipe | None,
    config: Mapping[str, object] | None,
) -> NameTable | None:
    """Return the table of `names`, which were given as `argument`; None if `names` is None.

    Raises:
        UsageError: a convention without a recipe, or a value that is not a table.
        RecipeError: a convention unknown to the recipe, or a config without its numbers.
    """
    if names is None:
        return None
    if isinstance(names, str):
        if recipe is None:
            raise UsageError(
                f"{argument} {names!r} are those of a recipe; name one as well, or `auto`"
            )
        table, text = recipe.naming(names, config), f"{names} of {recipe.name}"
    elif isinstance(names, Mapping) and all(
        isinstance(key, str) and isinstance(entry, str | Fusion) for key, entry in names.items()
    ):
        table, text = dict(names), "a table"
    else:
        raise UsageError(
            f"{argument} {names!r}; give a convention of the recipe, such as 'megatron', or a "
            "table of names and Fusions"
        )
    import hashlib

    digest = hashlib.blake2b(repr(list(table.items())).encode(), digest_size=8).hexdigest()
    return f"{text} ({digest})", table


def find_stacked_names(
    checkpoint: Checkpoint, recipe: Recipe | None, config: Mapping[str, object] | None
) -> NameTable | None:
    """Return the recipe's table of stacked names if a checkpoint has any of them, or None.

    The experts of a model may be saved stacked (by transformers 5, on request) or separately (on
    the Hub); their names show which.

    Raises:
        RecipeError: a config without the numbers of experts.
    """
    patterns = recipe.names.get(STACKED, {}) if recipe is not None else {}
    if any(
        compile_pattern(pattern).fullmatch(name)
        for pattern in patterns
        for name in checkpoint.tensors
    ):
        return names_of("names", STACKED, recipe, config)
    return None


def in_recipe_names(checkpoint: Checkpoint, table: Mapping[str, Meaning]) -> Checkpoint:
    """Return the checkpoint in a recipe's names, with every fused parameter split into its members.

    Args:
        checkpoint: the checkpoint in the names of a convention.
        table: the recipe's name of each of these names (`Recipe.naming`). Other names stay.

    Raises:
        RecipeError: names that the table lacks, two tensors of the same name, or a fused
            parameter that cannot be split into its members.
    """
    new = _Tensors(checkpoint)
    for name, tensor in checkpoint.tensors.items():
        meaning = find_meaning(name, table)
        if meaning != name:
            before, after, parameter = "", "", name
        else:
            # Optimizer state, and weights with a prefix, have a parameter's name in theirs.
            before, after, parameter = new.take_apart(name)
            meaning = find_meaning(parameter, table)
        if isinstance(meaning, str):
            new.add(tensor.replace(name=f"{before}{meaning}{after}"), name)
        elif new.is_common(name):
            # Every member has the number of steps of the fused parameter.
            for called in meaning.tensors:
                new.add(tensor.replace(name=f"{before}{called}{after}"), name)
        else:
            new.expect_alike(name)
            for member in split_into_members(tensor, meaning):
                new.add(member.replace(name=f"{before}{member.name}{after}"), name)
    new.expect_change(table)
    return new.checkpoint()


def find_meaning(name: str, table: Mapping[str, Meaning]) -> Meaning:
    """Return the recipe's name for a name: of its exact entry, else of the first pattern."""
    return table[name] if name in table else find_by_pattern(name, table)


def in_names_of(
    checkpoint: Checkpoint, table: Mapping[str, Meaning]
) -> tuple[Checkpoint, dict[str, str], dict[str, Fusion]]:
    """Return the checkpoint in the names of a convention.

    Args:
        checkpoint: the checkpoint in a recipe's names.
        table: the recipe's name of each name of the convention; if the convention has several
            names for a tensor, the first is used. Other names stay.

    Returns:
        The checkpoint; the recipe's name of each of its tensors, or of the first member of a fused
        tensor; and the fusions, by name.

    Raises:
        RecipeError: names that the table lacks, two tensors of the same name, members that
            are missing or do not fit together.
    """
    new = _Tensors(checkpoint)
    fused: dict[str, Fusion] = {}
    for name, tensor in checkpoint.tensors.items():
        theirs, fusion = find_foreign_name(name, table) or _find_around(name, new, table)
        # A fused parameter is added when the first of its members is found.
        if fusion is None:
            new.add(tensor.replace(name=theirs), name)
        elif new.is_common(name):
            if theirs not in new.made_of:
                new.add(tensor.replace(name=theirs), name)
        elif fused.setdefault(theirs, fusion) != fusion:
            raise RecipeError(
                f"{theirs!r} would be fused of {list(fused[theirs].members)} and of "
                f"{list(fusion.members)}; correct the table of names"
            )
        elif theirs not in new.made_of:
            new.expect_alike(name)
            names = fusion.tensors
            members = [_find_member(checkpoint, theirs, name) for name in names]
            new.add(fuse_members(theirs, fusion, members), *names)
    new.expect_change(table)
    return new.checkpoint(), {name: sources[0] for name, sources in new.made_of.items()}, fused


def _find_around(
    name: str, tensors: _Tensors, table: Mapping[str, Meaning]
) -> tuple[str, Fusion | None]:
    """Return the convention's name of optimizer state, or of a weight with a prefix."""
    before, after, parameter = tensors.take_apart(name)
    foreign = find_foreign_name(parameter, table)
    if foreign is None:
        return name, None
    theirs, fusion = foreign
    if fusion is not None:
        members = tuple(f"{before}{member}{after}" for member in fusion.members)
        fusion = fusion.replace(members=members)
    return f"{before}{theirs}{after}", fusion


def _find_member(checkpoint: Checkpoint, fused: str, name: str) -> StoredTensor:
    if name not in checkpoint.tensors:
        raise RecipeError(
            f"{fused!r} is fused of tensors of which {checkpoint.folder} has no {name!r}; complete "
            "the checkpoint, or keep those names"
        )
    return checkpoint.tensors[name]


class _Tensors:
    """The tensors of a checkpoint by other names, and the old names of the parts of each."""

    def __init__(self, old: Checkpoint) -> None:
        self.old = old
        self.tensors: dict[str, StoredTensor] = {}
        self.made_of: dict[str, tuple[str, ...]] = {}
        self._state = find_training_state(old)

    def take_apart(self, name: str) -> tuple[str, str, str]:
        """Return the text before and after the parameter in a tensor's name, and the parameter."""
        if self._state is None or name not in self._state.tensors:
            return "", "", name
        before, after = self._state.around(name)
        parameter, _ = self._state.tensors[name]
        if not after and before == name:
            # The name has the number of the parameter instead of its name.
            raise RecipeError(
                f"{name!r} has a number for {parameter!r}: numbered optimizer state cannot be "
                "given other names, as fused parameters are counted otherwise. Convert it to names "
                "first (--training fsdp2 --format torch-dcp), or leave it out (--exclude "
                "'optimizer.*')"
            )
        return before, after, parameter

    def is_common(self, name: str) -> bool:
        """Return whether all members of a fused parameter share it, such as a number of steps."""
        entry = None if self._state is None else self._state.tensors.get(name)
        if self._state is None or entry is None or not entry[1]:
            return False
        own, weight = self.old.tensors[name].shape, self._state.weights.get(entry[0])
        return not own or (
            own == (1,) and weight is not None and self.old.tensors[weight].shape != own
        )

    def expect_alike(self, name: str) -> None:
        """Raise RecipeError for optimizer state whose shape is not its parameter's."""
        entry = None if self._state is None else self._state.tensors.get(name)
        weight = None
        if self._state is not None and entry is not None and entry[1]:
            weight = self._state.weights.get(entry[0])
        shape = self.old.tensors[name].shape
        if weight is not None and self.old.tensors[weight].shape != shape:
            raise RecipeError(
                f"{name!r} of shape {list(shape)} belongs to {weight!r} of shape "
                f"{list(self.old.tensors[weight].shape)}, which is fused: state of another shape "
                "cannot be told apart or put together; leave it out with --exclude, or keep the "
                "names"
            )

    def add(self, tensor: StoredTensor, *made_of: str) -> None:
        """Add a tensor. Raises RecipeError if its name is taken."""
        if tensor.name in self.made_of:
            raise RecipeError(
                f"{self.made_of[tensor.name][0]!r} and {made_of[0]!r} in {self.old.folder} would "
                f"both be {tensor.name!r}; correct the table of names"
            )
        self.tensors[tensor.name] = tensor
        self.made_of[tensor.name] = made_of

    @property
    def unchanged(self) -> list[str]:
        """The names of the tensors that did not change."""
        return [name for name, tensor in self.old.tensors.items() if self._is_kept(name, tensor)]

    def _is_kept(self, name: str, tensor: StoredTensor) -> bool:
        return name in self.tensors and self.tensors[name].binding == tensor.binding

    def expect_change(self, table: Mapping[str, Meaning]) -> None:
        """Raise RecipeError if there are tensors, and a table does not apply to any of them."""
        if table and self.tensors and len(self.unchanged) == len(self.old):
            raise RecipeError(
                f"no name in {self.old.folder}, such as {next(iter(self.tensors))!r}, is one that "
                f"the table of names knows, such as {next(iter(table))!r}; is the checkpoint in "
                "other names than specified?"
            )

    def checkpoint(self) -> Checkpoint:
        """Return the old checkpoint with these tensors."""
        old, changed = self.old, set[str]()
        for name, made_of in self.made_of.items():
            if self.tensors[name].binding == old.tensors[made_of[0]].binding:
                continue
            if self.tensors[name].binding.views:
                changed.update(made_of)
        notes = old.notes
        if self.unchanged:
            notes += (
                f"{len(self.unchanged)} tensors keep their names (first: {self.unchanged[0]})",
            )
        # Strided reads include the bytes between elements, so bytes may be read more than once.
        checksums = read_again(old.checksums, changed)
        unrenamed = {name for name in self.tensors if self.made_of[name] == (name,)} | {*old.items}
        paths = {name: path for name, path in old.paths.items() if name in unrenamed}
        new = old.replace(tensors=self.tensors, checksums=checksums, paths=paths, notes=notes)
        members = self._find_new_parameters()
        if self._state is None or all(
            new_names == {old: None} for old, new_names in members.items()
        ):
            return new
        from reshard.checkpoint.training.plain_state import rename_group_members

        return rename_group_members(new, self._state, members)

    def _find_new_parameters(self) -> dict[str, dict[str, None]]:
        """Return the new bare names of each parameter of the training state."""
        result: dict[str, dict[str, None]] = {}
        tensors = {} if self._state is None else self._state.tensors
        for name, made_of in self.made_of.items():
            for old in made_of:
                if self._state is None or old not in tensors:
                    continue
                before, after = self._state.around(old)
                if name.startswith(before) and name.endswith(after):
                    own = name.removeprefix(before).removesuffix(after)
                    result.setdefault(tensors[old][0], {})[own] = None
        return result
