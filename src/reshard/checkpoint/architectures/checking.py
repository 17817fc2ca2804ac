"""Checks of a target's tensors against the model class that its config.json names.

Two judges know classes:

1. the records of public classes (`records`), which need no other program and a millisecond;
2. the class itself, where transformers is installed (`reshard.torch.model_classes`). It is asked
   where the records lack the class or find a difference, since its import takes seconds.

A difference is an error unless the user allows it by name: `incomplete` for missing tensors,
`unknown` for others. Tensors of another shape cannot be allowed, since no class loads them. An
architecture that no judge knows is not checked, and a note says so.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reshard.checkpoint.architectures.differences import Shape, TensorDifferences
from reshard.checkpoint.architectures.records import find_recorded_differences
from reshard.checkpoint.contents import StoredTensor
from reshard.errors import CheckpointError, MissingExtraError, RunError, UncomputableError
from reshard.recipes.quantization.weights import find_quantized, quantization_config
from reshard.text.quantities import count_text

_MAX_LISTED = 4
_CLASS_JUDGE = "reshard.torch.model_classes"
# Buffers that classes of earlier versions saved, and that no class loads any more.
_OLD_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias|position_ids|"
    r"num_batches_tracked)$"
)
# Config keys that count layers that predict further tokens, which are stored after the last.
_EXTRA_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")


def check_architecture(
    tensors: Mapping[str, StoredTensor],
    config: Mapping[str, Any],
    folder: Path,
    *,
    allow: Iterable[str] = (),
    left_out: Collection[str] = (),
) -> tuple[str, ...]:
    """Compare tensors with those that the class of a config.json loads; reads no tensor data.

    Args:
        tensors: that will be written, by the names in their files.
        config: the content of config.json.
        folder: of the source, for messages.
        allow: `incomplete`, `unknown`.
        left_out: names that the user left out on purpose.

    Returns:
        Notes for the user: by what the tensors were checked, and which differences were allowed.

    Raises:
        CheckpointError: missing, unknown or misshapen tensors that are not allowed.
    """
    try:
        shapes = _find_logical_shapes(tensors, config)
    except UncomputableError as error:
        return (f"the tensors were not checked against an architecture: {error}",)
    found = _find_differences(config, shapes)
    if isinstance(found, str):
        return (found,)
    found = _without_expected(found, config, left_out)
    refused = _list_refused(found, {*allow})
    if refused:
        raise CheckpointError(_describe_refusal(found, refused, folder, config))
    loaded = count_text(len(shapes) - len(found.unknown) - len(found.ignored), "tensor")
    notes = [f"names and shapes checked: {found.judge} loads {loaded}"]
    if found.ignored:
        notes[0] += f" and ignores {len(found.ignored)} others (first: {found.ignored[0]})"
    if found.missing:
        notes.append(f"allowed as incomplete: {_describe_missing(found)}")
    if found.unknown:
        notes.append(f"allowed as unknown: {_describe_unknown(found)}")
    return tuple(notes)


def note_recorded_differences(
    tensors: Mapping[str, StoredTensor],
    config: Mapping[str, Any],
    folder: Path,
    *,
    left_out: Collection[str] = (),
) -> tuple[str, ...]:
    """Return a note of the differences from the record of a class; none where there are none."""
    try:
        shapes = _find_logical_shapes(tensors, config)
    except UncomputableError:
        return ()
    recorded = find_recorded_differences(config, shapes)
    if recorded is None:
        return ()
    found = _without_expected(recorded.differences, config, left_out)
    refused = _list_refused(found, ())
    if not refused:
        return ()
    return (
        f"the tensors of {folder} are not those of {found.judge}, which no loader of the whole "
        f"model accepts: {'; '.join(refused)}",
    )


def find_doubled_prefix(names: Iterable[str]) -> str:
    """Return a trainer's word in front of all names, which some names have twice; `""` for none.

    >>> find_doubled_prefix(["model.model.norm.weight", "model.lm_head.weight"])
    'model.'
    >>> find_doubled_prefix(["model.norm.weight", "lm_head.weight"])
    ''
    """
    names = list(names)
    front = names[0].partition(".")[0] + "." if names else ""
    is_doubled = any(name.startswith(front * 2) for name in names)
    return front if is_doubled and all(name.startswith(front) for name in names) else ""


def _find_differences(
    config: Mapping[str, Any], shapes: Mapping[str, Shape]
) -> TensorDifferences | str:
    """Return the differences by the best judge that knows the class, or a note that none does."""
    found = find_recorded_differences(config, shapes)
    recorded = None if found is None else found.differences
    if found is not None and found.is_exact and not recorded:
        return found.differences
    reason = "transformers is not installed"
    if find_spec("transformers") is not None and find_spec("torch") is not None:
        try:
            own = import_module(_CLASS_JUDGE).find_class_differences(config, shapes)
        except (MissingExtraError, RunError) as error:
            own, reason = None, str(error)
        else:
            reason = "transformers has no class for it"
        if own is not None:
            return own  # type: ignore[no-any-return]
    if recorded is not None:
        return recorded
    named = ", ".join(map(str, config.get("architectures") or ())) or "none"
    return (
        f"the tensors were not checked against an architecture: no record is of the model type "
        f"{config.get('model_type')!r} with the class {named}, and {reason}; the class itself, in "
        "an environment with a transformers that has it, is what they could be checked against"
    )


def _find_logical_shapes(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> dict[str, Shape]:
    """Return the shapes of tensors, of quantised weights those of the weights themselves."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if not quantization_config(config):
        return shapes
    itemsizes = {name: tensor.dtype.itemsize_bytes for name, tensor in tensors.items()}
    weights = find_quantized(shapes, config, itemsizes)
    members = {name for weight in weights.values() for name in weight.members}
    plain = {name: shape for name, shape in shapes.items() if name not in members}
    return plain | {name: weight.shape for name, weight in weights.items()}


