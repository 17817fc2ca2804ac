"""Tensors against the classes of the installed transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

if os.environ.get("RESHARD_ENGINE") != "transformers":
    pytest.skip("needs the environment of transformers", allow_module_level=True)

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from reshard.checkpoint.architectures.records import TensorDifferences
from reshard.torch.transformers import find_class_differences

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
Shapes = dict[str, tuple[int, ...]]


def saved(name: str, config: Any) -> Shapes:
    """The tensors that a class saves."""
    with torch.device("meta"):
        model = getattr(transformers, name)._from_config(config)
    tied = {*(model.all_tied_weights_keys or {})}
    held = {name: one for name, one in model.state_dict().items() if name not in tied}
    return {name: tuple(one.shape) for name, one in revert_weight_conversion(model, held).items()}


def compare(name: str, config: Any, shapes: Mapping[str, Any]) -> TensorDifferences:
    found = find_class_differences({**config.to_dict(), "architectures": [name]}, shapes)
    assert found is not None
    return found


def test_experts_that_transformers_stacks_count_by_their_numbers() -> None:
    """transformers itself loads expert 9 as expert 3, without a word."""
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    own = saved("MixtralForCausalLM", config)
    assert not compare("MixtralForCausalLM", config, own)
    one = "model.layers.0.block_sparse_moe.experts.3.w3.weight"
    nine = one.replace("3.w3", "9.w3")
    found = compare("MixtralForCausalLM", config, {nine: own.pop(one), **own})
    assert (found.missing, found.unknown) == (((one, (24, 32)),), (nine,))
    found = compare("MixtralForCausalLM", config, {one: (3, 4), **own})
    assert found.misshapen == ((one, (3, 4), (24, 32)),)
    with torch.device("meta"):
        module = transformers.MixtralForCausalLM._from_config(config)
    stacked = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert not compare("MixtralForCausalLM", config, stacked)


def test_published_oddities_are_ignored_and_named() -> None:
    config = transformers.BertConfig(**SMALL)
    own = saved("BertForPreTraining", config)
    own = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): s for name, s in own.items()}
    found = compare("BertForMaskedLM", config, {**own, "bert.embeddings.position_ids": (1, 512)})
    assert not found
    assert {"cls.seq_relationship.bias", "bert.embeddings.position_ids"} <= {*found.ignored}


def test_a_tied_weight_is_there_by_any_of_its_names() -> None:
    config = transformers.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4)
    own = saved("GPT2LMHeadModel", config)
    own["lm_head.weight"] = own.pop("transformer.wte.weight")
    assert not compare("GPT2LMHeadModel", config, own)
    del own["lm_head.weight"]
    assert compare("GPT2LMHeadModel", config, own).missing == (
        ("transformer.wte.weight", (61, 32)),
    )
    # The base model's names, with masks of earlier versions.
    masks = {"h.0.attn.bias": (1, 1, 1024, 1024)}
    assert not compare("GPT2LMHeadModel", config, saved("GPT2Model", config) | masks)


def test_code_next_to_a_checkpoint_never_runs() -> None:
    config = {**transformers.LlamaConfig(**SMALL).to_dict(), "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    assert find_class_differences(config, {"w": (1,)}) is None
    assert find_class_differences({"model_type": "own"}, {"w": (1,)}) is None
