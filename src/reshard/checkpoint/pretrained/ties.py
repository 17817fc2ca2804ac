"""Tied weights of a model folder: those that config.json says are one are stored once.

Where config.json ties the output layer to the input embedding and both are there, the output's is
left out, if its bytes are the same; the two are read for that, block by block. If they differ, the
model was not tied in truth: both are kept, and config.json says so.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from reshard.checkpoint.comparison import compare
from reshard.checkpoint.contents import Checkpoint
from reshard.text import count_text

TIE = "tie_word_embeddings"
# Names of output layers, and of input embeddings, behind whatever the architecture has in front.
_OUTPUT = re.compile(
    r"(.*\.)?(lm_head|embed_out|proj_out|predictions\.decoder|lm_head\.decoder|"
    r"generator_lm_head|vocab_projector|decoder)\.weight"
)
_INPUT = re.compile(
    r"(.*\.)?(embed_tokens|wte|word_embeddings|embed_in|shared|embeddings|tok_embeddings)\.weight"
)


class TiedWeights(NamedTuple):
    """A checkpoint whose tied weights are stored once, the config that is true of it, and notes."""

    checkpoint: Checkpoint
    config: dict[str, Any]
    notes: tuple[str, ...] = ()


def store_tied_once(checkpoint: Checkpoint, config: Mapping[str, Any]) -> TiedWeights:
    """The checkpoint without output layers that are their embeddings.

    Raises:
        RunError: a file that cannot be read.
    """
    found = dict(config)
    if not is_tied(config):
        return TiedWeights(checkpoint, found)
    outputs = [name for name in checkpoint.tensors if _OUTPUT.fullmatch(name)]
    inputs = [name for name in checkpoint.tensors if _INPUT.fullmatch(name)]
    dropped, differing = [], []
    for output in outputs:
        alike = [one for one in inputs if _are_alike(checkpoint, output, one)]
        if not alike:
            continue
        if any(_are_equal(checkpoint, output, one) for one in alike):
            dropped.append(output)
        else:
            differing.append((output, alike[0]))
    notes = []
    if dropped:
        notes.append(
            f"{', '.join(dropped)} left out: the same as the embedding, which config.json ties it "
            "to"
        )
    if differing:
        output, tied = differing[0]
        notes.append(
            f"config.json ties {output} to {tied}, and they differ: both are written, and its "
            f"{TIE} is false"
        )
        _set_tie(found)
    tensors = {name: one for name, one in checkpoint.tensors.items() if name not in dropped}
    checksums = tuple(one for one in checkpoint.checksums if one.tensor not in dropped)
    return TiedWeights(
        dataclasses.replace(checkpoint, tensors=tensors, checksums=checksums), found, tuple(notes)
    )


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether a config ties the output layer to the input embedding.

    >>> is_tied({"text_config": {"tie_word_embeddings": True}})
    True
    """
    texts = config.get("text_config")
    for one in (config, texts if isinstance(texts, Mapping) else {}):
        if TIE in one:
            return one[TIE] is True
    return False


def describe_missing_output(checkpoint: Checkpoint, config: Mapping[str, Any]) -> str | None:
    """What to say of a causal model without an output layer, which config.json does not tie."""
    texts = config.get("text_config")
    says = [one[TIE] for one in (config, texts) if isinstance(one, Mapping) and TIE in one]
    architectures = config.get("architectures")
    is_causal = isinstance(architectures, list) and any(
        str(one).endswith("ForCausalLM") for one in architectures
    )
    if not is_causal or not says or says[0] is not False:
        return None
    if any(_OUTPUT.fullmatch(name) for name in checkpoint.tensors):
        return None
    return (
        f"{checkpoint.folder} has no output layer (lm_head.weight) in "
        f"{count_text(len(checkpoint), 'weight')}, and config.json does not tie it to the "
        f"embedding ({TIE} is false); if it is tied, say so in config.json, else the checkpoint is "
        "incomplete"
    )


def _set_tie(config: dict[str, Any]) -> None:
    texts = config.get("text_config")
    if TIE in config or not isinstance(texts, Mapping):
        config[TIE] = False
    if isinstance(texts, Mapping) and TIE in texts:
        config["text_config"] = {**texts, TIE: False}


def _are_alike(checkpoint: Checkpoint, one: str, other: str) -> bool:
    a, b = checkpoint.tensors[one], checkpoint.tensors[other]
    return one != other and (a.dtype, a.shape) == (b.dtype, b.shape)


def _are_equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Whether two tensors have the same bytes."""
    a, b = checkpoint.tensors[one], checkpoint.tensors[other]
    if a.binding == b.binding:
        return True
    if a.digest is not None and b.digest is not None:
        return a.digest.tensor == b.digest.tensor
    left, right = (
        dataclasses.replace(
            checkpoint,
            tensors={"": dataclasses.replace(tensor, name="")},
            items={},
            values={},
            checksums=(),
        )
        for tensor in (a, b)
    )
    return compare(left, right).is_same
