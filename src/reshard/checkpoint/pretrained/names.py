"""Weights of a training checkpoint in the names of their architecture.

`take_weights` leaves out optimizer state and other tensors of a trainer, such as random states, and
removes the names of wrappers: `module.`, `_orig_mod.`, `_fsdp_wrapped_module.`,
`_checkpoint_wrapped_module.`, and `base_model.model.` of PEFT. For a module that PEFT trains as a
whole (`modules_to_save`) the trained copy is taken. Weights with separate adapters that are not
merged are an error.

`find_model_names` decides which prefix is the trainer's, over all names::

    model.model.layers.0.mlp.up_proj.weight      "model." of the trainer, and of the architecture
    model.lm_head.weight                         without "model.model." this would not fit

1. The candidates are prefixes that end with a dot, and that at least half of the names have.
2. The chosen prefix leaves the most names matched by the recipe for config.json's model type: by
   its rules, or by its names in another convention, such as Megatron's.
3. Among equals, the longest prefix that leaves the architecture's own prefix is chosen, then the
   longest prefix of words that trainers use. Otherwise an error lists the choices.

Without a recipe, the prefix is taken from the trainer's state: from the names of optimizer state,
or from the nested state dict.

`in_transformers_names` translates the names of Llama by Meta and torchtitan, whose attention has
another order of rows. transformers' rotary embedding rotates row `i` of a head with row
`i + head_dim / 2`; Meta's and torchtitan's rotate rows `2 i` and `2 i + 1`. Rows of queries and
keys are put in transformers' order by views on the same bytes. A plain `--rename` would result in
the same names and shapes, but in another model::

    torchtitan, Meta                           transformers
    layers.0.attention.wq.weight               model.layers.0.self_attn.q_proj.weight, other rows
    layers.0.attention.qkv_linear.wq.weight    the same, in later versions of torchtitan
    layers.0.feed_forward.w1.weight            model.layers.0.mlp.gate_proj.weight

A checkpoint is taken as torchtitan's if its format is torch.distributed.checkpoint, and as Meta's
if its files are `consolidated.*.pth` next to `params.json`. Only Llama's order of rows is known;
other models with such names are refused.

Sources: torchtitan's `models/llama3`, `llama/model.py` of Meta, `models/llama` of transformers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reshard.checkpoint.blocks.fusing import deinterleave_rows
from reshard.checkpoint.contents import Checkpoint, read_again
from reshard.checkpoint.formats.optimizer_states import MASTER
from reshard.checkpoint.formats.rank_files.plain_parts import PARAMETERS
from reshard.checkpoint.naming.renaming import STACKED
from reshard.checkpoint.naming.selection import by_new_names
from reshard.checkpoint.storage.filesystem import read_json_file
from reshard.checkpoint.training.model_sets import (
    TRAINER_WORDS,
    bare_name,
    expect_one_model,
    find_common_prefixes,
    find_model_sets,
    is_auxiliary,
)
from reshard.checkpoint.training.state import (
    find_training_state,
    is_optimizer_state,
    shapes_without_state,
)
from reshard.errors import CheckpointError, RecipeError
from reshard.recipes.naming import compile_pattern
from reshard.recipes.recipe import Recipe
from reshard.text import count_text

# The prefix of the base model in an architecture's other classes, by its model type, if it is not
# `model`. It is empty if names are the same in all classes.
_BASES = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "bloom", "falcon"), "transformer"),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), "roberta"),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), "backbone"),
    **{name: name for name in ("bert", "electra", "distilbert", "gpt_neox", "vit")},
    "deberta-v2": "deberta",
    **dict.fromkeys(("t5", "mt5", "umt5", "clip", "clip_text_model", "clip_vision_model"), ""),
    **dict.fromkeys(("siglip", "siglip_text_model", "siglip_vision_model"), ""),
    **dict.fromkeys(("siglip2", "siglip2_text_model", "siglip2_vision_model"), ""),
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_WORD = re.compile(r"[A-Za-z]\w*")


class ModelNames(NamedTuple):
    """The names of weights: the prefix that is not the architecture's, and the convention.

    `convention` is the recipe's convention that the rest of a name follows, such as `megatron`;
    None for the architecture's own names.
    """

    prefix: str
    convention: str | None = None
    notes: tuple[str, ...] = ()


def find_model_names(
    checkpoint: Checkpoint,
    recipe: Recipe | None,
    config: Mapping[str, Any],
    *,
    containers: Iterable[str] = (),
    keeps_prefix: bool = False,
) -> ModelNames:
    """Find the prefix and the convention of the weights' names.

    Args:
        checkpoint: a checkpoint of weights alone, without wrappers in their names.
        recipe: the recipe for config.json's model type, if any.
        config: the content of config.json.
        containers: prefixes that the trainer's own state shows.
        keeps_prefix: whether the user specified the prefix to remove.

    Raises:
        RecipeError: an ambiguous prefix.
    """
    # Names that differ in the numbers of layers and experts only are examined once.
    kinds = Counter(_NUMBER.sub("0", name) for name in checkpoint.tensors)
    prefixes = [""]
    if not keeps_prefix:
        prefixes += find_common_prefixes(kinds, 2)
    if recipe is None:
        return _take_as_saved(kinds, config, containers, keeps_prefix)
    is_own = _matcher_of(recipe)
    (most, best), convention = _find_best(kinds, prefixes, is_own), None
    for name, patterns in recipe.names.items():
        if name == STACKED:
            continue
        # A table may list only names that differ from the recipe's, such as fused parameters.
        is_either = _matches_either(_matches_any(patterns), is_own)
        matched, fitting = _find_best(kinds, prefixes, is_either)
        if matched > most:
            most, best, convention = matched, fitting, name
    if convention is not None:
        # Several prefixes may fit another program's names equally well: remove the longest, which
        # is the whole prefix of the trainer.
        prefix = max(best, key=len)
    else:
        prefix = _choose(checkpoint, best, kinds, config)
    return ModelNames(prefix, convention)


def expect_single_model(
    checkpoint: Checkpoint, recipe: Recipe | None, *, keeps_prefix: bool = False
) -> None:
    """Raise RecipeError for a checkpoint with several models under different prefixes.

    Args:
        checkpoint: a checkpoint with or without optimizer state.
        recipe: the recipe of the architecture, if any.
        keeps_prefix: whether no prefix is removed, so that only copies of names without a prefix
            are reported.
    """
    shapes = shapes_without_state(checkpoint)
    if recipe is None:
        sets = find_model_sets(shapes)
    else:
        matchers = [_matcher_of(recipe), *map(_matches_any, recipe.names.values())]
        sets = find_model_sets(
            shapes,
            is_of_model=lambda name: any(matches(name) for matches in matchers),
            own_words=_list_own_words(recipe),
        )
    if not keeps_prefix or "" in sets:
        expect_one_model(checkpoint.folder, sets)


def _list_own_words(recipe: Recipe) -> frozenset[str]:
    """Return the words in the names of an architecture."""
    patterns = [rule.pattern for rule in recipe.rules]
    patterns += [pattern for names in recipe.names.values() for pattern in names]
    return (
        frozenset(word for pattern in patterns for word in _WORD.findall(pattern)) - TRAINER_WORDS
    )


def _find_best(
    kinds: Mapping[str, int], prefixes: list[str], matches: Callable[[str], bool]
) -> tuple[int, list[str]]:
    """Return the maximum number of matched names, and the prefixes whose removal achieves it."""
    matched = {
        prefix: sum(n for name, n in kinds.items() if matches(name.removeprefix(prefix)))
        for prefix in prefixes
    }
    most = max(matched.values())
    return most, [prefix for prefix, count in matched.items() if count == most]


def _matcher_of(recipe: Recipe) -> Callable[[str], bool]:
    """Return a function that checks whether a name fits a recipe or its stacked names."""
    stacked = _matches_any(recipe.names.get(STACKED, {}))
    # A rule for all other tensors matches any name.
    rules = [rule for rule in recipe.rules if rule.pattern.strip("*")]
    results: dict[str, bool] = {}

    def matches(name: str) -> bool:
        if name not in results:
            results[name] = any(rule.matches(name) for rule in rules) or stacked(name)
        return results[name]

    return matches


def _matches_any(patterns: Iterable[str]) -> Callable[[str], bool]:
    compiled = [compile_pattern(pattern) for pattern in patterns]
    return lambda name: any(pattern.fullmatch(name) for pattern in compiled)


def _matches_either(
    first: Callable[[str], bool], second: Callable[[str], bool]
) -> Callable[[str], bool]:
    return lambda name: first(name) or second(name)


def _choose(
    checkpoint: Checkpoint,
    prefixes: list[str],
    kinds: Mapping[str, int],
    config: Mapping[str, Any],
) -> str:
    """Choose among prefixes that fit equally well. Raises RecipeError if none is preferable."""
    # Prefer prefixes that all names have. A prefix that only some names have would have to match
    # more names to be chosen.
    prefixes = [
        prefix for prefix in prefixes if all(name.startswith(prefix) for name in kinds)
    ] or prefixes
    base = base_prefix(config)
    full = [prefix for prefix in prefixes if any(name.startswith(prefix + base) for name in kinds)]
    if base and full:
        return max(full, key=len)
    trainers = [
        prefix for prefix in prefixes if {*prefix.split(".")[:-1]} <= TRAINER_WORDS and prefix
    ]
    if trainers:
        return max(trainers, key=len)
    if len(prefixes) == 1:
        return prefixes[0]
    choices = ", ".join(f"--strip-prefix {prefix}" for prefix in prefixes if prefix)
    none = " or --rename '*=*' for none" if "" in prefixes else ""
    raise RecipeError(
        f"the names in {checkpoint.folder}, such as {next(iter(checkpoint))!r}, fit the model type "
        f"{config.get('model_type')!r} without any of several prefixes: choose with {choices},"
        f"{none}"
    )


def base_prefix(config: Mapping[str, Any]) -> str:
    """Return the prefix of the base model's names in other classes of the architecture, or `""`.

    >>> base_prefix({"model_type": "gpt2"}), base_prefix({"model_type": "llama"})
    ('transformer.', 'model.')
    """
    base = _BASES.get(str(config.get("model_type")), "model")
    return f"{base}." if base else ""


def _take_as_saved(
    kinds: Mapping[str, int],
    config: Mapping[str, Any],
    containers: Iterable[str],
    keeps_prefix: bool,
) -> ModelNames:
    """Return the prefix that the trainer's state shows, for a model without a recipe."""
    shown = [
        container
        for container in containers
        if container and all(name.startswith(container) for name in kinds)
    ]
    prefix = "" if keeps_prefix or not shown else max(shown, key=len)
    what = f"without {prefix!r}, under which the trainer saved them" if prefix else "as they are"
    note = (
        f"no recipe is for the model type {config.get('model_type')!r}: names are taken {what}; "
        "--strip-prefix and --rename change them"
    )
    return ModelNames(prefix, notes=() if keeps_prefix else (note,))


