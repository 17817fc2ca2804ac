"""Checks of a target's tensors against the model class that its config.json names.

Two judges know the tensors of a class:

1. The records of public classes (`records`). They need no other program, and take a millisecond.
2. The class itself, where transformers is installed (`reshard.torch.transformers`). Its import
   takes seconds, so it is asked only where the records lack the class or find a difference.

A difference is an error unless the user allows it by name: `incomplete` for missing tensors,
`unknown` for additional tensors. Tensors of another shape cannot be allowed, since no class loads
them. If neither judge knows the architecture, nothing is checked, and a note reports that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reshard.checkpoint.architectures.records import (
    Shape,
    TensorDifferences,
    find_recorded_differences,
)
from reshard.dtypes import DType
from reshard.errors import CheckpointError, MissingExtraError, RunError, UncomputableError
from reshard.recipes.quantization import find_quantized, quantization_config
from reshard.text import count_text, first_text

_MAX_LISTED = 4
# An internal value of `allow` for tensors of another shape; users allow `unknown`.
_SHAPES = "shapes"
_CLASS_JUDGE = "reshard.torch.transformers"
# Buffers that classes of earlier versions saved, and that no class loads any more.
_OLD_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias|position_ids|"
    r"num_batches_tracked)$"
)
# Llama, GPT-2, BLOOM and GPT-NeoX name their embeddings and output layers so.
_VOCABULARY = re.compile(
    r"(^|\.)(embed_tokens|lm_head|wte|word_embeddings|embed_in|embed_out)(\.weight|\.bias)?$"
)
# Config keys that count layers that predict further tokens, which are stored after the last.
_EXTRA_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")


def check_architecture(
    shapes: Mapping[str, Shape],
    types: Mapping[str, DType],
    config: Mapping[str, Any],
    folder: Path,
    *,
    allow: Iterable[str] = (),
    left_out: Collection[str] = (),
) -> tuple[str, ...]:
    """Compare tensors with those that the class of a config.json loads; reads no tensor data.

    Args:
        shapes: the shapes of the tensors that will be written, by the names in their files.
        types: the element types of these tensors.
        config: the content of config.json.
        folder: the folder of the source, for messages.
        allow: `incomplete`, `unknown`.
        left_out: names that the user left out on purpose.

    Returns:
        Notes for the user: which judge checked the tensors, and which differences were allowed.

    Raises:
        CheckpointError: missing, unknown or misshapen tensors that are not allowed.
    """
    try:
        shapes = _find_logical_shapes(shapes, types, config)
    except UncomputableError as error:
        return (f"the tensors were not checked against an architecture: {error}",)
    differences = _find_differences(config, shapes)
    if isinstance(differences, str):
        return (differences,)
    differences = _without_expected(differences, config, left_out)
    refused = _list_refused(differences, {*allow})
    if refused:
        raise CheckpointError(_describe_refusal(differences, refused, folder, config))
    return _describe_accepted(differences, len(shapes))


def check_sharded_model(
    shapes: Mapping[str, Shape],
    types: Mapping[str, DType],
    config: Mapping[str, Any],
    folder: Path,
    *,
    allow: Iterable[str] = (),
    left_out: Collection[str] = (),
    is_meant: Callable[[str], bool] = lambda name: False,
) -> tuple[str, ...]:
    """Compare the tensors that a recipe shards with those of the architecture of a config.json.

    The target does not have to be loaded by a certain program, so this check is less strict than
    `check_architecture`: the record of the class suffices even if some of its rows are open, rows
    that pad the vocabulary for ranks are accepted, and if config.json does not name a class, any
    class of its model type will do. transformers is imported only before a refusal.

    Args:
        shapes: the shapes of the tensors that will be written, by their names in the recipe.
        types: the element types of these tensors.
        config, folder, left_out: as in `check_architecture`.
        allow: `incomplete`; `unknown`, which allows tensors of another shape as well.
        is_meant: whether the user named a tensor, so that it may be unknown to the class.

    Returns:
        Notes for the user: which judge checked the tensors, and which differences were allowed.

    Raises:
        CheckpointError: missing, unknown or misshapen tensors that are not allowed.
    """
    allowed = {*allow}
    if "unknown" in allowed:
        allowed.add(_SHAPES)
    try:
        shapes = _find_logical_shapes(shapes, types, config)
    except UncomputableError as error:
        return (f"the tensors were not checked against an architecture: {error}",)
    recorded = find_recorded_differences(config, shapes, any_class=not config.get("architectures"))
    if recorded is None:
        return (_describe_unjudged(config, "--for hf asks the class of transformers"),)

    def without_expected(differences: TensorDifferences) -> TensorDifferences:
        differences = _without_padding(_without_expected(differences, config, left_out), config)
        unknown = tuple(name for name in differences.unknown if not is_meant(name))
        return differences.replace(unknown=unknown)

    differences = without_expected(recorded[0])
    if _list_refused(differences, allowed):
        judged = _ask_class(config, shapes)
        if not isinstance(judged, str):
            differences = without_expected(judged)
        refused = _list_refused(differences, allowed)
        if refused:
            text = _describe_refusal(differences, refused, folder, config)
            accepts_shapes = differences.misshapen and not differences.unknown
            raise CheckpointError(f"{text}, or --allow unknown" if accepts_shapes else text)
    return _describe_accepted(differences, len(shapes))


def count_differences(
    shapes: Mapping[str, Shape], types: Mapping[str, DType], config: Mapping[str, Any]
) -> int:
    """Return the number of tensors by which a model differs from its record; 0 without a record."""
    try:
        recorded = find_recorded_differences(config, _find_logical_shapes(shapes, types, config))
    except UncomputableError:
        return 0
    if recorded is None:
        return 0
    differences, _ = recorded
    return len(differences.missing) + len(differences.unknown) + len(differences.misshapen)


def _find_differences(
    config: Mapping[str, Any], shapes: Mapping[str, Shape]
) -> TensorDifferences | str:
    """Return the differences found by the best judge, or a note if no judge knows the class."""
    result = find_recorded_differences(config, shapes)
    recorded, is_exact = (None, False) if result is None else result
    if recorded is not None and is_exact and not recorded:
        return recorded
    judged = _ask_class(config, shapes)
    if not isinstance(judged, str):
        return judged
    return recorded if recorded is not None else _describe_unjudged(config, judged)


def find_padded_vocabulary(
    shapes: Mapping[str, Shape], config: Mapping[str, Any]
) -> dict[str, int]:
    """Return the rows of config.json's vocabulary, by the names of tensors that have more rows.

    >>> find_padded_vocabulary({"lm_head.weight": (512, 8)}, {"vocab_size": 500})
    {'lm_head.weight': 500}
    """
    texts = config.get("text_config")
    size = config.get("vocab_size", texts.get("vocab_size") if isinstance(texts, dict) else None)
    if type(size) is not int or size < 1:
        return {}
    return {
        name: size
        for name, shape in shapes.items()
        if _VOCABULARY.search(name) and len(shape) in (1, 2) and shape[0] > size
    }


def _ask_class(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> TensorDifferences | str:
    """Return the differences from the class of transformers, or why it cannot be asked."""
    if find_spec("transformers") is None or find_spec("torch") is None:
        return "transformers is not installed"
    try:
        differences: TensorDifferences | None
        differences = import_module(_CLASS_JUDGE).find_class_differences(config, shapes)
    except (MissingExtraError, RunError) as error:
        return str(error)
    return "transformers has no class for it" if differences is None else differences


def _describe_unjudged(config: Mapping[str, Any], reason: str) -> str:
    named = ", ".join(map(str, config.get("architectures") or ())) or "none"
    return (
        f"the tensors were not checked against an architecture: no record is of the model type "
        f"{config.get('model_type')!r} with the class {named}, and {reason}; the class itself, in "
        "an environment with a transformers that has it, is what they could be checked against"
    )


def _find_logical_shapes(
    shapes: Mapping[str, Shape], types: Mapping[str, DType], config: Mapping[str, Any]
) -> Mapping[str, Shape]:
    """Return the shapes of tensors, with the logical weight in place of each quantised weight's."""
    if not quantization_config(config):
        return shapes
    itemsizes = {name: types[name].itemsize_bytes for name in shapes}
    weights = find_quantized(shapes, config, itemsizes)
    members = {name for weight in weights.values() for name in weight.members}
    plain = {name: shape for name, shape in shapes.items() if name not in members}
    return plain | {name: weight.shape for name, weight in weights.items()}


