"""Which prefix is a trainer's: for every recorded model type, under prefixes of trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpoint.checkpoint_files import tensor, write_file
from engines.names.replay import read_records, recorded_model_types
from reshard import checkpoint
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.pretrained.names import (
    ModelNames,
    base_prefix,
    find_model_names,
    model_name,
    take_weights,
)
from reshard.errors import CheckpointError, RecipeError
from reshard.recipes.library import choose_recipe

PREFIXES = ("", "model.", "module.", "state_dict.model.")


def names_in(config: dict[str, Any], *names: str, **options: Any) -> ModelNames:
    """How these names are taken."""
    held: Any = dict.fromkeys(names)
    found = Checkpoint(Path("folder"), "a format", held, ())
    return find_model_names(found, choose_recipe(config), config, **options)


def forms(record: dict[str, Any]) -> dict[str, list[str]]:
    """The names of classes with heads, of those without, and of the base model alone."""
    names, base = record["tensors"], base_prefix(record["config"])
    bare = [name for name in names if base and base + name in names]
    return {
        "with heads": [name for name in names if name not in {*bare}],
        "without": [name for name in names if base and name.startswith(base)],
        "base": bare,
    }


@pytest.mark.parametrize("model_type", recorded_model_types())
def test_every_recorded_model_type(model_type: str) -> None:
    record = read_records(model_type)[0]
    base = base_prefix(record["config"])
    for form, names in forms(record).items():
        for prefix in PREFIXES if names else ():
            found = names_in(record["config"], *(prefix + name for name in names))
            assert found.convention is None
            # A base model under `model.` has the names of a class with heads: as good.
            as_good = form == "base" and prefix.endswith(base or ".")
            right = {prefix, prefix.removesuffix(base)} if as_good else {prefix}
            assert found.prefix in right, (form, prefix, found)


LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 4}


def test_a_prefix_of_two_kinds() -> None:
    layer = "model.layers.0.mlp.up_proj.weight"
    assert names_in(LLAMA, f"model.{layer}", "model.lm_head.weight").prefix == "model."
    assert names_in(LLAMA, layer, "lm_head.weight").prefix == ""
    # What is not the model's may stand beside it.
    names = (f"actor.{layer}", "actor.model.norm.weight", "actor.lm_head.weight", "v_head.weight")
    assert names_in(LLAMA, *names).prefix == "actor."


def test_ambiguous_names_are_refused() -> None:
    names = ("a.b.layers.0.mlp.up_proj.weight", "a.b.embed_tokens.weight")
    says = r"fit the model type 'llama' without any of several prefixes: choose with --strip-"
    with pytest.raises(RecipeError, match=says):
        names_in(LLAMA, *names)
    assert names_in(LLAMA, *names, keeps_prefix=True).prefix == ""


def test_names_of_megatron() -> None:
    names = [
        f"decoder.layers.0.{one}.weight"
        for one in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1")
    ]
    assert names_in(LLAMA, *names, "output_layer.weight") == ModelNames("", "megatron")
    held = names_in(LLAMA, *(f"model.{name}" for name in (*names, "output_layer.weight")))
    assert held == ModelNames("model.", "megatron")


def test_without_a_recipe_the_state_of_the_trainer_decides() -> None:
    unknown = {"model_type": "unheard-of"}
    assert names_in(unknown, "model.a.w", "model.b.w").prefix == ""
    found = names_in(unknown, "model.a.w", "model.b.w", containers=["model."])
    assert found.prefix == "model."
    assert "no recipe is for the model type 'unheard-of'" in found.notes[0]
    assert names_in(unknown, "model.a.w", "b.w", containers=["model."]).prefix == ""


def saved(folder: Path, *names: str) -> Checkpoint:
    """A checkpoint of tensors of such names; those of steps are scalars."""
    tensors = {
        name: tensor("float32", () if name.endswith("step") else (2, 3), seed)
        for seed, name in enumerate(names)
    }
    write_file(folder / "model.safetensors", tensors)
    return checkpoint.open(folder / "model.safetensors")


def test_omitted_optimizer_state_is_reported(tmp_path: Path) -> None:
    opened = saved(
        tmp_path,
        "model.a.w",
        "model.b.w",
        "optim.state.a.w.exp_avg",
        "optim.state.a.w.step",
        "optim.state.b.w.exp_avg",
        "rng_state",
    )
    found = take_weights(opened)
    assert [*found] == ["model.a.w", "model.b.w"]
    assert found.notes[-1] == (
        "left out, since a model folder has weights alone: 3 tensors of optimizer state (first: "
        "optim.state.a.w.exp_avg), 1 other tensor (first: rng_state)"
    )


def test_omitted_values_and_items_are_reported(tmp_path: Path) -> None:
    opened = saved(tmp_path, "a.w")
    held = Checkpoint(
        opened.folder,
        opened.format,
        opened.tensors,
        opened.files,
        values={"step": 3},
        unread=(("scheduler", "an object"),),
    )
    found = take_weights(held)
    assert (found.values, found.unread) == ({}, ())
    assert "2 values (first: step)" in found.notes[-1]
    assert take_weights(opened).notes == ()


@pytest.mark.parametrize(
    ("name", "becomes"),
    [
        ("module.a.w", "a.w"),
        ("_orig_mod.module.a.w", "a.w"),
        ("a.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.w", "a.layers.0.w"),
        ("base_model.model.model.layers.0.w", "model.layers.0.w"),
        ("model.base_model.model.lm_head.w", "model.lm_head.w"),
        ("base_model.model.q_proj.base_layer.weight", "q_proj.weight"),
        ("base_model.model.head.modules_to_save.default.w", "head.w"),
        ("model.module_list.0.w", "model.module_list.0.w"),
    ],
)
def test_wrappers_go(name: str, becomes: str) -> None:
    assert model_name(name) == becomes


def test_the_trained_copy_of_a_module_is_taken(tmp_path: Path) -> None:
    head = "base_model.model.head"
    names = (f"{head}.original_module.w", f"{head}.modules_to_save.default.w")
    opened = saved(tmp_path, *names)
    found = take_weights(opened)
    assert [*found] == ["head.w"]
    assert found["head.w"].binding == opened[names[1]].binding
    alone = take_weights(saved(tmp_path, f"{head}.original_module.w"))
    assert [*alone] == ["head.w"]


def test_extra_states_of_megatron_are_not_weights(tmp_path: Path) -> None:
    assert [*take_weights(saved(tmp_path, "a.w", "a._extra_state"))] == ["a.w"]


def test_checkpoints_without_a_model_are_refused(tmp_path: Path) -> None:
    adapters = ("q.base_layer.weight", "q.lora_A.default.weight", "q.lora_B.default.weight")
    with pytest.raises(CheckpointError, match=r"2 tensors of adapters beside.*merge them"):
        take_weights(saved(tmp_path, *adapters))
    with pytest.raises(CheckpointError, match="has no weights"):
        take_weights(saved(tmp_path, "rng_state"))
    with pytest.raises(CheckpointError, match="optimizer state and no weights"):
        take_weights(saved(tmp_path, "optim.state.a.w.exp_avg", "optim.state.a.w.step"))
    with pytest.raises(RecipeError, match=r"would both be 'a\.w'"):
        take_weights(saved(tmp_path, "module.a.w", "a.w"))


def test_weights_of_flax_are_refused(tmp_path: Path) -> None:
    """Their matrices are the other way round, which other names do not mend."""
    opened = saved(tmp_path, "params.model.layers.0.mlp.up_proj.kernel", "params.model.norm.weight")
    with pytest.raises(CheckpointError, match="1 weight of Flax's modules, such as"):
        take_weights(opened)


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
    for name, stored in made().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = 4 if "q_proj" in name else 2
            halves = stored.view(heads, 2, stored.shape[0] // heads // 2, 16)
            stored = halves.transpose(1, 2).reshape(stored.shape)
        for own, other in PLACES.items():
            name = name.replace(own, other)
        name = name.removeprefix("model.")
        if new:
            name = name.replace("attention.wo", "attention/wo").replace("output", "lm_head")
            name = name.replace("attention.w", "attention.qkv_linear.w").replace("/", ".")
        found[name] = stored
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
        for name, stored in theirs().items():
            if "norm" in name:
                part[name] = stored
                continue
            is_columns = ".wo." in name or ".w2." in name or ("tok_" in name and not rows)
            part[name] = stored.chunk(ranks, int(is_columns))[rank].clone()
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
    for name, stored in expected.items():
        assert checkpoint.read_tensor(opened, name).tobytes() == stored.numpy().tobytes(), name
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


def test_a_plain_rename_keeps_the_rows_and_notes_it(tmp_path: Path) -> None:
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
