"""Model folders of small training checkpoints, by the command and from Python.

That transformers loads them is tried in `tests/engines`: `transformers_loading/test_pretrained.py`
and, of what other programs saved, `pretrained/test_records.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpoint.checkpoint_files import Tensor, read_file, read_metadata, tensor, write_file
from cli.command_runs import run_here
from engines.pretrained.small_llama import SAVED, read_record
from reshard import checkpoint
from reshard.errors import CheckpointError, FormatError, RecipeError, UsageError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 4,
    "vocab_size": 10,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def weights(**more: Tensor) -> dict[str, Tensor]:
    """The tensors of a very small Llama."""
    shapes = {"model.embed_tokens.weight": (10, 4), "model.norm.weight": (4,)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{one}_proj.weight": (4, 4) for one in "qkvo"}
        shapes |= {f"{at}.mlp.{one}_proj.weight": (6, 4) for one in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (4, 6), f"{at}.input_layernorm.weight": (4,)}
        shapes[f"{at}.post_attention_layernorm.weight"] = (4,)
    shapes["lm_head.weight"] = (10, 4)
    made = {
        name: Tensor(one.dtype, np.arange(one.bits.size, dtype=np.float32).view(np.uint32)
                     .reshape(shape) if one.dtype.name == "float32" else one.bits)
        for seed, (name, shape) in enumerate(shapes.items())
        if (one := tensor("float32", shape, seed))
    }  # fmt: skip
    return {**made, **more}


def write_state(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """Tensors with a config beside them."""
    folder.mkdir()
    write_file(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def make(source: Path, target: Path, **options: Any) -> dict[str, Tensor]:
    """The tensors of the model folder."""
    checkpoint.run_conversion(checkpoint.plan_for_pretrained(source, target, **options))
    return read_file(target / "model.safetensors")


def test_a_training_state_of_torch(tmp_path: Path) -> None:
    """Saved by torch's DCP, with an optimizer's state; tokenizer files come along."""
    named = {
        name: torch.from_numpy(one.bits.view(np.float32).copy()) for name, one in weights().items()
    }
    state = {
        "model": named,
        "optim": {
            "state": {
                name: {"exp_avg": torch.zeros_like(one), "step": torch.tensor(1.0)}
                for name, one in named.items()
            },
            "param_groups": [{"lr": 0.1, "params": [*named]}],
        },
        "step": 12,
        "rng_state": torch.zeros(8, dtype=torch.uint8),
    }
    source, target = tmp_path / "step-12", tmp_path / "model"
    dcp.save(state, checkpoint_id=source, no_dist=True)
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "generation_config.json", "trainer_state.json"):
        (config / name).write_text("{}")
    missing = run_here("convert", source, target, "--for", "hf")
    assert (missing.code, "no config.json in" in missing.errors) == (2, True)
    run = run_here("convert", source, target, "--for", "hf", "--config", config)
    assert run.code == 0, run.errors
    for text in ("of optimizer state", "rng_state", "config.json and 2 files beside it of"):
        assert text in run.output
    assert read_file(target / "model.safetensors") == weights()
    assert {path.name for path in target.iterdir()} == {
        *("config.json", "generation_config.json", "tokenizer.json", "model.safetensors"),
        "reshard.manifest.json",
    }
    written = json.loads((target / "config.json").read_text())
    assert written == {**CONFIG, "torch_dtype": "float32"}
    assert not checkpoint.check_digests(checkpoint.open(target)).damaged
    again = run_here("convert", source, target, "--for", "hf", "--config", config)
    assert again.code == 2


@pytest.mark.parametrize(
    "prefix", ["", "model.", "module.", "_orig_mod.", "base_model.model.", "state_dict.model."]
)
def test_prefixes(prefix: str, tmp_path: Path) -> None:
    state = {prefix + name: one for name, one in weights().items()}
    assert make(write_state(tmp_path / "state", state), tmp_path / "hf") == weights()


def test_two_models_are_never_guessed(tmp_path: Path) -> None:
    """The files of a trainer and of safetensors; `select` takes one, and `verify` compares it."""
    average = {name: Tensor(one.dtype, one.bits[::-1].copy()) for name, one in weights().items()}
    state = {f"net.{name}": one for name, one in weights().items()}
    state |= {f"net_ema.module.{name}": one for name, one in average.items()}
    state |= {"net_ema.n_averaged": tensor("float32", (), 0)}
    source, target = write_state(tmp_path / "state", state), tmp_path / "hf"
    says = (
        r"2 models .*: net \(21 tensors\), net_ema \(21 tensors\)\. Choose one with --select net "
    )
    with pytest.raises(RecipeError, match=says):
        make(source, target)
    # Told to take a prefix off, nothing else is taken off; the other model is one too many.
    with pytest.raises(RecipeError, match=r"names without a prefix .*--exclude 'net_ema\.\*'"):
        make(source, target, strip_prefix=["net."])
    assert make(source, target, select="net_ema") == average
    assert make(source, tmp_path / "net", exclude=["net_ema.*"]) == weights()
    same = run_here("verify", source, target, "--for", "hf", "--select", "net_ema")
    assert same.code == 0, same.errors
    assert run_here("verify", source, target, "--for", "hf", "--select", "net").code == 1


def test_names_that_the_user_gives(tmp_path: Path) -> None:
    state = {f"a.b.{name}": one for name, one in weights().items()}
    source = write_state(tmp_path / "state", state)
    assert make(source, tmp_path / "hf", strip_prefix=["a.b."]) == weights()
    assert make(source, tmp_path / "other", rename=["a.b.*=*"]) == weights()


def test_names_of_megatron(tmp_path: Path) -> None:
    plain = write_state(tmp_path / "model", weights())
    checkpoint.convert(
        plain, tmp_path / "megatron", to="tp=2", recipe="auto", target_names="megatron",
        format="torch-dcp",
    )  # fmt: skip
    assert make(tmp_path / "megatron", tmp_path / "hf") == weights()
    assert make(tmp_path / "megatron", tmp_path / "b", source_names="megatron") == weights()


def test_rows_that_pad_the_vocabulary_are_cut_off(tmp_path: Path) -> None:
    padded = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        bits = weights()[name].bits
        padded[name] = Tensor(weights()[name].dtype, np.concatenate([bits, bits[:6]]))
    source = write_state(tmp_path / "state", weights(**padded))
    plan = checkpoint.plan_for_pretrained(source, tmp_path / "hf")
    assert any("cut to the 10 rows of config.json's vocab_size" in note for note in plan.notes)
    assert make(source, tmp_path / "hf") == weights()


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    same = weights(**{"lm_head.weight": weights()["model.embed_tokens.weight"]})
    found = make(write_state(tmp_path / "a", same, tie_word_embeddings=True), tmp_path / "hf")
    assert found.keys() == weights().keys() - {"lm_head.weight"}
    # Of an untied model both are kept, though they are equal.
    assert make(write_state(tmp_path / "b", same), tmp_path / "untied") == same


def test_differing_tied_weights_are_reported(tmp_path: Path) -> None:
    other = weights(**{"lm_head.weight": tensor("float32", (10, 4), 99)})
    source = write_state(tmp_path / "state", other, tie_word_embeddings=True)
    plan = checkpoint.plan_for_pretrained(source, tmp_path / "hf")
    assert any("config.json ties lm_head.weight to" in note for note in plan.notes)
    assert make(source, tmp_path / "hf") == other
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is False


def test_types(tmp_path: Path) -> None:
    """All are cast: of a model trained in float32 none was kept so on purpose."""
    source = write_state(tmp_path / "state", weights(), text_config={"dtype": "float32"})
    found = make(source, tmp_path / "hf", dtype="bf16")
    assert {one.dtype.name for one in found.values()} == {"bfloat16"}
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (written["torch_dtype"], written["text_config"]["dtype"]) == ("bfloat16", "bfloat16")


def test_files_of_a_size(tmp_path: Path) -> None:
    source = write_state(tmp_path / "state", weights())
    run = run_here("convert", source, tmp_path / "hf", "--for", "hf", "--max-file", "500B")
    assert run.code == 0
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights().keys()


def test_plan_and_dry_run(tmp_path: Path) -> None:
    state = {f"model.{name}": one for name, one in weights().items()}
    source = write_state(tmp_path / "state", state)
    planned = run_here("plan", source, "--for", "hf", "--json")
    assert {one["name"] for one in planned.json["tensors"]} == weights().keys()
    dry = run_here("convert", source, tmp_path / "hf", "--for", "hf", "--dry-run")
    assert (dry.code, "model.layers.1.mlp.up_proj.weight" in dry.output) == (0, True)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--rule", "*=tp"), "--for hf with --rule: a model folder has whole weights"),
        (("--to", "tp=2"), "--for hf with --to tp=2: its tensors are whole"),
        (("--strategy", "simple"), "--for hf with --strategy"),
        (("--config", "nothing"), "no config.json at nothing"),
    ],
)
def test_options_that_it_does_not_take(tmp_path: Path, options: tuple, says: str) -> None:
    source = write_state(tmp_path / "state", weights())
    run = run_here("convert", source, tmp_path / "hf", "--for", "hf", *options)
    assert (run.code, says in run.errors) == (2, True), run.errors
    alone = run_here("convert", source, tmp_path / "hf", "--to", "full", "--config", "x")
    assert "--config is for --for hf" in alone.errors


def test_missing_state_is_reported(tmp_path: Path) -> None:
    whole = weights()
    part = {name: one for name, one in whole.items() if ".layers.0." not in name}
    with pytest.raises(CheckpointError, match=r"lacks layer 0, of 2 that config.json says"):
        checkpoint.plan_for_pretrained(write_state(tmp_path / "a", part), tmp_path / "hf")
    headless = {name: one for name, one in whole.items() if name != "lm_head.weight"}
    with pytest.raises(CheckpointError, match="has no output layer"):
        checkpoint.plan_for_pretrained(write_state(tmp_path / "b", headless), tmp_path / "hf")
    bad = write_state(tmp_path / "c", whole)
    (bad / "config.json").write_text('{"hidden_size": 4}')
    with pytest.raises(FormatError, match="is no config of a model: it has no `model_type`"):
        checkpoint.plan_for_pretrained(bad, tmp_path / "hf")
    with pytest.raises(UsageError, match="a config 3; give the path"):
        checkpoint.plan_for_pretrained(bad, tmp_path / "hf", config=3)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="no names of 'nobody'"):
        checkpoint.plan_for_pretrained(
            write_state(tmp_path / "d", whole), tmp_path / "hf", source_names="nobody"
        )


def test_a_model_of_no_known_type(tmp_path: Path) -> None:
    named = {f"body.{n}.w": torch.ones(3, 2) for n in range(2)}
    state = {"model": named, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "state", no_dist=True)
    (tmp_path / "state" / "config.json").write_text('{"model_type": "unheard-of"}')
    plan = checkpoint.plan_for_pretrained(tmp_path / "state", tmp_path / "hf")
    assert [*plan.write_plan.tensors] == ["body.0.w", "body.1.w"]
    assert any("no recipe is for the model type 'unheard-of'" in note for note in plan.notes)


def test_config_of_the_folder_of_verl(tmp_path: Path) -> None:
    source = write_state(tmp_path / "actor", weights())
    (source / "huggingface").mkdir()
    (source / "config.json").rename(source / "huggingface" / "config.json")
    (source / "huggingface" / "tokenizer.json").write_text("{}")
    make(source, tmp_path / "hf")
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    assert (tmp_path / "hf" / "config.json").exists()


@pytest.mark.parametrize(("name", "saved"), [(n, one) for n, of in SAVED.items() for one in of])
def test_checkpoints_saved_by_real_programs(name: str, saved: str, tmp_path: Path) -> None:
    """DeepSpeed, FSDP2, Megatron-core, Orbax and torch: the live model's weights, bit for bit."""
    record = read_record(name, tmp_path)
    live = torch.load(record / "live.pt")
    # A universal checkpoint has 32-bit weights alone.
    dtype = ("--dtype", "bf16") if saved == "universal" else ()
    run = run_here(
        "convert", record / saved, tmp_path / "hf", "--for", "hf",
        "--config", record / "config.json", *dtype,
    )  # fmt: skip
    assert run.code == 0, run.errors
    made = checkpoint.open(tmp_path / "hf")
    assert made.tensors.keys() == live.keys() - ({"lm_head.weight"} if is_tied(record) else set())
    for key in made:
        expected = live[key].contiguous()
        assert made[key].dtype.name == str(expected.dtype).removeprefix("torch."), key
        bits = np.asarray(checkpoint.read_tensor(made, key)).tobytes()
        assert bits == expected.view(torch.uint8).numpy().tobytes(), key


