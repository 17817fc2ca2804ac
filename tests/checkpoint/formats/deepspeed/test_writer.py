"""Checkpoints of DeepSpeed that are written: what is read of them again, and where it came from.

That DeepSpeed itself goes on from them is tested with DeepSpeed (`tests/engines/deepspeed`).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

import reshard
from deepspeed_records import recorded, unpack
from reshard.checkpoint.formats.deepspeed.writer import find_parts
from reshard.checkpoint.pretrained.names import take_weights
from reshard.errors import UsageError
from selection import keep_covering, keep_spread

torch = pytest.importorskip("torch")

STAGES = {"deepspeed-zero1": 1, "deepspeed-zero3": 3}
SOURCES = [n for n in recorded() if not n.endswith("universal") and "experts" not in n]


def values_of(checkpoint: reshard.checkpoint.Checkpoint) -> dict[str, bytes]:
    read = reshard.checkpoint.read_tensor
    return {name: read(checkpoint, name).tobytes() for name in checkpoint}


@pytest.mark.parametrize(
    ("target", "name"),
    keep_covering(
        1,
        itertools.product(
            [
                ("deepspeed-zero1", 1),
                ("deepspeed-zero1", 3),
                ("deepspeed-zero3", 2),
                ("deepspeed-zero3", 4),
            ],
            SOURCES,
        ),
        "every source to every stage; each source and each stage is in a default case",
    ),
)
def test_what_is_written_is_read_again(target: tuple[str, int], name: str, tmp_path: Path) -> None:
    """Masters, moments, steps, values and groups; every source, over other ranks."""
    format, to = target
    source = reshard.checkpoint.open(unpack(name, tmp_path))
    reshard.checkpoint.convert(source, tmp_path / "new", to=f"dp={to}", format=format)
    new = reshard.checkpoint.open(tmp_path / "new")
    assert new.format == format
    assert new.ranks == to
    before, after = values_of(source), values_of(new)
    missing = {*before} - {*after}
    # Stage 3 has no weights beside those of float32.
    groups = new.values["optimizer.param_groups"]
    trained = {one for group in groups for one in group["params"]}
    shared = {*source.values.get("shared_params", {})}
    assert missing <= ((trained | shared) if format == "deepspeed-zero3" else set())
    assert all(after[one] == value for one, value in before.items() if one in after)
    for one in {*after} - {*before}:
        # Made of the other kind of weights.
        assert one in trained | shared or one.endswith(".master")
    kept = {k: v for k, v in source.values.items() if not k.startswith(("optimizer.", "ds_config"))}
    assert {k: new.values.get(k) for k in kept} == kept
    old_groups = source.values["optimizer.param_groups"]
    assert [group["params"] for group in groups] == [group["params"] for group in old_groups]
    if "elastic" not in name:
        assert [g["weight_decay"] for g in groups] == [g["weight_decay"] for g in old_groups]
    assert not reshard.checkpoint.check_digests(new).damaged


@pytest.mark.parametrize("name", keep_spread(12, SOURCES, "another source; all are read by others"))
def test_universal_is_read_again(name: str, tmp_path: Path) -> None:
    """A file for each thing of each parameter, under `latest_universal`."""
    source = reshard.checkpoint.open(unpack(name, tmp_path))
    target = tmp_path / "new"
    report = reshard.checkpoint.convert(source, target, to="full", format="deepspeed-universal")
    assert any("without a number of steps" in note for note in report.notes) == ("sgd" in name)
    assert (target / "latest_universal").read_text() == "global_step2_universal"
    new = reshard.checkpoint.open(target)
    assert new.format == "deepspeed-universal"
    before, after = values_of(source), values_of(new)
    assert all(after[one] == value for one, value in before.items())
    assert not reshard.checkpoint.check_digests(new).damaged


@pytest.mark.usefixtures("deepspeed_classes")
@pytest.mark.parametrize("format", [*STAGES])
def test_pytorch_loads_the_files(format: str, tmp_path: Path) -> None:
    """With the types that DeepSpeed asks for: sizes, ordered dicts, flat tensors, its classes."""
    source = unpack("zero2-bf16-4-frozen", tmp_path)
    reshard.checkpoint.convert(source, tmp_path / "new", to="dp=3", format=format)
    assert (tmp_path / "new" / "latest").read_text() == "global_step2"
    folder = tmp_path / "new" / "global_step2"
    prefix = "zero_pp_rank_0_" if format == "deepspeed-zero3" else ""
    state = torch.load(folder / f"{prefix}mp_rank_00_model_states.pt", weights_only=False)
    assert isinstance(state["module"], OrderedDict)
    shapes = state["param_shapes"]
    assert all(isinstance(one, torch.Size) for group in shapes for one in group.values())
    assert state["dp_world_size"] == 3
    assert state["history"] == [0.5, {"loss": 0.25, "grid": (2, 3)}]
    assert state["rng"].tolist() == list(range(16))
    assert state["buffer_names"] == ["seen", "running"]
    assert state["ds_config"]["zero_optimization"]["stage"] == STAGES[format]
    assert {*state["frozen_param_fragments"]} == {
        "layers.0.weight",
        "layers.0.bias",
        "scale.weight",
    }
    total = 0
    for rank in range(3):
        file = folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        own = torch.load(file, weights_only=False)["optimizer_state_dict"]
        assert own["zero_stage"] == STAGES[format]
        assert own["loss_scaler"].cur_scale == 1.0
        key = (
            "fp32_flat_groups" if format == "deepspeed-zero3" else "single_partition_of_fp32_groups"
        )
        total += sum(one.numel() for one in own[key])
    # Padding aside, each element is on one rank.
    elements = sum(shape.numel() for group in shapes for shape in group.values())
    assert elements <= total <= elements + 3 * sum(len(group) for group in shapes)


@pytest.mark.parametrize("name", [one for one in recorded() if "fp16" in one])
@pytest.mark.parametrize("format", [*STAGES, "deepspeed-universal"])
def test_the_loss_scaler_goes_on(name: str, format: str, tmp_path: Path) -> None:
    """Its scale and counters, also of an optimizer without ZeRO, which keeps them elsewhere."""
    source, target = unpack(name, tmp_path), tmp_path / "new"
    to = "full" if format == "deepspeed-universal" else "dp=2"
    reshard.checkpoint.convert(source, target, to=to, format=format)
    values = reshard.checkpoint.open(target).values
    found = {key: values[f"optimizer.loss_scaler.{key}"] for key in ("cur_scale", "cur_iter")}
    # The runs begin with 2 to the power of 4, and took two steps.
    assert found == {"cur_scale": 16, "cur_iter": 2}
    assert values["optimizer.loss_scaler.last_overflow_iter"] == -1
    assert values["optimizer.dynamic_loss_scale"] is True


def test_a_new_loss_scaler_has_taken_no_step(tmp_path: Path) -> None:
    """Weights of float16 without a scaler get the one that DeepSpeed begins with."""
    weight = torch.arange(4.0)
    kinds = {key: weight + n for n, key in enumerate(("master", "exp_avg", "exp_avg_sq"))}
    state = {"a.weight": {"step": torch.tensor(1.0), **kinds}}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": ["a.weight"]}]}
    saved = {"model": {"a.weight": weight.half()}, "optimizer": optimizer}
    torch.save(saved, tmp_path / "s.pt")
    reshard.checkpoint.convert(
        tmp_path / "s.pt", tmp_path / "new", to="dp=1", format="deepspeed-zero1"
    )
    values = reshard.checkpoint.open(tmp_path / "new").values
    prefix = "optimizer.loss_scaler."
    assert {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)} == {
        "class": "DynamicLossScaler",
        "cur_scale": 2.0**16,
        "dynamic": True,
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "min_scale": 1,
        "delayed_shift": 1,
        "cur_hysteresis": 1,
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": True,
        "dtype": "torch.float16",
    }


def test_tensors_of_a_user_are_not_buffers(tmp_path: Path) -> None:
    """Of a model without buffers too: DeepSpeed refuses weights that the model does not have."""
    source = reshard.checkpoint.open(unpack("zero1-bf16-2-groups-data", tmp_path))
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    parts = find_parts(shapes, source.values)
    assert (parts.others, parts.buffers, parts.is_sure) == (("rng",), (), True)


def test_weights_without_optimizer_state_are_an_error(tmp_path: Path) -> None:
    """What ZeRO is made of is named, and what to do."""
    source = unpack("zero1-bf16-2-plain", tmp_path)
    reshard.checkpoint.convert(source, tmp_path / "hf", to="full", exclude=["optimizer.*"])
    with pytest.raises(UsageError, match=r"no optimizer state .*loaded from safetensors"):
        reshard.checkpoint.convert(
            tmp_path / "hf", tmp_path / "new", to="dp=2", format="deepspeed-zero1"
        )


def test_other_axes_are_errors(tmp_path: Path) -> None:
    """ZeRO cuts over one axis."""
    source = unpack("zero1-bf16-2-plain", tmp_path)
    with pytest.raises(UsageError, match="data-parallel ranks alone"):
        reshard.checkpoint.convert(source, tmp_path / "n", to="dp=2,tp=2", format="deepspeed-zero3")


def test_weights_of_stage_3_are_those_of_other_programs(tmp_path: Path) -> None:
    """Its float32 weights, which it has no others beside, are a model's weights elsewhere."""
    folder = unpack("zero3-bf16-2-plain", tmp_path)
    source = reshard.checkpoint.open(folder)
    masters = {
        name.removeprefix("optimizer.state.").removesuffix(".master"): value
        for name, value in values_of(source).items()
        if name.endswith(".master")
    }
    fsdp = tmp_path / "fsdp"
    reshard.checkpoint.convert(source, fsdp, to="full", format="torch-dcp", training="fsdp2")
    found = values_of(reshard.checkpoint.open(fsdp))
    assert {name: found[f"model.{name}"] for name in masters} == masters
    model = take_weights(source)
    alone = {name: value for name, value in values_of(model).items() if name in masters}
    assert alone == masters
    assert {*model} == {*masters, "seen", "running"}
    assert "optim.state.embed.weight.exp_avg" in found
    assert not any(name.endswith("master") for name in found)


