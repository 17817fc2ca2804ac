"""`torch_dist` as Megatron-core 0.16.1 saved it."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from checkpoint.formats.megatron.recordings import expect_same, state_of, unpack
from reshard import checkpoint
from reshard.binding import Binding, FileRange
from reshard.checkpoint.contents import Checkpoint, StoredFile, StoredTensor
from reshard.checkpoint.formats.megatron.torch_dist import reader
from reshard.checkpoint.formats.megatron.torch_dist.reader import bind_flat_ranges
from reshard.checkpoint.formats.torch_files.building import saved_bytes
from reshard.checkpoint.formats.torch_files.reading import read_torch_file
from reshard.dtypes import dtype
from reshard.errors import CheckpointError, FormatError
from reshard.layout import Box, Layout
from selection import keep_covering

NAMES = ["tensor", "stages", "experts", "undistributed", "virtual", "singleton", "grouped"]


@pytest.mark.parametrize("name", NAMES)
def test_masters_round_to_the_weights(name: str, tmp_path: Path) -> None:
    found = state_of(unpack(name, tmp_path) / "fully_reshardable")
    masters = [key for key in found if key.endswith(".master")]
    weights = [key for key in found if not key.startswith("optimizer.")]
    assert len(masters) == len(weights) == len(found) // 4
    for key in masters:
        weight = found[key.removeprefix("optimizer.state.").removesuffix(".master")]
        assert np.array_equal(found[key].astype(weight.dtype), weight), key
        assert found[key.replace(".master", ".exp_avg_sq")].min() >= 0
    # The embedding of a token that is in no batch has no gradient, others have.
    assert any(found[key].any() for key in found if key.endswith(".exp_avg"))


def test_layers_and_experts_have_names_of_their_own(tmp_path: Path) -> None:
    found = checkpoint.open(unpack("experts", tmp_path) / "fully_reshardable")
    assert found.format == "torch-dist"
    name = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
    assert found[name].shape == (8, 8)
    assert found[f"optimizer.state.{name}.exp_avg"].shape == (8, 8)
    # Layers of experts have a norm in front, whatever the implementation keys it by.
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in found.tensors


def test_separate_experts_equal_members_of_stacks(tmp_path: Path) -> None:
    stacked = state_of(unpack("experts", tmp_path) / "fully_reshardable")
    single = state_of(unpack("singleton", tmp_path) / "fully_reshardable")
    expect_same(single, stacked)


@pytest.mark.parametrize(
    ("name", "how"),
    keep_covering(
        1,
        itertools.product(
            ("tensor", "stages", "experts", "buckets", "virtual"),
            ("dp_reshardable", "dp_zero_gather_scatter"),
        ),
        "a source by its other form",
    ),
)
def test_buckets_without_names_are_the_same_state(name: str, how: str, tmp_path: Path) -> None:
    folder = unpack(name, tmp_path)
    found, legacy = checkpoint.open(folder / how), checkpoint.open(folder / "legacy")
    expect_same(state_of(found), state_of(legacy))
    assert found.values == legacy.values
    assert not found.unread
    target = tmp_path / "target"
    checkpoint.convert(folder / how, target, to="full", format="torch-dist")
    expect_same(state_of(target), state_of(legacy))


def test_buckets_that_do_not_fit_are_unread(tmp_path: Path) -> None:
    folder = unpack("tensor", tmp_path) / "dp_zero_gather_scatter"
    common = read_torch_file(folder / "common.pt")
    for axis in ("tensor", "expert_tensor"):
        key = f"{axis}_model_parallel_size" if axis == "tensor" else f"{axis}_parallel_size"
        common["args"].state[key] = 1
    (folder / "common.pt").write_bytes(saved_bytes(common))
    found = checkpoint.open(folder)
    assert not [name for name in found if name.startswith("optimizer.")]
    assert found.unread[-1][0] == "the optimizer's buckets"
    assert "the parts are ambiguous" in found.unread[-1][1]


def test_buckets_of_stacked_experts_are_unread(tmp_path: Path) -> None:
    found = checkpoint.open(unpack("grouped", tmp_path) / "dp_reshardable")
    assert not [name for name in found if name.startswith("optimizer.")]
    assert "in one weight (GroupedMLP) are not read" in found.unread[-1][1]


def test_common_values_and_groups_are_read(tmp_path: Path) -> None:
    found = checkpoint.open(unpack("tensor", tmp_path) / "fully_reshardable")
    values = found.values
    assert (values["iteration"], values["args.num_layers"]) == (2, 2)
    assert values["args.params_dtype"] == "torch.bfloat16"
    decayed, others = values["optimizer.param_groups"]
    assert (decayed["step"], decayed["wd_mult"], others["wd_mult"]) == (2, 1.0, 0.0)
    assert "decoder.final_layernorm.weight" in others["params"]
    assert "output_layer.weight" in decayed["params"]
    assert len(decayed["params"]) + len(others["params"]) == len(found) // 4
    assert not found.unread


def test_the_folder_of_all_steps_opens_the_last(tmp_path: Path) -> None:
    step = unpack("tensor", tmp_path) / "fully_reshardable"
    steps = tmp_path / "steps"
    shutil.copytree(step, steps / "iter_0000002")
    (steps / "latest_checkpointed_iteration.txt").write_text("2\n")
    assert checkpoint.open(steps).folder == steps / "iter_0000002"
    (steps / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(CheckpointError, match=r"iter_0000003 is missing.*there is iter_0000002"):
        checkpoint.open(steps)
    (steps / "latest_checkpointed_iteration.txt").write_text("third")
    with pytest.raises(CheckpointError, match="'third', expected the number of the last step"):
        checkpoint.open(steps)


def test_missing_and_invalid_states_are_errors(tmp_path: Path) -> None:
    folder = unpack("tensor", tmp_path) / "fully_reshardable"
    (folder / "common.pt").rename(folder / "elsewhere")
    with pytest.raises(CheckpointError, match=r"common\.pt is missing; Megatron has the iteration"):
        checkpoint.open(folder)
    (folder / "common.pt").write_bytes(b"no archive")
    with pytest.raises(FormatError, match=r"common\.pt"):
        checkpoint.open(folder)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(CheckpointError, match="'zarr'; only 'torch_dist' is read"):
        checkpoint.open(folder)


def test_paths_of_items_and_tensors_are_kept() -> None:
    """A path belongs to the tensor or item of its name; tensors that were renamed lose theirs."""
    found = SimpleNamespace(
        paths={"rng": ("rng",), "weight": ("model", "weight"), "old": ("old",)},
        items={"rng": object(), "bytes": object()},
    )
    kept = reader._keep_paths(found, {"weight": object(), "new": object()})  # type: ignore[arg-type]
    assert kept == {"rng": ("rng",), "weight": ("model", "weight")}


KEY = "nd_reformulated_orig_global_shape"


def flat_tensor(folder: Path, whole: np.ndarray) -> tuple[StoredTensor, Checkpoint]:
    """A tensor of (4, 6) in two blocks of rows, of which the first is shared by two ranks."""
    flat = whole.reshape(2, 1, 12)
    boxes = [
        (0, Box((0, 0, 0), (1, 1, 7))),
        (0, Box((1, 0, 0), (2, 1, 12))),
        (1, Box((0, 0, 7), (1, 1, 12))),
    ]
    addresses: dict[int, list[FileRange]] = {0: [], 1: []}
    content = b""
    for rank, box in boxes:
        addresses[rank].append(FileRange("data", len(content)))
        index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        content += flat[index].tobytes()
    (folder / "data").write_bytes(content)
    binding = Binding(
        Layout.from_boxes((2, 1, 12), boxes, 2), {r: tuple(a) for r, a in addresses.items()}, {}
    )
    tensor = StoredTensor("w", dtype("float32"), binding)
    files = (StoredFile("data", len(content), 0),)
    return tensor, Checkpoint(folder, "torch-dist", {"w": tensor}, files)


def test_ranges_are_boxes_of_the_parameter(tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    tensor, _ = flat_tensor(tmp_path, whole)
    bound = bind_flat_ranges(tensor, {KEY: (4, 6)})
    assert bound.shape == (4, 6)
    files = (StoredFile("data", 96, 0),)
    found = checkpoint.read_tensor(Checkpoint(tmp_path, "torch-dist", {"w": bound}, files), "w")
    assert np.array_equal(found, whole)


def test_blocks_that_do_not_form_the_shape_are_an_error(tmp_path: Path) -> None:
    tensor, _ = flat_tensor(tmp_path, np.zeros((4, 6), np.float32))
    with pytest.raises(FormatError, match="they do not form its shape"):
        bind_flat_ranges(tensor, {KEY: (4, 5)})
    # Of a tensor that was not flattened, nothing is said.
    assert bind_flat_ranges(tensor, {}) is tensor
