"""Small models and their adapters by PEFT: `python -m engines.adapters.peft_models` records some.

Each case is a folder: `base`, `adapter` and `second`, and what PEFT merges of the one, and of both.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

RECORDS = Path(__file__).parents[2] / "golden" / "engines" / "peft.tar.xz"
TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]
PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS}
SWAPPED: dict[str, Any] = {"r": 4, "lora_alpha": 8, "fan_in_fan_out": True}
#: The kind of model, and the settings of LoRA.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", PLAIN),
    "rslora": ("llama", {**PLAIN, "use_rslora": True}),
    "patterns": (
        "llama",
        {
            **PLAIN,
            "rank_pattern": {"q_proj": 2, "layers.0.mlp.down_proj": 3},
            "alpha_pattern": {"^model.layers.0.self_attn.v_proj": 3},
        },
    ),
    "dora": ("llama", {**PLAIN, "use_dora": True}),
    "save": ("llama", {**PLAIN, "modules_to_save": ["lm_head"]}),
    "embeddings": ("llama", {**PLAIN, "target_modules": ["embed_tokens", "q_proj"]}),
    "bias": ("biased llama", {**PLAIN, "lora_bias": True}),
    "tied": ("tied llama", PLAIN),
    "swapped": ("gpt2", {**SWAPPED, "target_modules": ["c_attn", "c_proj"]}),
    "swapped dora": ("gpt2", {**SWAPPED, "target_modules": ["c_attn"], "use_dora": True}),
}
RECORDED = ("plain", "patterns", "dora", "save", "embeddings", "bias", "swapped dora")


def make_model(kind: str, dtype: torch.dtype) -> Any:
    """A model with weights of a seed."""
    torch.manual_seed(0)
    if kind == "gpt2":
        small = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=24, n_positions=8)
        return GPT2LMHeadModel(small).to(dtype)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=24,
        tie_word_embeddings=kind.startswith("tied"),
        attention_bias=kind.startswith("biased"),
        mlp_bias=kind.startswith("biased"),
    )
    return LlamaForCausalLM(config).to(dtype)


def _train(model: Any, seed: int) -> None:
    """Change what is trained, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            change = torch.randn(parameter.shape, generator=generator) * 0.05
            with torch.no_grad():
                parameter.add_(change.to(parameter.dtype))


def _merge(folder: Path, base: str, adapter: str, to: str, dtype: torch.dtype, kind: Any) -> None:
    model = kind.from_pretrained(folder / base, dtype=dtype)
    PeftModel.from_pretrained(model, folder / adapter).merge_and_unload().save_pretrained(
        folder / to
    )


def write_case(folder: Path, case: str, dtype: torch.dtype) -> None:
    """Write a case with PEFT."""
    kind, settings = CASES[case]
    model = make_model(kind, dtype)
    cls = type(model)
    model.save_pretrained(folder / "base")
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    for number, name in enumerate(("adapter", "second")):
        _train(adapted, number)
        adapted.save_pretrained(folder / name)
    _merge(folder, "base", "adapter", "merged", dtype, cls)
    _merge(folder, "merged", "second", "merged both", dtype, cls)


def record() -> None:
    """Write the records: for bfloat16, without what no test reads."""
    with tempfile.TemporaryDirectory() as name:
        for case in RECORDED:
            write_case(Path(name) / case, case, torch.bfloat16)
        with tarfile.open(RECORDS, "w:xz") as archive:
            for path in sorted(Path(name).rglob("*")):
                if path.suffix in (".safetensors", ".json") and "generation" not in path.name:
                    info = tarfile.TarInfo(path.relative_to(name).as_posix())
                    info.size = path.stat().st_size
                    archive.addfile(info, io.BytesIO(path.read_bytes()))


if __name__ == "__main__":
    record()
