"""Checkpoints that reshard wrote, opened again: every format, names and contents.

Each target is opened with its manifest and by its files alone. Both readings have the same
tensors, the files have the digests of the manifest, and `--for hf` makes the source's model of it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from checkpoint.checkpoint_files import MANIFEST
from checkpoint.model_files import write_llama
from reshard import checkpoint
from reshard.checkpoint.formats.registry import written_names
from reshard.checkpoint.training.state import find_training_state
from reshard.errors import CheckpointError

# How a target of each format is asked for. vLLM's takes a layout, and has a test of its own.
TARGETS: dict[str, dict[str, Any]] = {
    "deepspeed-universal": {"to": "full"},
    "deepspeed-zero1": {"to": "dp=2"},
    "deepspeed-zero3": {"to": "dp=2"},
    "megatron-legacy": {"to": "tp=2", "recipe": "auto"},
    "orbax": {"to": "tp=2", "recipe": "auto"},
    "rank-files": {"to": "fsdp=2", "rules": ["*=fsdp, ..."]},
    "safetensors": {"to": "full"},
    "sharded-safetensors": {"to": "tp=2", "recipe": "auto"},
    "torch-dcp": {"to": "tp=2", "recipe": "auto"},
    "torch-dist": {"to": "tp=2", "recipe": "auto"},
    "torch-pickle": {"to": "full"},
}
# Training state for formats that take any names.
STYLES = {
    "rank-files": "fsdp2",
    "safetensors": "reshard",
    "sharded-safetensors": "reshard",
    "torch-dcp": "fsdp2",
    "torch-pickle": "torch",
}
NAMES = {"llama": (None, "megatron", "vllm", "sglang")}
NAMES["mixtral"] = (*NAMES["llama"], "stacked")


def write_mixtral(folder: Path) -> Path:
    """A very small Mixtral: four experts, of which each layer has all."""
    random = np.random.default_rng(3)
    shapes = {"model.embed_tokens.weight": (50, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{one}_proj.weight": (16, 16) for one in "qo"}
        shapes |= {f"{at}.self_attn.{one}_proj.weight": (4, 16) for one in "kv"}
        shapes |= {f"{at}.{one}_layernorm.weight": (16,) for one in ("input", "post_attention")}
        shapes[f"{at}.block_sparse_moe.gate.weight"] = (4, 16)
        for expert in range(4):
            of = f"{at}.block_sparse_moe.experts.{expert}"
            shapes |= {f"{of}.{one}.weight": (24, 16) for one in ("w1", "w3")}
            shapes[f"{of}.w2.weight"] = (16, 24)
    shapes["lm_head.weight"] = (50, 16)
    folder.mkdir(parents=True)
    tensors = {name: random.standard_normal(one, np.float32) for name, one in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "hidden_size": 16,
        "vocab_size": 50,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_training(model: Path, folder: Path) -> Path:
    """What PyTorch saves of an AdamW that trains a model: parameters have numbers."""
    weights = load_file(model / "model.safetensors")
    state = {
        number: {"step": torch.tensor(3.0), "exp_avg": weight * 2, "exp_avg_sq": weight**2}
        for number, weight in enumerate(weights.values())
    }
    group = torch.optim.AdamW([torch.zeros(1)]).state_dict()["param_groups"][0]
    optimizer = {"state": state, "param_groups": [{**group, "params": [*state]}]}
    folder.mkdir()
    torch.save({"model": weights, "optimizer": optimizer}, folder / "checkpoint.pt")
    shutil.copy(model / "config.json", folder)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models, and their training states."""
    root = tmp_path_factory.mktemp("sources")
    models = {"llama": write_llama(root / "llama"), "mixtral": write_mixtral(root / "mixtral")}
    training = {f"{n} training": write_training(p, root / f"{n}-t") for n, p in models.items()}
    return {**models, **training}


def expect_own(sources: dict[str, Path], source: str, format: str, names: str | None) -> None:
    """The target of a source can be opened, compared and made a model again."""
    model = source.removesuffix(" training")
    target = sources[source].with_name(f"{source} {format} {names}")
    request: dict[str, Any] = {**TARGETS[format], "format": format}
    if names is not None:
        request |= {"target_names": names, "recipe": "auto"}
    if source != model and format in STYLES:
        # Numbers of parameters have no other names.
        is_named = names is not None and STYLES[format] == "torch"
        request["training"] = "fsdp2" if is_named else STYLES[format]
    checkpoint.convert(sources[source], target, **request)
    try:
        expect_open(
            target, sources[model], is_training=source != model, is_renamed=names is not None
        )
    finally:
        shutil.rmtree(target)


def expect_open(target: Path, model: Path, *, is_training: bool, is_renamed: bool) -> None:
    opened = checkpoint.open(target)
    report = checkpoint.check_digests(opened)
    assert not report.damaged
    assert not report.without_digest or opened.format.startswith("deepspeed")
    assert checkpoint.compare_pretrained(opened, model).is_same
    assert (find_training_state(opened) is not None) == is_training
    (target / MANIFEST).unlink()
    if opened.format == "sharded-safetensors" and is_renamed:
        # Shards of fused parameters are several ranges, which only the manifest describes.
        with pytest.raises(CheckpointError, match=MANIFEST):
            checkpoint.open(target)
        return
    bare = checkpoint.open(target)
    assert checkpoint.compare(opened, bare).is_same
    assert checkpoint.compare_pretrained(bare, model).is_same


def list_cases(model: str) -> list[tuple[str, str, str | None]]:
    """Source, format and names, without those that are refused."""
    return [
        (source, format, names)
        for source in (model, f"{model} training")
        for format in TARGETS
        for names in NAMES[model]
        if not (format.startswith("deepspeed") and source == model)
        and not (format == "megatron-legacy" and names != "megatron")
        and not (format == "orbax" and names is not None and source != model)
    ]


QUICK = [
    (source, format, names)
    for source, format, names in list_cases("llama")
    # A training state has the weights too.
    if (names == "megatron" and source == "llama training")
    or (names == "vllm" and format == "torch-dcp")
    or (names is None and format in ("torch-dist", "orbax", "sharded-safetensors"))
]


@pytest.mark.parametrize(("source", "format", "names"), QUICK)
def test_a_target_is_opened_again(
    sources: dict[str, Path], source: str, format: str, names: str | None
) -> None:
    expect_own(sources, source, format, names)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("source", "format", "names"),
    [one for model in NAMES for one in list_cases(model) if one not in QUICK],
)
def test_every_target_is_opened_again(
    sources: dict[str, Path], source: str, format: str, names: str | None
) -> None:
    expect_own(sources, source, format, names)


def test_every_format_is_opened_again() -> None:
    assert {*TARGETS, "vllm-sharded-state"} == {*written_names()}
