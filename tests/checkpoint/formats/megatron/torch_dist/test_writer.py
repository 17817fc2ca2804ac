"""New `torch_dist` checkpoints: the keys, shapes and states that Megatron-core looks for."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoint.formats.megatron.recordings import expect_same, state_of, unpack
from reshard import checkpoint
from reshard.checkpoint import open_checkpoint, read_tensor
from reshard.checkpoint.formats.torch_dcp.reader import read as read_dcp
from reshard.checkpoint.formats.torch_files.reading import read_torch_file
from reshard.errors import RecipeError
from selection import keep_covering

SAME = ["tensor", "stages", "experts", "undistributed", "virtual"]


def convert(source: Path, target: Path, **arguments: Any) -> Path:
    checkpoint.convert(source, target, **{"to": "full", "format": "torch-dist", **arguments})
    return target


@pytest.mark.parametrize(
    ("name", "how"),
    keep_covering(
        1, itertools.product(SAME, ("fully_reshardable", "legacy")), "a source by its other form"
    ),
)
def test_keys_and_elements_are_those_of_megatron(name: str, how: str, tmp_path: Path) -> None:
    folder = unpack(name, tmp_path)
    target = convert(folder / how, tmp_path / "target")
    expect_same(state_of(target), state_of(folder / "fully_reshardable"))
    ours, theirs = read_dcp(target), read_dcp(folder / "fully_reshardable")
    shapes = [{key: tensor.shape for key, tensor in one.tensors.items()} for one in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert {key for key in theirs.items if "_extra_state" in key} <= {*ours.items}
    common = [read_torch_file(one / "common.pt") for one in (target, folder / "fully_reshardable")]
    for one in common:
        # An object of another read is another object; groups may say more than was asked.
        one["args"] = one["args"].state
        one["content_metadata"].pop("distrib_optim_fully_reshardable_mem_efficient", None)
    if name == "experts":
        common = [dict(one, optimizer=None) for one in common]
    assert common[0] == common[1]
    assert json.loads((target / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    # The manifest gives the digests back.
    opened = checkpoint.open(target)
    assert not checkpoint.check_digests(opened).damaged
    values = [dict(one.values) for one in (opened, checkpoint.open(folder / "fully_reshardable"))]
    if name == "experts":
        # Experts that are not parallel are in the groups of everything else.
        values = [{key: v for key, v in one.items() if "param_groups" not in key} for one in values]
    assert values[0] == values[1]


def test_experts_over_ranks_have_an_optimizer_of_their_own(tmp_path: Path) -> None:
    source = unpack("experts", tmp_path) / "fully_reshardable"
    rules = ["optimizer.*=...", "*=..."]
    target = convert(source, tmp_path / "target", to="ep=4", rules=rules)
    common = read_torch_file(target / "common.pt")
    assert common["args"].state["expert_model_parallel_size"] == 4
    assert sorted(common["optimizer"]) == [0, 1]
    marks = [
        {
            group["is_expert_parallel"]
            for group in common["optimizer"][n]["optimizer"]["param_groups"]
        }
        for n in (0, 1)
    ]
    assert marks == [{False}, {True}]


@pytest.mark.parametrize("how", ["fully_reshardable", "legacy", "dp_reshardable"])
def test_every_optimizer_gets_the_loss_scaler(how: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    folder = unpack("scaled", tmp_path)
    source = checkpoint.open(folder / how)
    said = {name: value for name, value in source.values.items() if "scaler" in name}
    assert said == {
        "optimizer.grad_scaler.scale": 256.0,
        "optimizer.grad_scaler.growth_tracker": 2,
        "optimizer.grad_scaler.hysteresis_tracker": 2,
    }
    assert not [name for name, _ in source.unread if "scale" in name]
    target = convert(folder / how, tmp_path / "target", to="ep=2", rules=["*=..."])
    found, expected = (
        torch.load(one / "common.pt", weights_only=False)["optimizer"]
        for one in (target, folder / "fully_reshardable")
    )
    assert sorted(found) == sorted(expected) == [0, 1]
    for number, optimizer in found.items():
        scaler, theirs = optimizer["grad_scaler"], expected[number]["grad_scaler"]
        assert sorted(scaler) == sorted(theirs)
        assert torch.equal(scaler.pop("scale"), theirs["scale"])
        assert scaler == {key: theirs[key] for key in scaler}


def test_layers_that_differ_are_numbered(tmp_path: Path) -> None:
    source = unpack("tensor", tmp_path) / "fully_reshardable"
    exclude = ["*layers.1.mlp.linear_fc2.weight*"]
    target = convert(source, tmp_path / "target", exclude=exclude)
    found = read_dcp(target)
    assert "decoder.layers.0.mlp.linear_fc2.weight" in found.tensors
    assert "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc2.weight" in found.tensors
    common = read_torch_file(target / "common.pt")
    assert common["content_metadata"]["non_homogeneous_layers"] is True


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["model.layers.norm.weight"], "model.layers.0.norm.weight"),
        (["mlp.experts.experts.weight"], "mlp.experts.local_experts.0.weight"),
        (["mlp.experts.experts.3.weight"], "mlp.experts.local_experts.3.weight"),
        (["mlp.linear_fc1.weight_v", "mlp.linear_fc1.weight_w"], "mlp.linear_fc1.weight"),
        (["chained_0.optimizer.state.average.weight"], "optimizer.state.weight.average"),
        (["w", "optimizer.state.layers.w.exp_avg"], "optimizer.state.layers.0.w.exp_avg"),
    ],
)
def test_names_that_readers_take_for_others_are_refused(
    names: list[str], read: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "source.safetensors", tmp_path / "target"
    save_file({name: np.ones((4, 2), dtype=np.float32) for name in names}, source)
    expected = f"{re.escape(repr(names[-1]))} would be read .* {re.escape(repr(read))}"
    with pytest.raises(RecipeError, match=expected):
        convert(source, target)
    assert not target.exists()


def test_scalars_of_layers_are_stacked_and_read_again(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    layers = {f"model.layers.{layer}.": np.float32(layer + 1) for layer in range(3)}
    scales = {f"{layer}scale": np.array(value) for layer, value in layers.items()}
    rows = {f"{layer}up.weight": np.full((4, 2), value) for layer, value in layers.items()}
    save_file({**scales, **rows}, source / "model.safetensors")
    target = convert(source, tmp_path / "target", to="tp=2", rules=["*.weight=tp, ...", "*=..."])
    found = open_checkpoint(target)
    assert {name: found[name].shape for name in scales} == dict.fromkeys(scales, ())
    for name, value in {**scales, **rows}.items():
        assert (read_tensor(found, name) == value).all()


def test_plain_items_of_other_programs_are_in_the_common_state(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint as dcp

    name = "decoder.final_layernorm.weight"
    saved = {
        name: torch.ones(4),
        "iteration": 7,
        "args": {"num_layers": 2, "params_dtype": "torch.bfloat16"},
        "keeper": Path("elsewhere"),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    target = convert(tmp_path / "dcp", tmp_path / "target")
    common = torch.load(target / "common.pt", weights_only=False)
    assert common["iteration"] == 7
    assert (common["args"].num_layers, common["args"].params_dtype) == (2, torch.bfloat16)
    opened = checkpoint.open(target)
    assert opened.values["iteration"] == 7
    # What is no plain value stays as it was pickled.
    assert [*opened.items] == ["keeper"]


def save_adamw(folder: Path, decays: dict[str, float]) -> Path:
    """A file of PyTorch: matrices and vectors, each in a group with a weight decay of its own."""
    torch = pytest.importorskip("torch")
    shapes = [(8, 4), (4, 6), (4,)]
    weights = {name: torch.ones(shape) for name, shape in zip(decays, shapes, strict=True)}
    state = {
        number: {"step": torch.tensor(2.0), "exp_avg": one * 2, "exp_avg_sq": one * 3}
        for number, one in enumerate(weights.values())
    }
    hyper = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    groups = [
        {**hyper, "weight_decay": decay, "params": [number]}
        for number, decay in enumerate(decays.values())
    ]
    folder.mkdir()
    saved = {"model": weights, "optimizer": {"state": state, "param_groups": groups}}
    torch.save(saved, folder / "state.pt")
    return folder / "state.pt"


@pytest.mark.parametrize("target", ["torch-dist", "megatron-legacy"])
def test_a_note_reports_weight_decay_that_megatron_changes(target: str, tmp_path: Path) -> None:
    up, down, norm = (
        *(f"decoder.layers.0.mlp.linear_{one}.weight" for one in ("fc1", "fc2")),
        "decoder.final_layernorm.weight",
    )
    rule = "Megatron decays matrices, and neither vectors nor biases"
    cases = [
        ({up: 0.1, down: 0.1, norm: 0.0}, []),
        ({up: 0.0, down: 0.0, norm: 0.0}, []),
        ({up: 0.1, down: 0.0, norm: 0.0}, [f"1 parameter (first: {down}) had no weight decay"]),
        ({up: 0.1, down: 0.1, norm: 0.1}, [f"1 parameter (first: {norm}) had weight decay"]),
    ]
    for number, (decays, expected) in enumerate(cases):
        source = save_adamw(tmp_path / str(number), decays)
        made = tmp_path / f"made{number}"
        report = checkpoint.convert(source, made, to="full", format=target)
        found = [note for note in report.notes if rule in note]
        assert len(found) == len(expected), report.notes
        assert all(said in note for said, note in zip(expected, found, strict=True))
        # Back, each is in the group in which Megatron puts it.
        groups = checkpoint.open(made).values["optimizer.param_groups"]
        decay = {
            name: one["wd_mult"] * one["weight_decay"] for one in groups for name in one["params"]
        }
        assert bool(decay[down]) == any(decays.values())
        assert not decay[norm]