def test_what_fsdp_saved_becomes_zero(tmp_path: Path) -> None:
    """State of another program, with weights of one kind and hyper-parameters by name."""
    folder = unpack("zero1-bf16-2-groups-data", tmp_path)
    fsdp, back = tmp_path / "fsdp", tmp_path / "back"
    reshard.checkpoint.convert(folder, fsdp, to="full", format="torch-dcp", training="fsdp2")
    reshard.checkpoint.convert(fsdp, back, to="dp=3", format="deepspeed-zero3")
    first, last = reshard.checkpoint.open(folder), reshard.checkpoint.open(back)
    before, after = values_of(first), values_of(last)
    state = [name for name in before if name.startswith("optimizer.state.")]
    assert state
    assert all(after[name] == before[name] for name in state)
    groups = last.values["optimizer.param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.0]
    assert groups[2]["params"] == ["head.weight"]


@pytest.mark.parametrize(
    ("to", "name"),
    keep_covering(
        1,
        itertools.product(
            ["dp=1", "dp=4", "dp=2,ep=2", "ep=4", "dp=3,ep=2"],
            [one for one in recorded() if "experts" in one],
        ),
        "every source to all ranks; each source and each of these is in a default case",
    ),
)
def test_experts_are_written_for_another_number_of_ranks(
    name: str, to: str, tmp_path: Path
) -> None:
    """Weights, float32 weights and moments of every expert, and groups that say whose they are."""
    source = reshard.checkpoint.open(unpack(name, tmp_path))
    reshard.checkpoint.convert(source, tmp_path / "new", to=to, format="deepspeed-zero1")
    new = reshard.checkpoint.open(tmp_path / "new")
    before, after = values_of(source), values_of(new)
    assert all(after[one] == value for one, value in before.items())
    # A source without ZeRO computes with its float32 weights.
    assert all(one.endswith(".master") for one in {*after} - {*before})
    groups = new.values["optimizer.param_groups"]
    assert [group.get("moe", False) for group in groups] == [False, True]
    assert sorted(one for group in groups for one in group["params"]) == sorted(
        one for group in source.values["optimizer.param_groups"] for one in group["params"]
    )
    assert new.values["num_experts"] == [4, 4]
    assert not reshard.checkpoint.check_digests(new).damaged


def test_experts_that_ranks_cannot_share_out_are_errors(tmp_path: Path) -> None:
    """Numbers of ranks that cannot share them out, and what DeepSpeed has no experts in."""
    source = unpack("zero1-bf16-4-experts-over2", tmp_path)

    def convert(to: str, format: str) -> None:
        reshard.checkpoint.convert(source, tmp_path / "n", to=to, format=format)

    with pytest.raises(UsageError, match=r"which 3 sets of ranks cannot share out .*`ep`"):
        convert("ep=3", "deepspeed-zero1")
    with pytest.raises(UsageError, match="MoE layers have no stage 3"):
        convert("dp=2", "deepspeed-zero3")
    with pytest.raises(UsageError, match="MoE layers have no universal checkpoints"):
        convert("full", "deepspeed-universal")
    mesh = reshard.DeviceMesh.of(ep=2, dp=2)
    with pytest.raises(UsageError, match=r"--to dp=D,ep=E"):
        reshard.checkpoint.convert(source, tmp_path / "n", to=mesh, format="deepspeed-zero1")
    convert("ep=2,dp=2", "deepspeed-zero1")
    assert reshard.checkpoint.open(tmp_path / "n").ranks == 4
    plain = unpack("zero1-bf16-2-plain", tmp_path)
    with pytest.raises(UsageError, match="data-parallel ranks alone"):
        reshard.checkpoint.convert(plain, tmp_path / "n", to="dp=2,ep=2", format="deepspeed-zero1")


FROZEN = ["layers.0.weight", "layers.0.bias", "scale.weight"]


@pytest.mark.parametrize("format", [*STAGES, "deepspeed-universal"])
@pytest.mark.parametrize("left_out", [FROZEN, FROZEN[:1]])
def test_frozen_parameters_are_listed_all_or_none(
    format: str, left_out: list[str], tmp_path: Path
) -> None:
    """DeepSpeed looks every frozen parameter of its model up in a list that is there."""
    source, target = unpack("zero2-bf16-4-frozen", tmp_path), tmp_path / "new"
    to = "full" if format == "deepspeed-universal" else "dp=2"
    if format == "deepspeed-zero3" and left_out != FROZEN:
        # Its frozen parameters are stored in no other place.
        told = r"2 frozen .*scale\.weight.* and lacks 1 \(layers\.0\.weight\)"
        with pytest.raises(UsageError, match=told):
            reshard.checkpoint.convert(source, target, to=to, format=format, exclude=left_out)
        return
    reshard.checkpoint.convert(source, target, to=to, format=format, exclude=left_out)
    for file in target.glob("*/*model_states.pt"):
        assert torch.load(file, weights_only=False)["frozen_param_fragments"] is None


def save_training(
    path: Path, frozen: dict[str, Any], trained: list[str], without: str = ""
) -> Path:
    """Save what a program of PyTorch does, with a parameter that has no state."""
    weights = {name: torch.ones(2, 3) for name in trained}
    state = {
        name: {"step": torch.tensor(1.0), "exp_avg": value, "exp_avg_sq": value}
        for name, value in weights.items()
        if name != without
    }
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": trained}]}
    torch.save({"model": {**weights, **frozen}, "optimizer": optimizer}, path)
    return path


@pytest.mark.parametrize("format", [*STAGES, "deepspeed-universal"])
def test_a_part_of_the_weights_under_adapters_is_recognised(format: str, tmp_path: Path) -> None:
    """DeepSpeed 0.19.8 ends in KeyError under stage 3, and loads the others without strictness."""
    trained = [f"{one}.lora_{side}.default.weight" for one in "qv" for side in "AB"]
    bases = {f"{one}.base_layer.weight": torch.ones(3, 3) for one in "qv"}
    to = "full" if format == "deepspeed-universal" else "dp=2"
    for name, kept in (("all", [*bases]), ("none", []), ("part", [*bases][:1])):
        frozen = {base: bases[base] for base in kept}
        source = save_training(tmp_path / f"{name}.pt", frozen, trained)
        target = tmp_path / name
        if format == "deepspeed-zero3" and name == "part":
            told = r"has 1 frozen parameter \(q\.base_layer\.weight\) and lacks 1 \(v\.base_layer"
            with pytest.raises(UsageError, match=told):
                reshard.checkpoint.convert(source, target, to=to, format=format)
            continue
        report = reshard.checkpoint.convert(source, target, to=to, format=format)
        is_noted = any("load_module_strict=False" in note for note in report.notes)
        assert is_noted == (name == "part" and format == "deepspeed-zero1")


@pytest.mark.parametrize("format", [*STAGES, "deepspeed-universal"])
def test_parameters_of_groups_without_state_are_refused(format: str, tmp_path: Path) -> None:
    """DeepSpeed 0.19.8 ends in RuntimeError or FileNotFoundError if its model trains them."""
    source = save_training(tmp_path / "s.pt", {}, ["a.weight", "b.weight"], without="b.weight")
    to = "full" if format == "deepspeed-universal" else "dp=2"
    with pytest.raises(UsageError, match=r"1 parameter \(b\.weight\) in a group .*--allow state"):
        reshard.checkpoint.convert(source, tmp_path / "n", to=to, format=format)
    reshard.checkpoint.convert(source, tmp_path / "n", to=to, format=format, allow=["stateless"])
    (group,) = reshard.checkpoint.open(tmp_path / "n").values["optimizer.param_groups"]
    assert group["params"] == ["a.weight"]


@pytest.mark.parametrize("format", [*STAGES, "deepspeed-universal"])
def test_state_in_part_is_an_error(format: str, tmp_path: Path) -> None:
    """A flat buffer would have zeros in its place."""
    source = unpack("zero1-bf16-2-plain", tmp_path)
    options: dict[str, Any] = {"to": "full" if format == "deepspeed-universal" else 2}
    options |= {"format": format, "exclude": ["*.scale.weight.exp_avg"]}
    with pytest.raises(UsageError, match=r"'scale\.weight' has no exp_avg, unlike that"):
        reshard.checkpoint.plan_conversion(source, tmp_path / "t", **options)
    options["exclude"] = ["*.exp_avg"]
    reshard.checkpoint.plan_conversion(source, tmp_path / "t", **options)


def test_a_source_without_counters_and_scheduler_is_noted(tmp_path: Path) -> None:
    folder, fsdp = unpack("zero1-bf16-2-plain", tmp_path), tmp_path / "fsdp"
    same = reshard.checkpoint.convert(folder, tmp_path / "z", to="dp=1", format="deepspeed-zero1")
    assert not any("global_steps" in note for note in same.notes)
    weights = {"include": ["optimizer.*", "*.weight", "*.bias"], "training": "fsdp2"}
    reshard.checkpoint.convert(folder, fsdp, to="full", format="torch-dcp", **weights)
    for format in (*STAGES, "deepspeed-universal"):
        to = "full" if format == "deepspeed-universal" else "dp=1"
        report = reshard.checkpoint.convert(fsdp, tmp_path / format, to=to, format=format)
        assert any("no global_steps: DeepSpeed counts from 0" in note for note in report.notes)
        assert any("load_lr_scheduler_states=False" in note for note in report.notes)


def test_state_by_numbers_of_parameters_is_an_error(tmp_path: Path) -> None:
    state = {n: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2)} for n in range(2)}
    model = {name: torch.zeros(2) for name in ("a", "b", "c")}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "s.pt")
    with pytest.raises(UsageError, match=r"numbers for names \(optimizer\.state\.0\)"):
        reshard.checkpoint.convert(
            tmp_path / "s.pt", tmp_path / "z", to=1, format="deepspeed-zero1"
        )