def is_tied(record: Path) -> bool:
    found = json.loads((record / "config.json").read_text())
    return bool(found["tie_word_embeddings"])


def test_verified_without_being_written(tmp_path: Path) -> None:
    """`verify --for hf`: as the folder that `convert --for hf` would write."""
    record = read_record("megatron-tp", tmp_path)
    config = ("--config", record / "config.json")
    made = run_here("convert", record / "legacy", tmp_path / "hf", "--for", "hf", *config)
    assert made.code == 0, made.errors
    same = run_here("verify", record / "torch_dist", tmp_path / "hf", "--for", "hf")
    assert (same.code, "the same 21 tensors" in same.output) == (0, True), same.errors
    assert checkpoint.compare_pretrained(record / "legacy", tmp_path / "hf").is_same
    cast = tmp_path / "bf16"
    run_here("convert", record / "legacy", cast, "--for", "hf", *config, "--dtype", "bf16")
    differs = run_here("verify", record / "legacy", cast, "--for", "hf")
    assert (differs.code, "has dtypes float32 and bfloat16" in differs.output) == (1, True)
    assert run_here("verify", record / "legacy", cast, "--for", "hf", "--dtype", "bf16").code == 0
    # One element of one tensor.
    path = tmp_path / "hf" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    differs = run_here("verify", record / "torch_dist", tmp_path / "hf", "--for", "hf", "--json")
    found = json.loads(differs.output)
    assert (differs.code, [one["elements"] for one in found["differences"]]) == (1, [1])


