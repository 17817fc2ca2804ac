"""The part of a source that is taken: some of its tensors, by the names they shall have.

Names are told as `TensorSelection` says. Optimizer state follows its parameter: where a `rename` is
for a weight, and none for the state itself, the state has the parameter's new name in its own, and
so have the groups of the optimizer.

::

    rename: model.layers.*.w1=model.layers.*.gate

    model.layers.0.w1                  model.layers.0.gate
    optim.state.layers.0.w1.exp_avg    optim.state.layers.0.gate.exp_avg
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any

from reshard.checkpoint.contents import CHECK_COPIES, Checkpoint
from reshard.checkpoint.conversion.engines.states import as_model, find_layout
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.checkpoint.naming.selection import TensorSelection, by_new_names, find_new_names
from reshard.checkpoint.options import ConversionRequest
from reshard.checkpoint.training.model_sets import bare_name
from reshard.checkpoint.training.state import TrainingState, find_training_state
from reshard.mesh import DeviceMesh
from reshard.recipes.engine_layouts import EngineLayout
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule
from reshard.text import count_text

_GROUPS = "param_groups"


def select(
    checkpoint: Checkpoint,
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    strip_prefix: Iterable[str] = (),
    rename: Iterable[str] = (),
    select: str | None = None,
) -> Checkpoint:
    """The checkpoint with some of its tensors, items and values, by the names they shall have.

    No byte is copied or read.

    Args:
        checkpoint: from `open`.
        include: globs on names; all are taken without any.
        exclude: globs on names that are left out.
        strip_prefix: prefixes that names lose, in this order.
        rename: texts `pattern=name`, such as `layers.*.w1=model.layers.*.gate`.
        select: the prefix of the only names that are taken, which they lose first.

    Raises:
        UsageError: a pattern that cannot be read, or that matches nothing; nothing left.
        RecipeError: two things of one name.
    """
    return select_from(checkpoint, TensorSelection(include, exclude, strip_prefix, rename, select))


def open_selected(
    path: str | os.PathLike[str],
    *,
    select: str | None = None,
    mesh: DeviceMesh | str | None = None,
    rules: Iterable[Rule | str] = (),
    recipe: str | os.PathLike[str] | Recipe | None = None,
    check_copies: str = CHECK_COPIES[0],
    allow: Iterable[str] = (),
) -> Checkpoint:
    """Describe the checkpoint at `path`: a folder, a safetensors file, or an index file.

    Only headers are read. Everything that can be wrong without reading the tensors is found.

    Args:
        path: where it is.
        select: the prefix of a model among several, such as `ema_state_dict`: the checkpoint has
            its tensors alone, without the prefix.
        mesh: of the ranks that wrote it, where their files have plain tensors and nothing says how
            these are cut: `"tp=2"`.
        rules: how that mesh cuts them: `["*.weight=tp, -", "*=..."]`.
        recipe: the same by a recipe's rules: a name, a file, or `auto` by config.json.
        check_copies, allow: as in `open_checkpoint`, of copies that several ranks hold.

    Raises:
        UsageError: what is no path; a prefix that no tensor has.
        CheckpointError: nothing there, or nothing that is a checkpoint.
        FormatError: a file that is damaged, or not of its format.
        CoverageError: shards that do not make whole tensors.
    """
    opened = open_checkpoint(
        path, mesh=mesh, rules=rules, recipe=recipe, check_copies=check_copies, allow=allow
    )
    return select_from(opened, TensorSelection(select=select))


def select_from(
    checkpoint: Checkpoint, selection: TensorSelection, *, is_expected: bool = True
) -> Checkpoint:
    """What a selection takes of a checkpoint.

    Args:
        checkpoint: of which things are taken.
        selection: which, and by which names.
        is_expected: whether each of its patterns must match something, and something be left.

    Raises:
        UsageError: a pattern that matches nothing; nothing left.
        RecipeError: two things of one name.
    """
    if not selection:
        return checkpoint
    new = find_new_names(checkpoint, selection, is_expected=is_expected)
    values = checkpoint.values
    if selection.rename:
        moved = _follow_parameters(checkpoint, selection, new)
        values = {name: _rename_groups(name, value, moved) for name, value in values.items()}
    notes = checkpoint.notes
    dropped = [name for name in checkpoint.tensors if new[name] is None]
    if dropped:
        notes += (
            f"{count_text(len(dropped), 'tensor')} left out by {_name_options(selection)} "
            f"(first: {dropped[0]})",
        )
    return by_new_names(dataclasses.replace(checkpoint, values=values, notes=notes), new)


def _name_options(selection: TensorSelection) -> str:
    """Return the options that leave tensors out, for a note."""
    if selection.select is None:
        return "--include and --exclude"
    others = selection.include or selection.exclude
    return f"--select {selection.select}" + ", --include and --exclude" * bool(others)


def take_source(request: ConversionRequest, checkpoint: Checkpoint) -> Checkpoint:
    """What a request takes of a checkpoint: of what an engine's ranks hold, the model's tensors.

    Raises:
        RecipeError: another layout than that of the ranks; two things of one name.
        UsageError: a pattern that matches nothing; nothing left.
    """
    layout = request.source_layout
    if layout is None and request.target_format.name != checkpoint.format:
        layout = find_layout(checkpoint)
    if isinstance(layout, EngineLayout):
        checkpoint = as_model(checkpoint, layout)
    return select_from(checkpoint, request.selection)


def _follow_parameters(
    checkpoint: Checkpoint, selection: TensorSelection, new: dict[str, str | None]
) -> dict[str, str]:
    """The new names of parameters, by those that optimizer state has them under.

    They are put into `new` for what is not renamed by a pattern of its own.
    """
    state = find_training_state(checkpoint)
    if state is None:
        return {}
    moved = {}
    for parameter, name in state.weights.items():
        stripped = selection.strip(name)
        renamed = selection.renamed(stripped)
        if renamed is not None and renamed != stripped:
            moved[parameter] = _find_parameter(stripped, renamed, state)
    for name, (parameter, key) in state.tensors.items():
        taken = new[name]
        if key and parameter in moved and taken == selection.strip(name):
            new[name] = _replace_parameter(taken, parameter, moved[parameter])
    # Items and values of groups may have a parameter in their names.
    for name in (*checkpoint.items, *checkpoint.values):
        taken = new[name]
        begin, found, rest = (taken or "").partition(f"{_GROUPS}.")
        if found and taken == selection.strip(name):
            own = rest.rpartition(".")[0]
            if bare_name(own) in moved:
                new[name] = begin + found + moved[bare_name(own)] + rest[len(own) :]
    return moved


def _find_parameter(weight: str, renamed: str, state: TrainingState) -> str:
    """The new name of the parameter whose weight `weight` becomes `renamed`."""
    for prefix in sorted(state.weight_prefixes, key=len, reverse=True):
        if prefix and weight.startswith(prefix) and renamed.startswith(prefix):
            return renamed.removeprefix(prefix)
    return renamed


def _replace_parameter(name: str, parameter: str, moved: str) -> str:
    """The name of optimizer state with another parameter in it.

    >>> _replace_parameter("optim.state.a.w.exp_avg", "a.w", "b")
    'optim.state.b.exp_avg'
    """
    at = name.rfind(f"state.{parameter}.")
    if at < 0:
        return name
    at += len("state.")
    return name[:at] + moved + name[at + len(parameter) :]


def _rename_groups(name: str, value: Any, moved: Mapping[str, str]) -> Any:
    """The groups of an optimizer with the new names of its parameters."""
    if not moved or name.rpartition(".")[2] != _GROUPS or not isinstance(value, list | tuple):
        return value
    groups = []
    for group in value:
        names = group.get("params") if isinstance(group, dict) else None
        if isinstance(names, list | tuple):
            found = [
                moved.get(bare_name(one), one) if isinstance(one, str) else one for one in names
            ]
            group = {**group, "params": found}
        groups.append(group)
    return groups
