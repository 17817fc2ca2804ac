"""Names of Llama as Meta and torchtitan have them, whose attention keeps rows in another order.

Names alone do not tell what a row is. transformers' rotary embedding turns row `i` of a head with
row `i + head_dim / 2`; Meta's and torchtitan's turn rows `2 i` and `2 i + 1`. Rows of queries and
keys are put in transformers' order here, by views on the same bytes, so a plain `--rename`, which
gives the same names and shapes, would give another model::

    torchtitan, Meta                           transformers
    layers.0.attention.wq.weight               model.layers.0.self_attn.q_proj.weight, other rows
    layers.0.attention.qkv_linear.wq.weight    the same, in later versions of torchtitan
    layers.0.feed_forward.w1.weight            model.layers.0.mlp.gate_proj.weight

A checkpoint counts as torchtitan's if it is one of torch.distributed.checkpoint, and as Meta's if
its files are `consolidated.*.pth` with `params.json` next to them. Only Llama's order of rows is
known; other models by such names are refused.

Sources: torchtitan's `models/llama3`, `llama/model.py` of Meta, `models/llama` of transformers.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.checkpoint.blocks.fusing import deinterleave_rows
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.rank_files.meta_parts import PARAMETERS
from reshard.checkpoint.naming.selection import by_new_names
from reshard.errors import CheckpointError

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
# Keys of params.json, what they are in config.json, and what they are where params.json has none.
_SAME_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
}


def find_llama_prefix(checkpoint: Checkpoint) -> str | None:
    """Return what stands in front of names that Meta and torchtitan use; None for other names."""
    for name in checkpoint.tensors:
        found = _SIGN.fullmatch(name)
        if found is not None:
            return found[1]
    return None


def in_transformers_names(
    weights: Checkpoint,
    source: Checkpoint,
    prefix: str,
    config: Mapping[str, Any],
    convention: str | None = None,
) -> tuple[Checkpoint, str]:
    """Return weights in transformers' names and order of rows, and whose they were in.

    Args:
        weights: in names of Meta or torchtitan.
        source: the checkpoint that they are of, whose files tell whose they are.
        prefix: that their names have in front.
        config: the model's config.json.
        convention: whose names they are, as the user gives it; found when None.

    Raises:
        CheckpointError: a model whose order of rows is not known, or a fact that is missing.
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
    found = convention or _find_convention(source, first)
    if found == "meta" and (source.folder / PARAMETERS).is_file():
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
                f"{source.folder} has {name!r}, which no Llama of {found} has: it is of another of "
                "its models, in which order that keeps the rows of queries and keys is not known "
                "here; save it in Hugging Face's names by the program that trained it, or leave "
                "the tensor out with --exclude"
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
        f"the names are those of {found}: rows of {len(moved)} tensors of queries and keys (first: "
        f"{next(iter(moved), '')}) are put from pairs in the order of transformers"
    )
    checksums = tuple(
        dataclasses.replace(one, is_read_once=one.is_read_once and one.tensor not in moved)
        for one in named.checksums
    )
    tensors = {**named.tensors, **moved}
    notes = (*named.notes, note)
    return dataclasses.replace(named, tensors=tensors, checksums=checksums, notes=notes), found


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
    """Return transformers' name of a name of Meta or torchtitan; other names as they are."""
    return _find_translation(name) or name


def _find_translation(name: str) -> str | None:
    for pattern, new in _NAMES.items():
        found = re.fullmatch(pattern, name)
        if found is not None:
            return found.expand(new)
    return None


def _find_convention(source: Checkpoint, first: str) -> str:
    """Return whose names they are, by the files."""
    if source.format == "torch-dcp":
        return "torchtitan"
    is_meta = any(Path(one.name).name.startswith("consolidated.") for one in source.files)
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
    """Raise CheckpointError where params.json and config.json are of different models."""
    path = folder / PARAMETERS
    try:
        given = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(given, dict):
        raise CheckpointError(f"{path} is not a JSON object, but a {type(given).__name__}")
    given.setdefault("n_kv_heads", given.get("n_heads"))
    own = {**config, "num_key_value_heads": config.get("num_key_value_heads")}
    own["num_key_value_heads"] = own["num_key_value_heads"] or config.get("num_attention_heads")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    pairs = [(key, given.get(key), other, own.get(other)) for key, other in _SAME_KEYS.items()]
    theta = config.get("rope_theta", rope.get("rope_theta"))
    pairs.append(("rope_theta", given.get("rope_theta", 10000.0), "rope_theta", theta or 10000.0))
    if given.get("use_scaled_rope"):
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
