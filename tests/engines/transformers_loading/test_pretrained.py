"""Model folders of training checkpoints: `from_pretrained` of transformers gives the live model.

Models of every family that is judged are saved as trainers do, made model folders by `--for hf`,
and loaded: every weight and the outputs must be the live model's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("RESHARD_ENGINE") != "transformers":
    pytest.skip("needs transformers", allow_module_level=True)

import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

from engines.judge.family import Family, load_families
from reshard.checkpoint import plan_for_pretrained, run_conversion
from reshard.errors import CheckpointError

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
# One of each kind: dense, tied, experts, gpt-2's, state space, encoder, encoder-decoder, vision.
TRAINED = ("llama", "gemma2", "qwen3_moe", "gpt2", "mixtral", "t5", "qwen2_vl", "deepseek_v3")


def build(family: Family, **changes: Any) -> Any:
    """A live model with random weights, as its config makes it."""
    config = transformers.AutoConfig.for_model(**{**family.config, **changes})
    model_class = getattr(transformers, family.auto)
    if family.auto.startswith("Auto"):
        model_class = model_class._model_mapping[type(config)]
    torch.manual_seed(0)
    model = model_class(config).eval()
    config.architectures = [model_class.__name__]
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape) * 0.05)
    model.tie_weights()
    # Grouped products want widths that these odd models have not.
    model.config._experts_implementation = "eager"
    return model


def flat_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def save_config(model: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)


def train(model: Any) -> torch.optim.Optimizer:
    """One step of AdamW, on gradients that need no data."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.grad = torch.randn_like(parameter) * 0.01
    optimizer.step()
    return optimizer


def save_dcp(model: Any, folder: Path) -> None:
    """A whole training state, as PyTorch's own examples save it."""
    optimizer = train(model)
    weights, state = get_state_dict(model, optimizer)
    save_config(model, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = {"model": weights, "optim": state, "step": 7, "rng_state": torch.get_rng_state()}
        dcp.save(values, checkpoint_id=folder, no_dist=True)


def save_wrapped(prefix: str) -> Any:
    def save(model: Any, folder: Path) -> None:
        save_config(model, folder)
        tensors = {prefix + name: t for name, t in flat_tensors(model.state_dict()).items()}
        save_file(tensors, folder / "model.safetensors")

    return save


def save_compiled(model: Any, folder: Path) -> None:
    save_config(model, folder)
    compiled = torch.compile(model)
    save_file(flat_tensors(compiled.state_dict()), folder / "model.safetensors")


def save_peft(model: Any, folder: Path) -> None:
    """The state of a model under PEFT after its adapters were merged, base layers and all."""
    save_wrapped("base_model.model.")(model, folder)


SAVERS = {
    "dcp": save_dcp,
    "ddp": save_wrapped("module."),
    "compiled": save_compiled,
    "peft": save_peft,
    "lightning": save_wrapped("state_dict.model."),
    "plain": save_wrapped(""),
}


def outputs(model: Any, family: Family) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        found = model(**family.inputs(model.config, generator))
    return family.outputs(found)


def check(model: Any, family: Family, folder: Path, **options: Any) -> Any:
    """Make a model folder of a checkpoint, load it, and compare."""
    target = folder.with_name(f"{folder.name}-hf")
    run_conversion(plan_for_pretrained(folder, target, **options))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded, report = type(model).from_pretrained(target, output_loading_info=True)
    assert not report["missing_keys"], report
    assert not report["mismatched_keys"], report
    ours, theirs = loaded.state_dict(), model.state_dict()
    loaded.config._experts_implementation = "eager"
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor.to(ours[name].dtype)), name
    assert {one.dtype for one in ours.values()} == {one.dtype for one in theirs.values()}
    return loaded