def _without_expected(
    differences: TensorDifferences, config: Mapping[str, Any], left_out: Collection[str]
) -> TensorDifferences:
    """Return differences, except tensors that the user left out, and known extras."""
    extra = _extra_layers(config)
    ignored = [
        name
        for name in differences.unknown
        if _OLD_BUFFERS.search(name) or any(name.startswith(prefix) for prefix in extra)
    ]
    return differences.replace(
        missing=tuple(name for name in differences.missing if name[0] not in left_out),
        unknown=tuple(name for name in differences.unknown if name not in ignored),
        ignored=(*differences.ignored, *ignored),
    )


def _without_padding(
    differences: TensorDifferences, config: Mapping[str, Any]
) -> TensorDifferences:
    """Return differences without rows that pad the vocabulary for ranks."""
    padded = find_padded_vocabulary(
        {name: shape for name, shape, _ in differences.misshapen}, config
    )
    misshapen = tuple(
        (name, shape, expected)
        for name, shape, expected in differences.misshapen
        # Padding adds rows only.
        if name not in padded or shape[1:] != expected[1:]
    )
    return differences.replace(misshapen=misshapen)


def _extra_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of the names of layers that predict further tokens."""
    count = max((config.get(key) or 0 for key in _EXTRA_LAYERS), default=0)
    layers = config.get("num_hidden_layers")
    if not isinstance(count, int) or not isinstance(layers, int) or count < 1:
        return ()
    return ("mtp.", "model.mtp.", *(f"model.layers.{layers + n}." for n in range(count)))


def _list_refused(differences: TensorDifferences, allow: Collection[str]) -> list[str]:
    """Return a text for each kind of difference that is not allowed."""
    refused = []
    if differences.missing and "incomplete" not in allow:
        refused.append(_describe_missing(differences))
    if differences.unknown and "unknown" not in allow:
        refused.append(_describe_unknown(differences))
    if differences.misshapen and _SHAPES not in allow:
        refused.append(_describe_misshapen(differences))
    return refused


def _describe_accepted(differences: TensorDifferences, count: int) -> tuple[str, ...]:
    """Describe which tensors the judge loads, and which differences were allowed."""
    differing = len(differences.unknown) + len(differences.ignored) + len(differences.misshapen)
    notes = [
        f"names and shapes checked: {differences.judge} loads "
        f"{count_text(count - differing, 'tensor')}"
    ]
    if differences.ignored:
        notes[0] += (
            f" and ignores {len(differences.ignored)} others (first: {differences.ignored[0]})"
        )
    if differences.missing:
        notes.append(f"allowed as incomplete: {_describe_missing(differences)}")
    if differences.unknown:
        notes.append(f"allowed as unknown: {_describe_unknown(differences)}")
    if differences.misshapen:
        notes.append(f"allowed as unknown: {_describe_misshapen(differences)}")
    return tuple(notes)


def _describe_missing(differences: TensorDifferences) -> str:
    shown = [
        name if shape is None else f"{name} {list(shape)}" for name, shape in differences.missing
    ]
    return f"{count_text(len(shown), 'tensor')} missing: {_list_first(shown)}"


def _describe_unknown(differences: TensorDifferences) -> str:
    names = differences.unknown
    return f"{count_text(len(names), 'tensor')} unknown: {_list_first(names)}"


def _describe_misshapen(differences: TensorDifferences) -> str:
    shown = [
        f"{name} {list(actual)}, expected {list(expected)}"
        for name, actual, expected in differences.misshapen
    ]
    return f"{count_text(len(shown), 'tensor')} of another shape: {_list_first(shown)}"


def _list_first(texts: Sequence[str]) -> str:
    return first_text(texts, _MAX_LISTED)


def _describe_refusal(
    differences: TensorDifferences, refused: Sequence[str], folder: Path, config: Mapping[str, Any]
) -> str:
    """Describe the differences, the judge that found them, and the remedies."""
    ways = []
    if differences.missing and differences.unknown:
        ways.append("give the names of the class with --rename or --source-names")
    if differences.missing:
        ways.append("complete the source, or write it incomplete: --allow incomplete")
    if differences.unknown:
        ways.append("leave tensors out with --exclude, or write them: --allow unknown")
    if differences.misshapen:
        ways.append("name the config.json of this model")
    return (
        f"the tensors of {folder} are not those that {differences.judge} loads for the model type "
        f"{config.get('model_type')!r}. {'; '.join(refused)}. Nothing was written; "
        f"{'; '.join(ways)}"
    )
