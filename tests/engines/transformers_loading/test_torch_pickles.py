"""`pytorch_model.bin`, written without torch, is what transformers loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("RESHARD_ENGINE") != "transformers":
    pytest.skip("needs transformers", allow_module_level=True)

import torch
import transformers

from reshard.checkpoint import convert


@pytest.mark.parametrize("limit_bytes", [None, 60_000])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_is_loaded(tmp_path: Path, limit_bytes: int | None, is_tied: bool) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        tie_word_embeddings=is_tied,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "source")
    convert(
        tmp_path / "source",
        tmp_path / "target",
        to="full",
        format="torch-pickle",
        most_file_bytes=limit_bytes,
    )
    names = os.listdir(tmp_path / "target")
    assert ("pytorch_model.bin" in names) == (limit_bytes is None)
    assert ("pytorch_model.bin.index.json" in names) == (limit_bytes is not None)
    found, problems = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "target", output_loading_info=True, use_safetensors=False
    )
    assert not problems["missing_keys"]
    assert not problems["unexpected_keys"]
    expected = model.state_dict()
    assert set(found.state_dict()) == set(expected)
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