def test_a_model_that_ties_and_stores_both_is_the_same(tmp_path: Path) -> None:
    """As a program without ties wrote it: the model is the same."""
    same = weights(**{"lm_head.weight": weights()["model.embed_tokens.weight"]})
    state = {f"module.{name}": one for name, one in weights().items() if name != "lm_head.weight"}
    ours = write_state(tmp_path / "a", state, tie_word_embeddings=True)
    model = write_state(tmp_path / "b", same, tie_word_embeddings=True)
    assert checkpoint.compare_pretrained(ours, model).is_same
    norm = weights()["model.norm.weight"]
    other = {**same, "model.norm.weight": Tensor(norm.dtype, norm.bits + 1)}
    model = write_state(tmp_path / "c", other, tie_word_embeddings=True)
    found = checkpoint.compare_pretrained(ours, model)
    assert [(one.name, one.elements) for one in found.differences] == [("model.norm.weight", 4)]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--right-names", "megatron", "--for", "hf"], "--right-names with --for hf"),
        (["--config", "c"], "--config is for --for hf"),
        (["--for", "vllm"], "'vllm' is not 'hf'"),
    ],
)
def test_unverifiable_models_are_refused(tmp_path: Path, options: list[str], error: str) -> None:
    state = write_state(tmp_path / "a", weights())
    run = run_here("verify", state, state, *options)
    assert (run.code, error in run.errors) == (2, True), run.errors