def _without_expected(
    found: TensorDifferences, config: Mapping[str, Any], left_out: Collection[str]
) -> TensorDifferences:
    """Return differences without those that are right: left out by the user, or known extras."""
    extra = _extra_layers(config)
    ignored = [
        name
        for name in found.unknown
        if _OLD_BUFFERS.search(name) or any(name.startswith(prefix) for prefix in extra)
    ]
    return dataclasses.replace(
        found,
        missing=tuple(one for one in found.missing if one[0] not in left_out),
        unknown=tuple(name for name in found.unknown if name not in ignored),
        ignored=(*found.ignored, *ignored),
    )


def _extra_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what names of layers that predict further tokens begin with."""
    count = max((config.get(key) or 0 for key in _EXTRA_LAYERS), default=0)
    layers = config.get("num_hidden_layers")
    if not isinstance(count, int) or not isinstance(layers, int) or count < 1:
        return ()
    return ("mtp.", "model.mtp.", *(f"model.layers.{layers + n}." for n in range(count)))


def _list_refused(found: TensorDifferences, allow: Collection[str]) -> list[str]:
    """Return what is wrong and not allowed, each as text."""
    refused = []
    if found.missing and "incomplete" not in allow:
        refused.append(_describe_missing(found))
    if found.unknown and "unknown" not in allow:
        refused.append(_describe_unknown(found))
    if found.misshapen:
        shown = [
            f"{name} {list(own)}, expected {list(expected)}"
            for name, own, expected in found.misshapen
        ]
        count = count_text(len(found.misshapen), "tensor")
        refused.append(f"{count} of another shape: {_list_first(shown)}")
    return refused


def _describe_missing(found: TensorDifferences) -> str:
    shown = [name if shape is None else f"{name} {list(shape)}" for name, shape in found.missing]
    return f"{count_text(len(shown), 'tensor')} missing: {_list_first(shown)}"


def _describe_unknown(found: TensorDifferences) -> str:
    return f"{count_text(len(found.unknown), 'tensor')} unknown: {_list_first(found.unknown)}"


def _list_first(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MAX_LISTED} more" if len(texts) > _MAX_LISTED else ""
    return ", ".join(texts[:_MAX_LISTED]) + more


def _describe_refusal(
    found: TensorDifferences, refused: Sequence[str], folder: Path, config: Mapping[str, Any]
) -> str:
    """Describe what is wrong, by whose judgement, and what to do about it."""
    ways = []
    if found.missing and found.unknown:
        ways.append("give the names of the class with --rename or --source-names")
    if found.missing:
        ways.append("complete the source, or write it incomplete: --allow incomplete")
    if found.unknown:
        ways.append("leave tensors out with --exclude, or write them: --allow unknown")
    if found.misshapen:
        ways.append("name the config.json of this model")
    return (
        f"the tensors of {folder} are not those that {found.judge} loads for the model type "
        f"{config.get('model_type')!r}. {'; '.join(refused)}. Nothing was written; "
        f"{'; '.join(ways)}"
    )
