"""Experts by themselves and stacked, in the names of each program, against arrays of NumPy."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from checkpoint.checkpoint_files import Tensor, read_file, tensor, write_file
from checkpoint.test_memory import SLACK_BYTES, measure, write_holes
from cli.command_runs import run_here
from reshard import checkpoint
from reshard.checkpoint.conversion.plan import plan_conversion
from reshard.dtypes import dtype
from reshard.errors import RecipeError
from selection import keep_spread, keep_where

# What transformers 5.23 saves of one model: as on the Hub, and with `save_original_format=False`.
SAVED = Path(__file__).parents[2] / "golden" / "engines" / "qwen3_moe"
NAMES = ("stacked", "megatron", "vllm", "sglang")
TARGETS = ("full", "tp=2,ep=2", "tp=4,pp=2", "ep=3,etp=2,fsdp=2")
FORMS = ("per_expert", "stacked")
EXPERTS, WIDTH, HIDDEN = 5, 6, 8
# The models written here have the tensors under test only.
PARTIAL = {"recipe": "auto", "allow": ["incomplete"]}


def folder_with(path: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> Path:
    path.mkdir()
    write_file(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_both_forms_that_transformers_saves_are_one_checkpoint(tmp_path: Path) -> None:
    both = (str(SAVED / "per_expert"), str(SAVED / "stacked"))
    run = run_here("verify", *both)
    assert run.code == 1
    assert "compare them with --recipe auto" in run.output
    for names in (both, both[::-1]):
        run = run_here("verify", *names, "--recipe", "auto")
        assert run.code == 0
        assert "the same 62 tensors, bit for bit" in run.output
    path = tmp_path / "stacked"
    tensors = read_file(SAVED / "stacked" / "model.safetensors")
    stacked = tensors["model.layers.2.mlp.experts.gate_up_proj"]
    bits = stacked.bits.copy()
    bits[3, 7, 2] ^= 1
    tensors["model.layers.2.mlp.experts.gate_up_proj"] = Tensor(stacked.dtype, bits)
    folder_with(path, tensors, json.loads((SAVED / "stacked" / "config.json").read_text()))
    run = run_here("verify", both[0], str(path), "--recipe", "auto")
    assert run.code == 1
    # Five rows of gate, then those of up.
    assert "model.layers.2.mlp.experts.3.up_proj.weight" in run.output
    assert "1 of 62 tensors differ" in run.output


@pytest.mark.parametrize(
    ("names", "to", "form"),
    keep_where(
        lambda case: (
            TARGETS.index(case[1]) == (NAMES.index(case[0]) + 2 * FORMS.index(case[2])) % 4
        ),
        itertools.product(NAMES, TARGETS, FORMS),
        "another target for names and a form",
    ),
)
def test_from_either_form_to_any_names_and_back(
    tmp_path: Path, names: str, to: str, form: str
) -> None:
    auto = {"recipe": "auto"}
    if names == "megatron":
        # Groups of queries, keys and values are dealt out whole, and there are two.
        to = to.replace("tp=4", "tp=2")
    made, back = tmp_path / form, tmp_path / f"{form}-back"
    # A stacked source is known by its names.
    report = checkpoint.convert(SAVED / form, made, to=to, target_names=names, **auto)
    assert report.read_bytes == checkpoint.open(SAVED / form).size_bytes, "read in place, once"
    checkpoint.convert(made, back, to="full", source_names=names, **auto)
    expected = read_file(SAVED / "per_expert" / "model.safetensors")
    assert read_file(back / "model.safetensors") == expected


def test_ranks_of_engines_hold_their_parts_of_fused_tensors(tmp_path: Path) -> None:
    """More ranks than key/value heads: four ranks share two."""
    whole = {
        name: one.bits for name, one in read_file(SAVED / "per_expert/model.safetensors").items()
    }
    how = {"to": "ep=2,tp=4", "recipe": "auto", "replicas": "every"}
    checkpoint.convert(SAVED / "stacked", tmp_path / "x", target_names="vllm", **how)
    files = sorted((tmp_path / "x").glob("*.safetensors"))
    for rank, file in enumerate(files):
        at, found = rank % 4, read_file(file)
        of = "model.layers.2."
        rows = {"q": 4, "k": 2, "v": 2}
        heads = {
            one: np.split(whole[f"{of}self_attn.{one}_proj.weight"], count)[at * count // 4]
            for one, count in rows.items()
        }
        qkv = found[f"{of}self_attn.qkv_proj.weight"].bits
        assert (qkv == np.concatenate([heads["q"], heads["k"], heads["v"]])).all()
        inner = slice(2 * at, min(2 * at + 2, 5))
        if at == 3:
            # Five columns over four ranks, by ceil: the last has none.
            assert f"{of}mlp.experts.routed_experts.w13_weight" not in found
            continue
        experts = range(3) if rank < 4 else range(3, 5)
        name = f"{of}mlp.experts.{{}}.{{}}_proj.weight"
        gate_up = [
            np.concatenate([whole[name.format(e, one)][inner] for one in ("gate", "up")])
            for e in experts
        ]
        w13 = found[f"{of}mlp.experts.routed_experts.w13_weight"].bits
        assert (w13 == np.stack(gate_up)).all()
        down = np.stack([whole[name.format(e, "down")][:, inner] for e in experts])
        assert (found[f"{of}mlp.experts.routed_experts.w2_weight"].bits == down).all()


FAMILIES = {
    # The Hub's names of gate, up and down in a layer, the number of experts, and other tensors.
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2", "num_local_experts", {"gate.weight": 5}),
    "minimax_m2": (
        *("block_sparse_moe", "w1", "w3", "w2", "num_local_experts"),
        {"gate.weight": 5, "e_score_correction_bias": 0},
    ),
    "qwen2_moe": (
        *("mlp", "gate_proj", "up_proj", "down_proj", "num_experts"),
        {"gate.weight": 5, "shared_expert.gate_proj.weight": 6, "shared_expert.up_proj.weight": 6},
    ),
    "deepseek_v3": ("mlp", "gate_proj", "up_proj", "down_proj", "n_routed_experts", {}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_every_family_are_stacked_and_split(tmp_path: Path, family: str) -> None:
    module, gate, up, down, count, others = FAMILIES[family]
    shapes: dict[str, tuple[int, ...]] = {}
    for expert in range(EXPERTS):
        of = f"model.layers.0.{module}.experts.{expert}."
        shapes |= {f"{of}{one}.weight": (WIDTH, HIDDEN) for one in (gate, up)}
        shapes[f"{of}{down}.weight"] = (HIDDEN, WIDTH)
    for name, rows in others.items():
        shapes[f"model.layers.0.{module}.{name}"] = (rows, HIDDEN) if rows else (EXPERTS,)
    if family == "deepseek_v3":
        shapes["model.layers.0.self_attn.q_a_proj.weight"] = (7, HIDDEN)
        shapes["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] = (5, HIDDEN)
    whole = {name: tensor("int16", shape, n) for n, (name, shape) in enumerate(shapes.items())}
    config = {
        "model_type": family,
        count: EXPERTS,
        "first_k_dense_replace": 0,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "q_lora_rank": 7,
        "kv_lora_rank": 3,
        "qk_rope_head_dim": 2,
        "intermediate_size": WIDTH,
        "moe_intermediate_size": WIDTH,
    }
    source = folder_with(tmp_path / "source", whole, config)
    for names in ("stacked", "megatron", "vllm", "sglang"):
        made, back = tmp_path / names, tmp_path / f"{names}-back"
        checkpoint.convert(source, made, to="ep=2,etp=2", target_names=names, **PARTIAL)
        checkpoint.convert(made, back, to="full", source_names=names, **PARTIAL)
        assert read_file(back / "model.safetensors") == whole
    found = checkpoint.open(tmp_path / "stacked")
    stacked = checkpoint.read_tensor(found, "model.layers.0.mlp.experts.gate_up_proj")
    expected = [
        np.concatenate(
            [whole[f"model.layers.0.{module}.experts.{e}.{one}.weight"].bits for one in (gate, up)]
        )
        for e in range(EXPERTS)
    ]
    assert (stacked.view(np.uint16) == np.stack(expected)).all()


def test_a_model_without_a_rank_for_queries_keeps_what_it_has(tmp_path: Path) -> None:
    """DeepSeek-V2-Lite: only keys and values are compressed, so that nothing is fused."""
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    config = {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "n_routed_experts": 2,
        "num_attention_heads": 4,
    }
    whole = {name: tensor("int16", (5, HIDDEN))}
    for expert in range(2):
        whole[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"] = tensor("int16", (8, 6))
    source = folder_with(tmp_path / "source", whole, config)
    checkpoint.convert(source, tmp_path / "x", to="full", target_names="vllm", **PARTIAL)
    assert name in checkpoint.open(tmp_path / "x").tensors


@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
def test_experts_stored_input_by_output(tmp_path: Path, family: str) -> None:
    module = "mlp" if family == "gpt_oss" else "feed_forward"
    of = f"model.layers.0.{module}.experts."
    whole = {
        f"{of}gate_up_proj": tensor("int16", (EXPERTS, HIDDEN, 2 * WIDTH), 1),
        f"{of}down_proj": tensor("int16", (EXPERTS, WIDTH, HIDDEN), 2),
    }
    config = {
        "model_type": family,
        "num_local_experts": EXPERTS,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": WIDTH,
    }
    source = folder_with(tmp_path / "source", whole, config)
    made = tmp_path / "made"
    checkpoint.convert(source, made, to="ep=2,tp=3", target_names="vllm", **PARTIAL)
    found = checkpoint.open(made)
    engine = f"{of}routed_experts."
    w13 = checkpoint.read_tensor(found, f"{engine}w13_weight").view(np.uint16)
    assert (w13 == whole[f"{of}gate_up_proj"].bits.transpose(0, 2, 1)).all()
    # Rank 1 has the third and fourth row of gate and of up: alternating, or one behind the other.
    rows = [4, 5, 6, 7] if family == "gpt_oss" else [2, 3, 8, 9]
    held = read_file(sorted(made.glob("*.safetensors"))[1])[f"{engine}w13_weight"].bits
    assert (held == w13[:3, rows]).all()
    checkpoint.convert(made, tmp_path / "back", to="full", source_names="vllm", **PARTIAL)
    assert read_file(tmp_path / "back" / "model.safetensors") == whole


def test_alternating_members_are_one_box_again(tmp_path: Path) -> None:
    """Gate and up of gpt-oss, taken apart and put together in another order of dimensions."""
    from reshard.recipes.naming import Fusion

    whole = {"a": tensor("int16", (EXPERTS, HIDDEN, 2 * WIDTH))}
    source = folder_with(tmp_path / "source", whole, {})
    members = ("e.{}.gate", "e.{}.up")
    names = {
        "source_names": {"a": Fusion(members, groups=WIDTH, stacked=EXPERTS, transposed=True)},
        "target_names": {"b": Fusion(members, groups=WIDTH, stacked=EXPERTS)},
    }
    conversion = plan_conversion(source, tmp_path / "x", to="full", **names)
    (stored,) = conversion.source.tensors.values()
    assert len(stored.layout.cells_of(0)) == EXPERTS
    checkpoint.convert(source, tmp_path / "x", to="full", **names)
    found = read_file(tmp_path / "x" / "model.safetensors")["b"]
    assert found == Tensor(dtype("int16"), np.ascontiguousarray(whole["a"].bits.swapaxes(1, 2)))


@pytest.mark.linux_only(reason="memory is read from /proc")
@pytest.mark.parametrize("form", keep_spread(1, ("per_expert", "stacked"), "the other direction"))
def test_fusing_experts_takes_bounded_memory(tmp_path: Path, form: str) -> None:
    """Of 256 MB of experts."""
    of = "model.layers.0.mlp.experts."
    shapes: dict[str, tuple[int, ...]] = {
        f"{of}gate_up_proj": (16, 2048, 2048),
        f"{of}down_proj": (16, 2048, 1024),
    }
    if form == "per_expert":
        shapes = {
            f"{of}{e}.{one}_proj.weight": (2048, 1024) if one == "down" else (1024, 2048)
            for e in range(16)
            for one in ("gate", "up", "down")
        }
    source = write_holes(tmp_path / "source", shapes)
    config = {"model_type": "qwen3_moe", "num_experts": 16, "num_attention_heads": 4}
    (source / "config.json").write_text(json.dumps(config))
    how = {"to": "full", "target_names": "vllm", **PARTIAL}
    peak_bytes = measure(source, tmp_path / "target", how, extra_bytes=32 << 20)
    assert peak_bytes < (32 << 20) + SLACK_BYTES


def test_what_is_no_stack(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "num_experts": 4, "num_attention_heads": 4}
    of = "model.layers.0.mlp.experts."
    for number, (name, shape, match) in enumerate(
        [
            (f"{of}gate_up_proj", (3, 4, 2), r"shape \[3, 4, 2\], in which 4 are stacked"),
            (f"{of}gate_up_proj", (4, 3, 2), "length 3 cannot be cut into 1 groups"),
            (f"{of}gate_up_proj", (4,), "is fused along dimension 0"),
            (f"{of}2.down_proj.weight", (4, 4), r"has no '.*experts\.0\.down_proj\.weight'"),
        ]
    ):
        folder = folder_with(tmp_path / f"{number}", {name: tensor("int16", shape)}, config)
        with pytest.raises(RecipeError, match=match):
            checkpoint.convert(
                folder, tmp_path / "x", to="full", recipe="auto", target_names="vllm"
            )