_PEFT = re.compile(r"(^|\.)base_model\.model\.")
_ADAPTER = re.compile(r"\.(lora_[A-Za-z_]+|hada_\w+|lokr_\w+|oft_\w+|ia3_l|boft_\w+)(\.|$)")
_SAVED_MODULE = re.compile(r"\.modules_to_save\.[^.]+\.")
_ORIGINAL_MODULE = ".original_module."
_EXTRA_STATE = "_extra_state"


def take_weights(checkpoint: Checkpoint) -> Checkpoint:
    """Return the weights of a training checkpoint, without wrappers in their names.

    Raises:
        CheckpointError: no weights, adapters that are not merged into them, or weights of Flax.
        RecipeError: two weights with the same name.
    """
    state = find_training_state(checkpoint)
    weights = [name for name in checkpoint.tensors if not is_auxiliary(name)]
    optimizer: list[str] = []
    alone: dict[str, str] = {}
    if state is not None:
        placed = {*state.weights.values()}
        optimizer = [name for name, (_, key) in state.tensors.items() if key]
        optimizer += [name for name, _ in state.unplaced]
        weights = [name for name in checkpoint.tensors if name in placed]
        # Stage 3 of ZeRO stores weights only as 32-bit weights in optimizer state.
        alone = {
            states[MASTER]: parameter
            for parameter, states in state.optimizer.items()
            if MASTER in states and parameter not in state.weights
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
    # All optimizer state is left out, so it does not matter whether it can be read.
    inside = {name for name in checkpoint.unreadable if is_optimizer_state(name)}
    unreadable = {n: why for n, why in checkpoint.unreadable.items() if n not in inside}
    checkpoint.replace(unreadable=unreadable).expect_readable()
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
    return by_new_names(checkpoint, new).replace(
        attributes={},
        unread=(),
        unreadable={},
        paths={},
        notes=(*checkpoint.notes, *_describe_rest(checkpoint, new, optimizer)),
    )


def model_name(name: str) -> str:
    """Return a weight's name without the parts added by wrappers of modules.

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
    """Return a note on the tensors and values that are left out, or an empty list."""
    optimizer_names = {*optimizer}
    others = [
        name for name in checkpoint.tensors if new[name] is None and name not in optimizer_names
    ]
    beside = [*checkpoint.items, *checkpoint.values, *checkpoint.attributes]
    beside += [*dict(checkpoint.unread), *checkpoint.unreadable]
    parts = [
        f"{count_text(len(names), item)}{many} (first: {names[0]})"
        for item, many, names in (
            ("tensor", " of optimizer state", optimizer),
            ("other tensor", "", others),
            ("value", "", beside),
        )
        if names
    ]
    if not parts:
        return []
    return [f"left out, since a model folder has weights alone: {', '.join(parts)}"]


CONVENTIONS = ("meta", "torchtitan")
_LAYER = r"layers\.(\d+)\."
_NAMES = {
    r"tok_embeddings\.weight": "model.embed_tokens.weight",
    r"norm\.weight": "model.norm.weight",
    r"(?:output|lm_head)\.weight": "lm_head.weight",
    _LAYER + r"attention_norm\.weight": r"model.layers.\1.input_layernorm.weight",
    _LAYER + r"ffn_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight",
    _LAYER + r"attention\.(?:qkv_linear\.)?w([qkv])\.(weight|bias)": (
        r"model.layers.\1.self_attn.\2_proj.\3"
    ),
    _LAYER + r"attention\.wo\.(weight|bias)": r"model.layers.\1.self_attn.o_proj.\2",
    _LAYER + r"feed_forward\.w1\.(weight|bias)": r"model.layers.\1.mlp.gate_proj.\2",
    _LAYER + r"feed_forward\.w3\.(weight|bias)": r"model.layers.\1.mlp.up_proj.\2",
    _LAYER + r"feed_forward\.w2\.(weight|bias)": r"model.layers.\1.mlp.down_proj.\2",
}
# Tables of angles, which a model computes from its config.
_ANGLES = re.compile(r"(?:rope\.freqs|rope\.cache|freqs_cis|.*\.inner_attention\.rope\.freqs)")
_QUERIES = re.compile(r"model\.layers\.\d+\.self_attn\.q_proj\.(weight|bias)")
_KEYS = re.compile(r"model\.layers\.\d+\.self_attn\.k_proj\.(weight|bias)")
_SIGN = re.compile(rf"(.*?){_LAYER}attention\.(?:qkv_linear\.)?w[qk]\.weight")
# The keys of config.json by the keys of params.json.
_SAME_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
}


def find_llama_prefix(checkpoint: Checkpoint) -> str | None:
    """Return the prefix before names that Meta and torchtitan use, or None for other names."""
    for name in checkpoint.tensors:
        match = _SIGN.fullmatch(name)
        if match is not None:
            return match[1]
    return None


def in_transformers_names(
    weights: Checkpoint,
    source: Checkpoint,
    prefix: str,
    config: Mapping[str, Any],
    convention: str | None = None,
) -> tuple[Checkpoint, str]:
    """Return weights in transformers' names and order of rows, and the convention they were in.

    Args:
        weights: weights in names of Meta or torchtitan.
        source: the checkpoint of the weights, whose files show the convention.
        prefix: the prefix of their names.
        config: the model's config.json.
        convention: the convention of the names, given by the user; detected if None.

    Raises:
        CheckpointError: a model whose order of rows is unknown, or missing information.
        RecipeError: rows that are not pairs of the heads of config.json.
    """
    kind = config.get("model_type")
    first = next(name for name in weights.tensors if _SIGN.fullmatch(name))
    if kind != "llama":
        raise CheckpointError(
            f"{source.folder} has names of Meta or torchtitan, such as {first!r}, and config.json "
            f"is of a {kind!r}. In which order their {kind!r} keeps the rows of queries and keys "
            "is not known here, only that of their Llama; save it in Hugging Face's names by the "
            "program that trained it"
        )
    detected = convention or _find_convention(source, first)
    if detected == "meta" and (source.folder / PARAMETERS).is_file():
        _expect_same_model(source.folder, config)
    new: dict[str, str | None] = {}
    for name in weights.tensors:
        bare = name.removeprefix(prefix)
        if _ANGLES.fullmatch(bare):
            new[name] = None
            continue
        new[name] = _find_translation(bare)
        if new[name] is None:
            raise CheckpointError(
                f"{source.folder} has {name!r}, which no Llama of {detected} has: it is of another "
                "of its models, in which order that keeps the rows of queries and keys is not "
                "known here; save it in Hugging Face's names by the program that trained it, or "
                "leave the tensor out with --exclude"
            )
    named = by_new_names(weights, new)
    heads = config.get("num_attention_heads", 32)
    of_keys = config.get("num_key_value_heads") or heads
    moved = {
        name: deinterleave_rows(tensor, heads if _QUERIES.fullmatch(name) else of_keys)
        for name, tensor in named.tensors.items()
        if _QUERIES.fullmatch(name) or _KEYS.fullmatch(name)
    }
    note = (
        f"the names are those of {detected}: rows of {len(moved)} tensors of queries and keys "
        f"(first: {next(iter(moved), '')}) are put from pairs in the order of transformers"
    )
    checksums = read_again(named.checksums, moved)
    tensors = {**named.tensors, **moved}
    notes = (*named.notes, note)
    return named.replace(tensors=tensors, checksums=checksums, notes=notes), detected


def describe_plain_rename(old: Mapping[str, str]) -> str | None:
    """Return a warning about renamed queries or keys of Meta or torchtitan; None for others.

    >>> describe_plain_rename({"layers.0.attention.wq.weight": "model.layers.0.q_proj.weight"})[:30]
    '--rename gives layers.0.attent'
    """
    for name, new in old.items():
        if _SIGN.fullmatch(name) and new != name and not _SIGN.fullmatch(new):
            return (
                f"--rename gives {name} another name and keeps its rows as they are: Meta and "
                "torchtitan keep the two rows that a rotary embedding turns next to each other, "
                "transformers half a head apart. Without --rename, their Llama is recognised and "
                "its rows are put in order"
            )
    return None


def translate_name(name: str) -> str:
    """Return transformers' name for a name of Meta or torchtitan; other names stay."""
    return _find_translation(name) or name


def _find_translation(name: str) -> str | None:
    for pattern, new in _NAMES.items():
        match = re.fullmatch(pattern, name)
        if match is not None:
            return match.expand(new)
    return None


def _find_convention(source: Checkpoint, first: str) -> str:
    """Return the convention of the names, detected by the files."""
    if source.format == "torch-dcp":
        return "torchtitan"
    is_meta = any(Path(file.name).name.startswith("consolidated.") for file in source.files)
    if is_meta and (source.folder / PARAMETERS).is_file():
        return "meta"
    if is_meta:
        raise CheckpointError(
            f"{source.folder} has consolidated.* files and no {PARAMETERS}, which has the numbers "
            "of heads and the base of the rotary embedding that the rows of queries and keys were "
            f"trained with; put the {PARAMETERS} of this model next to the files"
        )
    raise CheckpointError(
        f"{source.folder} has names of Meta or torchtitan, such as {first!r}, and neither is it a "
        f"checkpoint of torch.distributed.checkpoint nor has it consolidated.*.pth and {PARAMETERS}"
        ". Whose names they are decides the order of rows of queries and keys; give it: "
        "--source-names torchtitan or --source-names meta"
    )


def _expect_same_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if params.json and config.json are of different models."""
    path = folder / PARAMETERS
    params = read_json_file(path)
    if params is None:
        raise CheckpointError(f"{path} is missing")
    # Both files may leave out the number of key heads if it is equal to the number of heads.
    params.setdefault("n_kv_heads", params.get("n_heads"))
    own = {**config, "num_key_value_heads": config.get("num_key_value_heads")}
    own["num_key_value_heads"] = own["num_key_value_heads"] or config.get("num_attention_heads")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    pairs = [(key, params.get(key), other, own.get(other)) for key, other in _SAME_KEYS.items()]
    theta = config.get("rope_theta", rope.get("rope_theta"))
    pairs.append(("rope_theta", params.get("rope_theta", 10000.0), "rope_theta", theta or 10000.0))
    if params.get("use_scaled_rope"):
        scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
        pairs.append(("use_scaled_rope", True, "rope_scaling", scaled))
    for key, value, other, expected in pairs:
        if not isinstance(value, int | float) or not isinstance(expected, int | float):
            continue
        if abs(float(value) - float(expected)) > 1e-9 * max(1.0, abs(float(expected))):
            raise CheckpointError(
                f"{path} has {key} {value!r}, and config.json {other} {expected!r}: they are of "
                "different models; give the config.json of this one with --config"
            )
