"""Tokens of vLLM on the CPU from what reshard writes and reads: those of its own loader."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

if os.environ.get("RESHARD_ENGINE") != "vllm":
    pytest.skip("needs vLLM", allow_module_level=True)

from engines.vllm.generation import generate
from reshard import checkpoint
from reshard.checkpoint import compare, convert
from reshard.checkpoint.conversion.run import run_conversion
from reshard.checkpoint.engines.conversion import plan_for_vllm
from reshard.errors import RecipeError
from reshard.torch.vllm import layouts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights, with heads of 64: vLLM has no kernels for smaller ones."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "qwen2",
        hidden_size=256,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=380,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("generation") / "qwen2"
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("installed")
def test_weights_come_from_an_address(model: Path, tmp_path: Path) -> None:
    """The folder has no weights; ranks ask the store once for what both need."""
    pytest.importorskip("obstore")
    from object_server import object_server

    right = [one["tokens"] for one in generate(model, "auto", 2, tmp_path)]
    shell = tmp_path / "shell"
    shutil.copytree(model, shell, ignore=shutil.ignore_patterns("*.safetensors"))
    with object_server() as server:
        for path in model.iterdir():
            server.objects[f"/m/{path.name}"] = path.read_bytes()
        found = generate(shell, "reshard", 2, tmp_path, checkpoint=f"{server.url}/m")
    assert [one["tokens"] for one in found] == right
    source = checkpoint.open(model)
    model_bytes = sum(one.size_bytes for one in source.tensors.values())
    by_loader_bytes = sum(source[name].size_bytes for name in found[0]["by_loader"])
    asked_bytes = sum(one["read_bytes"] for one in found)
    assert model_bytes <= asked_bytes <= 1.05 * (model_bytes + by_loader_bytes)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_are_those_of_its_own_loader(model: Path, tp: int, tmp_path: Path) -> None:
    import torch

    right = [one["tokens"] for one in generate(model, "auto", tp, tmp_path)]
    by_format = generate(model, "reshard", tp, tmp_path)
    assert [one["tokens"] for one in by_format] == right
    layout = layouts(model, tp=tp, cache=tmp_path / "cache")
    run_conversion(plan_for_vllm(model, tmp_path / "state", layout))
    saved = tmp_path / "saved"
    saved.mkdir()
    by_state = generate(tmp_path / "state", "sharded_state", tp, tmp_path, saved)
    assert [one["tokens"] for one in by_state] == right
    # Back to the model: from what reshard wrote for vLLM, and vLLM has loaded.
    convert(tmp_path / "state", tmp_path / "back", to="full")
    assert compare(model, tmp_path / "back").is_same
    # What vLLM saves itself is the model, or, on a processor with AVX-512, has matrices in the form
    # of its kernels: these are named.
    if torch.cpu._is_avx512_supported():
        with pytest.raises(RecipeError, match=r"no 'rank-0/model\.layers\.0.*the form of a kernel"):
            convert(saved, tmp_path / "from vLLM", to="full", source_layout=layout)
    else:
        convert(saved, tmp_path / "from vLLM", to="full", source_layout=layout)
        assert compare(model, tmp_path / "from vLLM").is_same