def families(names: tuple[str, ...] | None = None) -> list[Family]:
    found = load_families()
    return [found[name] for name in names or found]


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("family", families(TRAINED), ids=lambda one: one.name)
def test_from_pretrained_loads_what_a_trainer_saved(
    family: Family, saver: str, tmp_path: Path
) -> None:
    model = build(family)
    SAVERS[saver](model, tmp_path / saver)
    loaded = check(model, family, tmp_path / saver)
    expected, found = outputs(model, family), outputs(loaded.eval(), family)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", families(), ids=lambda one: one.name)
def test_every_judged_family(family: Family, tmp_path: Path) -> None:
    """Under a trainer's prefix, all of them."""
    model = build(family)
    save_wrapped("model.")(model, tmp_path / "state")
    check(model, family, tmp_path / "state")


def test_two_ranks_of_fsdp(tmp_path: Path) -> None:
    """FSDP2 with its optimizer, saved by real ranks through torch's DCP."""
    cases, models = [], {}
    for family in families(("llama", "qwen3_moe", "gemma2")):
        model = build(family)
        model.save_pretrained(tmp_path / family.name)
        out = tmp_path / f"{family.name}-saved"
        cases.append({"folder": str(tmp_path / family.name), "out": str(out)})
        models[family.name] = model
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    program = Path(__file__).with_name("trainer_process.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(program), str(tmp_path / "cases.json")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for case in cases:
        target = tmp_path / f"{Path(case['out']).name}-hf"
        plan = plan_for_pretrained(case["out"], target, config=case["folder"])
        assert any("tensors of optimizer state" in note for note in plan.notes)
        run_conversion(plan)
        model = models[Path(case["folder"]).name]
        loaded = type(model).from_pretrained(target)
        expected = torch.load(f"{case['out']}.pt")
        assert loaded.state_dict().keys() == expected.keys()
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
        assert (target / "generation_config.json").exists()


def test_names_of_megatron_and_padded_vocabularies(tmp_path: Path) -> None:
    from reshard.checkpoint import convert

    (family,) = families(("qwen3_moe",))
    model = build(family)
    model.save_pretrained(tmp_path / "model")
    convert(
        tmp_path / "model", tmp_path / "megatron", to="tp=2", recipe="auto",
        target_names="megatron", format="torch-dcp",
    )  # fmt: skip
    loaded = check(model, family, tmp_path / "megatron")
    torch.testing.assert_close(outputs(loaded, family), outputs(model, family), rtol=0, atol=0)


def test_another_type(tmp_path: Path) -> None:
    (family,) = families(("llama",))
    model = build(family).to(torch.float32)
    save_dcp(model, tmp_path / "state")
    run_conversion(plan_for_pretrained(tmp_path / "state", tmp_path / "bf16", dtype="bf16"))
    loaded = type(model).from_pretrained(tmp_path / "bf16")
    assert loaded.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(torch.bfloat16)), name


def test_a_model_under_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    (family,) = families(("llama",))
    model = build(family)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        wrapped.base_model.model.lm_head.modules_to_save["default"].weight.add_(1.0)
    save_config(model, tmp_path / "state")
    save_file(flat_tensors(wrapped.state_dict()), tmp_path / "state" / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensors of adapters beside the weights"):
        plan_for_pretrained(tmp_path / "state", tmp_path / "hf")
    # Adapters that are nothing yet may be left out.
    run_conversion(plan_for_pretrained(tmp_path / "state", tmp_path / "hf", exclude=["*.lora_*"]))
    loaded = type(model).from_pretrained(tmp_path / "hf")
    expected = wrapped.merge_and_unload().state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_an_adapter_is_merged(tmp_path: Path) -> None:
    """A base saved by a trainer, and an adapter of peft beside it."""
    peft = pytest.importorskip("peft")
    (family,) = families(("llama",))
    model = build(family).to(torch.float32)
    save_wrapped("model.")(model, tmp_path / "state")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4)
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    wrapped.save_pretrained(tmp_path / "adapter")
    run_conversion(
        plan_for_pretrained(tmp_path / "state", tmp_path / "hf", adapters=[tmp_path / "adapter"])
    )
    loaded = type(model).from_pretrained(tmp_path / "hf")
    expected = wrapped.merge_and_unload().state_dict()
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
