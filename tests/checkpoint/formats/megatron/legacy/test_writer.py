"""New folders of Megatron's ranks: read back, and by `torch.load`, as Megatron reads them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpoint.checkpoint_files import write_holes
from checkpoint.formats.megatron.recordings import expect_same, state_of, unpack
from reshard import checkpoint
from reshard.errors import CheckpointError, RecipeError, UsageError
from selection import keep_first_of

CASES = [
    ("tensor", "full"),
    ("tensor", "tp=2,pp=2"),
    ("tensor", "dp=2,pp=2"),
    ("stages", "pp=2"),
    ("stages", "full"),
    ("experts", "ep=2"),
    ("experts", "tp=2,ep=4"),
    ("undistributed", "tp=2"),
    ("undistributed", "pp=2,tp=2"),
    ("virtual", "pp=4"),
    ("virtual", "pp=2,vp=2"),
    ("virtual", "dp=2,pp=2,tp=2,vp=2"),
    ("stages", "full"),
    ("buckets", "tp=2"),
]


@pytest.mark.parametrize(
    ("name", "to"), keep_first_of(lambda case: case[0], CASES, "the same source for other ranks")
)
def test_any_parallelism_has_the_same_state(name: str, to: str, tmp_path: Path) -> None:
    folder = unpack(name, tmp_path)
    source = folder / ("legacy" if name == "buckets" else "fully_reshardable")
    target = tmp_path / "target"
    checkpoint.convert(source, target, to=to, format="megatron-legacy")
    expect_same(state_of(target), state_of(source))
    opened = checkpoint.open(target)
    assert opened.values["iteration"] == 2
    assert not checkpoint.check_digests(opened).damaged
    # Without the manifest it is what Megatron's own files would be.
    (target / "reshard.manifest.json").unlink()
    expect_same(state_of(target), state_of(source))
    back = tmp_path / "back"
    checkpoint.convert(target, back, to="full", format="torch-dist")
    expect_same(state_of(back), state_of(source))


def nested(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = [(str(key), inner) for key, inner in value.items()]
    elif isinstance(value, list):
        items = [(str(number), inner) for number, inner in enumerate(value)]
    else:
        return {path: value}
    return {
        key: leaf for name, inner in items for key, leaf in nested(inner, f"{path}/{name}").items()
    }


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("tensor", "tp=2"),
        ("stages", "pp=2"),
        ("experts", "ep=2"),
        ("undistributed", "tp=2"),
        ("virtual", "pp=2,vp=2"),
        ("scaled", "ep=2"),
    ],
)
def test_files_are_those_of_megatron(name: str, to: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    folder = unpack(name, tmp_path)
    target = tmp_path / "target"
    checkpoint.convert(folder / "fully_reshardable", target, to=to, format="megatron-legacy")
    theirs = folder / "legacy"
    names = sorted(p.relative_to(theirs).as_posix() for p in theirs.rglob("*") if p.is_file())
    ours = [p for p in target.rglob("*") if p.is_file() and p.suffix != ".json"]
    assert sorted(p.relative_to(target).as_posix() for p in ours) == names
    for file in names:
        if not file.endswith(".pt"):
            assert (target / file).read_text() == (theirs / file).read_text()
            continue
        found, expected = (
            nested(torch.load(one / file, weights_only=False)) for one in (target, theirs)
        )
        # States of random number generators are each rank's own, and not carried over.
        expected = {key: leaf for key, leaf in expected.items() if "/rng_state" not in key}
        assert [*found] != [] and sorted(found) == sorted(expected), file
        for key, leaf in expected.items():
            if isinstance(leaf, torch.Tensor):
                assert torch.equal(found[key], leaf), (file, key)
            else:
                assert found[key] == leaf, (file, key)


def test_models_that_ranks_do_not_divide_are_errors(tmp_path: Path) -> None:
    source = unpack("tensor", tmp_path) / "fully_reshardable"
    for to, kind, says in [
        ("pp=3", RecipeError, "2 layers on 3 stages; choose a pp that divides 2"),
        ("pp=2,vp=2", RecipeError, "2 layers on 2 stages of 2 chunks each; choose a pp times vp"),
        ("vp=2", UsageError, "vp=2 with one stage; virtual stages are chunks of several"),
        ("tp=3", RecipeError, "tensor-parallel ranks; dimension 0 does not divide by"),
        ("fsdp=2", UsageError, "the axis 'fsdp'"),
        ("4", UsageError, "4 ranks for Megatron's folders"),
    ]:
        with pytest.raises(kind, match=says):
            checkpoint.plan_conversion(source, tmp_path / "x", to=to, format="megatron-legacy")


def test_state_that_no_buffer_holds_is_an_error(tmp_path: Path) -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    kept = f"optimizer.state.{name}.momentum_buffer"
    source = write_holes(tmp_path / "source", dict.fromkeys((name, kept), (4, 4)))
    with pytest.raises(RecipeError, match="momentum_buffer' has no place among master, exp_avg"):
        checkpoint.plan_conversion(source, tmp_path / "x", to="full", format="megatron-legacy")


@pytest.mark.parametrize("name", ["tensor", "undistributed"])
@pytest.mark.parametrize("removed", ["decoder.final_layernorm.weight", "decoder.layers.*"])
def test_state_of_a_parameter_without_a_weight_is_an_error(
    name: str, removed: str, tmp_path: Path
) -> None:
    """Of any optimizer: buffers and numbers are by the types and places of weights."""
    source = unpack(name, tmp_path) / "fully_reshardable"
    with pytest.raises(RecipeError, match=f"'{removed}.*' has optimizer state and no weight"):
        checkpoint.plan_conversion(
            source, tmp_path / "x", to="full", format="megatron-legacy", exclude=[removed]
        )


@pytest.mark.parametrize("removed", ["*.master", "*.layers.0.*.exp_avg", "*.final_layernorm.*_sq"])
def test_state_in_part_is_an_error(removed: str, tmp_path: Path) -> None:
    """Buffers would have zeros in its place."""
    source = unpack("tensor", tmp_path) / "fully_reshardable"
    with pytest.raises(RecipeError, match=r"' has no \w+, which the buffers of a distributed"):
        checkpoint.plan_conversion(
            source, tmp_path / "x", to="tp=2", format="megatron-legacy", exclude=[removed]
        )


@pytest.mark.parametrize("name", ["tensor", "undistributed"])
@pytest.mark.parametrize("removed", ["embedding.*", "decoder.final_layernorm.*"])
def test_a_parameter_without_state_among_others_is_an_error(
    name: str, removed: str, tmp_path: Path
) -> None:
    """The state of the others would be that of nobody."""
    source = unpack(name, tmp_path) / "fully_reshardable"
    with pytest.raises(RecipeError, match=f"'{removed}' has no optimizer state, and others have"):
        checkpoint.plan_conversion(
            source,
            tmp_path / "x",
            to="full",
            format="megatron-legacy",
            exclude=[f"optimizer.state.{removed}"],
        )


def test_masters_of_some_parameters_are_an_error(tmp_path: Path) -> None:
    source = unpack("undistributed", tmp_path) / "fully_reshardable"
    kept = "optimizer.state.decoder.final_layernorm.weight.master"
    target = {"to": "full", "format": "megatron-legacy"}
    with pytest.raises(RecipeError, match=r"layernorm\.weight' of bfloat16 has no master"):
        checkpoint.plan_conversion(source, tmp_path / "x", exclude=[kept], **target)
    with pytest.raises(RecipeError, match="' of float32 has a master"):
        checkpoint.plan_conversion(source, tmp_path / "x", dtype="float32", **target)
    checkpoint.convert(source, tmp_path / "y", exclude=["*.master"], **target)
    assert not [name for name in state_of(tmp_path / "y") if name.endswith("master")]


def test_stacked_experts_are_not_written(tmp_path: Path) -> None:
    folder = unpack("grouped", tmp_path)
    with pytest.raises(RecipeError, match=r"one weight \(GroupedMLP\), which is not written"):
        checkpoint.plan_conversion(
            folder / "legacy", tmp_path / "x", to="ep=2", format="megatron-legacy"
        )


@pytest.mark.parametrize(
    ("name", "target", "says"),
    [
        ("in_proj.weight", "torch-dist", "as folders of ranks have it; torch_dist has its parts"),
        ("in_proj.weight.z", "megatron-legacy", "is a part of a Mamba layer's weight"),
    ],
)
def test_weights_of_mamba_layers_in_another_form_are_errors(
    name: str, target: str, says: str, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    folder = tmp_path / "iter_0000001" / "mp_rank_00"
    folder.mkdir(parents=True)
    names = [f"decoder.layers.0.mixer.{one}" for one in (name, "norm.weight")]
    torch.save({"model": {one: torch.ones(4) for one in names}}, folder / "model_optim_rng.pt")
    source = checkpoint.open(folder.parent)
    assert sorted(source) == sorted(names)
    with pytest.raises(RecipeError, match=says):
        checkpoint.plan_conversion(source, tmp_path / "x", to="full", format=target)
    # Where the cut of a weight is not known, no file is put together.
    (folder.parent / "mp_rank_01").mkdir()
    shutil.copy(folder / "model_optim_rng.pt", folder.parent / "mp_rank_01")
    with pytest.raises(CheckpointError, match="how tensor parallelism cuts it is not known"):
        checkpoint.open(folder.parent)