@pytest.mark.parametrize("saved", ["np", "flax"])
def test_files_are_those_of_pytorch(tmp_path: Path, saved: str) -> None:
    source = write_state(tmp_path / "source", weights())
    write_file(source / "model.safetensors", weights(), {"format": saved, "step": "7"})
    make(source, tmp_path / "out")
    assert read_metadata(tmp_path / "out" / "model.safetensors") == {"format": "pt", "step": "7"}


def test_names_for_another_program_are_checked_too(tmp_path: Path) -> None:
    """A recipe alone and names of another program are claims to the architecture as well."""
    tensors = weights()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    source = write_state(tmp_path / "s", tensors, intermediate_size=6)
    by_recipe: Any = {"to": "tp=2", "recipe": "llama"}
    with pytest.raises(CheckpointError, match=r"1 tensor missing: model.layers.1.mlp.up_proj"):
        checkpoint.plan_conversion(source, tmp_path / "t", **by_recipe)
    plan = checkpoint.plan_conversion(source, tmp_path / "t", allow=["incomplete"], **by_recipe)
    assert any("incomplete: 1 tensor missing: model.layers.1" in note for note in plan.notes)
    tensors["model.layers.1.mlp.up_proj.weight"] = weights()["model.layers.1.mlp.up_proj.weight"]
    source = write_state(tmp_path / "more", {**tensors, "model.x": tensors["model.norm.weight"]})
    arguments: Any = {"to": "tp=2", "recipe": "llama", "target_names": "sglang"}
    with pytest.raises(CheckpointError, match=r"1 tensor unknown: model.x"):
        checkpoint.plan_conversion(source, tmp_path / "t", allow=["uncomputable"], **arguments)
