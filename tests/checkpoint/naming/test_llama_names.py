"""Llama in the names and the order of rows of Meta and torchtitan.

That transformers computes the same logits is tried in
`tests/engines/transformers_loading/test_llama_names.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from reshard import checkpoint
from reshard.errors import CheckpointError, RecipeError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 18,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
PARAMETERS = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5}
PLACES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attention_norm",
    "model.embed_tokens": "tok_embeddings",
    "lm_head": "output",
}


def made() -> dict[str, torch.Tensor]:
    """A small model in transformers' names."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (18, 16)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{one}_proj.weight": (16, 16) for one in "qo"}
        shapes |= {f"{at}.self_attn.{one}_proj.weight": (8, 16) for one in "kv"}
        shapes |= {f"{at}.mlp.{one}_proj.weight": (24, 16) for one in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (16, 24)
        shapes |= {f"{at}.{one}_layernorm.weight": (16,) for one in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (16,), "lm_head.weight": (18, 16)}
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def theirs(*, new: bool = False) -> dict[str, torch.Tensor]:
    """The same in names of Meta and torchtitan, rows in pairs; `new` for later ones."""
    found = {}
    for name, tensor in made().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = 4 if "q_proj" in name else 2
            halves = tensor.view(heads, 2, tensor.shape[0] // heads // 2, 16)
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        for own, other in PLACES.items():
            name = name.replace(own, other)
        name = name.removeprefix("model.")
        if new:
            name = name.replace("attention.wo", "attention/wo").replace("output", "lm_head")
            name = name.replace("attention.w", "attention.qkv_linear.w").replace("/", ".")
        found[name] = tensor
    return found


def write_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def write_meta(folder: Path, parameters: dict[str, Any] | None, ranks: int, rows: bool) -> Path:
    """Files of Meta, with the embedding over its rows or its columns."""
    folder.mkdir()
    for rank in range(ranks):
        part = {"rope.freqs": torch.zeros(2)}
        for name, tensor in theirs().items():
            if "norm" in name:
                part[name] = tensor
                continue
            is_columns = ".wo." in name or ".w2." in name or ("tok_" in name and not rows)
            part[name] = tensor.chunk(ranks, int(is_columns))[rank].clone()
        torch.save(part, folder / f"consolidated.{rank:02}.pth")
    if parameters is not None:
        (folder / "params.json").write_text(json.dumps(parameters))
    return folder


def expect_own(source: Path, tmp_path: Path, **options: Any) -> tuple[str, ...]:
    """Convert a source, and compare what is written with the model."""
    plan = checkpoint.plan_for_pretrained(source, tmp_path / "hf", **options)
    checkpoint.run_conversion(plan)
    opened = checkpoint.open_checkpoint(tmp_path / "hf")
    expected = made()
    assert {*opened.tensors} == {*expected}
    for name, tensor in expected.items():
        assert checkpoint.read_tensor(opened, name).tobytes() == tensor.numpy().tobytes(), name
    return plan.notes


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("new", [True, False])
def test_torchtitan(tmp_path: Path, new: bool, prefix: str) -> None:
    state: dict[str, Any] = {f"{prefix}{name}": one for name, one in theirs(new=new).items()}
    state |= {f"optimizer.state.{name}.exp_avg": one for name, one in theirs(new=new).items()}
    dcp.save({**state, "train_state": {"step": 7}}, checkpoint_id=tmp_path / "s", no_dist=True)
    notes = expect_own(tmp_path / "s", tmp_path, config=write_config(tmp_path / "base"))
    assert any("names are those of torchtitan: rows of 4 tensors" in note for note in notes)


@pytest.mark.parametrize(("ranks", "rows"), [(1, True), (2, True), (2, False)])
def test_meta(tmp_path: Path, ranks: int, rows: bool) -> None:
    source = write_meta(tmp_path / "s", PARAMETERS, ranks, rows)
    notes = expect_own(source, tmp_path, config=write_config(tmp_path / "base"))
    assert any("names are those of meta: rows of 4 tensors" in note for note in notes)


def test_facts_that_are_missing_or_contradict_are_named(tmp_path: Path) -> None:
    config = write_config(tmp_path / "base")

    def fails(source: Path, match: str, **options: Any) -> None:
        with pytest.raises(CheckpointError, match=match):
            checkpoint.plan_for_pretrained(source, tmp_path / "hf", **{"config": config, **options})

    fails(write_meta(tmp_path / "none", None, 1, rows=True), "consolidated.* files and no params")
    for key, value, expected in (
        ("n_kv_heads", 4, "n_kv_heads 4, and config.json num_key_value_heads 2"),
        ("rope_theta", 500000.0, "rope_theta 500000.0, and config.json rope_theta 10000"),
        ("use_scaled_rope", True, "use_scaled_rope True, and config.json rope_scaling False"),
    ):
        source = write_meta(tmp_path / key, {**PARAMETERS, key: value}, 1, rows=True)
        fails(source, expected)
    plain = tmp_path / "plain"
    plain.mkdir()
    torch.save(theirs(), plain / "model.pt")
    fails(plain, "Whose names they are decides .*--source-names torchtitan or --source-names meta")
    expect_own(plain, tmp_path, config=config, source_names="torchtitan")
    other = write_config(tmp_path / "other", model_type="qwen3")
    fails(plain, "In which order their 'qwen3' keeps the rows", config=other)
    torch.save({**theirs(), "layers.0.attention.q_norm.weight": torch.ones(4)}, plain / "model.pt")
    fails(plain, "'layers.0.attention.q_norm.weight', which no Llama", source_names="torchtitan")
    with pytest.raises(RecipeError, match=r"wq.* 3 heads of pairs|q_proj.* 3 heads of pairs"):
        checkpoint.plan_for_pretrained(
            write_meta(tmp_path / "three", {"n_heads": 3}, 1, rows=True),
            tmp_path / "hf",
            config=write_config(tmp_path / "base3", num_attention_heads=3, num_key_value_heads=3),
        )


def test_a_plain_rename_keeps_the_rows_and_a_note_says_so(tmp_path: Path) -> None:
    source = write_meta(tmp_path / "s", PARAMETERS, 1, rows=True)
    renames = [f"layers.*.{old}.weight=model.layers.*.{new}.weight" for new, old in PLACES.items()]
    renames = [one for one in renames if "embed" not in one and "lm_head" not in one]
    renames += ["tok_embeddings.weight=model.embed_tokens.weight", "output.weight=lm_head.weight"]
    plan = checkpoint.plan_for_pretrained(
        source,
        tmp_path / "hf",
        config=write_config(tmp_path / "base"),
        rename=[*renames, "norm.weight=model.norm.weight"],
        exclude=["rope.freqs"],
    )
    assert any("--rename gives layers.0.attention.wq.weight another name" in n for n in plan.notes)
