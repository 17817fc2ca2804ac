"""Weights of a training checkpoint: what a model computes with, without the state of its training.

1. Optimizer state and other tensors that a trainer saves, such as random states, are left out, and
   so are values and items.
2. What a wrapper of modules has in names goes: `module.`, `_orig_mod.`, `_fsdp_wrapped_module.`,
   `_checkpoint_wrapped_module.`, and `base_model.model.` of PEFT.
3. Of a module that PEFT trains as a whole (`modules_to_save`) the trained copy is taken. Weights
   with adapters beside them that are not merged are an error.

All that is left out is said.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.torch_files.optimizer_states import MASTER
from reshard.checkpoint.naming.selection import by_new_names
from reshard.checkpoint.training.model_sets import bare_name, is_beside_model
from reshard.checkpoint.training.state import find_training_state, is_optimizer_state
from reshard.errors import CheckpointError
from reshard.text import count_text

_PEFT = re.compile(r"(^|\.)base_model\.model\.")
_ADAPTER = re.compile(r"\.(lora_[A-Za-z_]+|hada_\w+|lokr_\w+|oft_\w+|ia3_l|boft_\w+)(\.|$)")
_SAVED_MODULE = re.compile(r"\.modules_to_save\.[^.]+\.")
_ORIGINAL_MODULE = ".original_module."
_EXTRA_STATE = "_extra_state"


def take_weights(checkpoint: Checkpoint) -> Checkpoint:
    """The weights of a training checkpoint, without wrappers in their names.

    Raises:
        CheckpointError: no weights, adapters that are not merged into them, or weights of Flax.
        RecipeError: two weights of one name.
    """
    state = find_training_state(checkpoint)
    weights = [name for name in checkpoint.tensors if not is_beside_model(name)]
    optimizer: list[str] = []
    alone: dict[str, str] = {}
    if state is not None:
        placed = {*state.weights.values()}
        optimizer = [name for name, found in state.tensors.items() if found.key]
        optimizer += [name for name, _ in state.unplaced]
        weights = [name for name in checkpoint.tensors if name in placed]
        # Stage 3 of ZeRO has no other weights than those of 32 bits.
        alone = {
            kept[MASTER]: parameter
            for parameter, kept in state.optimizer.items()
            if MASTER in kept and parameter not in state.weights
        }
        weights += alone
        optimizer = [name for name in optimizer if name not in alone]
    adapters = [name for name in weights if _ADAPTER.search(name)]
    if adapters:
        raise CheckpointError(
            f"{checkpoint.folder} has {count_text(len(adapters), 'tensor')} of adapters beside the "
            f"weights, such as {adapters[0]!r}; merge them into the weights first "
            "(`merge_and_unload` of peft), or leave them out with --exclude"
        )
    kernels = [name for name in weights if name.endswith(".kernel")]
    if kernels:
        raise CheckpointError(
            f"{checkpoint.folder} has {count_text(len(kernels), 'weight')} of Flax's modules, such "
            f"as {kernels[0]!r}: they have inputs first, and those of PyTorch last; write "
            "the weights from the program that has the model, by the names of the architecture"
        )
    saved = {_SAVED_MODULE.sub(".", name) for name in weights if _SAVED_MODULE.search(name)}
    # Unreadable optimizer state is left out as the rest of it is.
    inside = {name for name in checkpoint.unreadable if is_optimizer_state(name)}
    unreadable = {n: why for n, why in checkpoint.unreadable.items() if n not in inside}
    dataclasses.replace(checkpoint, unreadable=unreadable).expect_readable()
    new: dict[str, str | None] = dict.fromkeys(
        (*checkpoint.tensors, *checkpoint.items, *checkpoint.values), None
    )
    for name in weights:
        is_kept = not name.rpartition(".")[2].startswith(_EXTRA_STATE)
        if _ORIGINAL_MODULE in name and name.replace(_ORIGINAL_MODULE, ".") in saved:
            is_kept = False
        new[name] = model_name(alone.get(name, name)) if is_kept else None
    if not any(new[name] is not None for name in weights):
        what = "optimizer state and no weights" if optimizer else "no weights"
        raise CheckpointError(
            f"{checkpoint.folder} has {what}; name the checkpoint that the weights were saved to"
        )
    return dataclasses.replace(
        by_new_names(checkpoint, new),
        attributes={},
        unread=(),
        unreadable={},
        paths={},
        notes=(*checkpoint.notes, *_describe_rest(checkpoint, new, optimizer)),
    )


def model_name(name: str) -> str:
    """A weight's name without what wrappers of modules have in it.

    >>> model_name("module._orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.w")
    'model.layers.0.mlp.w'
    >>> model_name("base_model.model.lm_head.modules_to_save.default.weight")
    'lm_head.weight'
    """
    name = _PEFT.sub(r"\1", bare_name(name), count=1)
    name = _SAVED_MODULE.sub(".", name).replace(_ORIGINAL_MODULE, ".")
    return name.replace(".base_layer.", ".")


def _describe_rest(
    checkpoint: Checkpoint, new: dict[str, str | None], optimizer: Sequence[str]
) -> list[str]:
    """What of a training checkpoint no model folder has."""
    known = {*optimizer}
    others = [name for name in checkpoint.tensors if new[name] is None and name not in known]
    beside = [*checkpoint.items, *checkpoint.values, *checkpoint.attributes]
    beside += [*dict(checkpoint.unread), *checkpoint.unreadable]
    parts = [
        f"{count_text(len(names), one)}{many} (first: {names[0]})"
        for one, many, names in (
            ("tensor", " of optimizer state", optimizer),
            ("other tensor", "", others),
            ("value", "", beside),
        )
        if names
    ]
    if not parts:
        return []
    return [f"left out, since a model folder has weights alone: {', '.join(parts)}"]
