"""What ranks hold in memory, as a checkpoint: found shapes, what does not fit, and its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from checkpoint.checkpoint_files import cuts, small_folder, tensors
from checkpoint.model_files import write_llama
from reshard import checkpoint
from reshard.errors import RecipeError, ReshardError, ShardError, UsageError
from reshard.mesh import DeviceMesh

TP2 = DeviceMesh.of(tp=2)


def test_shapes_are_found() -> None:
    mesh = DeviceMesh.of(dp=2, tp=2)
    rows = {rank: (3, 4) if rank < 2 else (2, 4) for rank in range(4)}
    held = {rank: {"rows": rows[rank], "both": (2, 3), "same": (7,)} for rank in range(4)}
    found = checkpoint.describe_ranks(held, mesh, rules=["rows=dp, -", "both=dp, tp", "same=-"])
    assert {name: one.shape for name, one in found.tensors.items()} == {
        "rows": (5, 4),
        "both": (4, 6),
        "same": (7,),
    }
    assert found.mesh is mesh
    assert found["both"].spec == "dp, tp"
    assert found.ranks == 4
    with pytest.raises(ShardError, match="described by shapes alone"):
        checkpoint.load(found)


def test_tensors_of_pytorch_are_described_and_shared(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    parts = [torch.arange(6.0).reshape(2, 3).to(torch.bfloat16) + 10 * rank for rank in range(2)]
    held = {
        rank: {"w": part.t().contiguous().t(), "n": torch.nn.Parameter(torch.ones(2))}
        for rank, part in enumerate(parts)
    }
    found = checkpoint.describe_ranks(held, TP2, rules=["w=tp, -", "n=-"])
    assert found["w"].dtype.name == "bfloat16" and found["w"].shape == (4, 3)
    assert found["n"].shape == (2,)
    checkpoint.convert(found, tmp_path / "saved", to="full", format="torch-pickle")
    (file,) = (tmp_path / "saved").glob("*.bin")
    assert torch.equal(torch.load(file)["w"], torch.cat(parts))


def test_tensors_without_memory_are_described_alone() -> None:
    torch = pytest.importorskip("torch")
    held = {rank: {"w": torch.empty(2, 3, device="meta")} for rank in range(2)}
    found = checkpoint.describe_ranks(held, TP2, rules=["w=tp, -"])
    assert found["w"].shape == (4, 3)
    with pytest.raises(ShardError, match="described by shapes alone"):
        checkpoint.load(found)
    sparse = {rank: {"w": torch.eye(2).to_sparse()} for rank in range(2)}
    with pytest.raises(UsageError, match=r"a tensor of torch.sparse_coo of 'w'; give the rank's"):
        checkpoint.describe_ranks(sparse, TP2, rules=["w=tp, -"])


def test_copies_of_a_part_count_once() -> None:
    """Two key/value heads of 3 on four ranks: each has one, which another has as well."""
    mesh = DeviceMesh.of(tp=4)
    held = {rank: {"k": (3, 5)} for rank in range(4)}
    found = checkpoint.describe_ranks(held, mesh, rules=["k=tp@heads2, -"])
    assert found["k"].shape == (6, 5)
    plain = checkpoint.describe_ranks(held, mesh, rules=["k=tp, -"])
    assert plain["k"].shape == (12, 5)


def test_a_recipe_over_a_real_model(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model")
    opened = checkpoint.open(source)
    config = checkpoint.formats.opening.read_config(opened)
    request = {"to": "tp=4", "recipe": "llama"}
    held = {rank: checkpoint.load(opened, rank=rank, **request) for rank in range(4)}
    found = checkpoint.describe_ranks(held, "tp=4", recipe="llama", config=config)
    assert checkpoint.compare(found, opened).is_same
    target = tmp_path / "written"
    checkpoint.convert(found, target, to="tp=2", rules=["*=..."])
    assert checkpoint.compare(target, opened).is_same


@given(st.data(), tensors())
def test_any_cut(data: st.DataObject, whole: dict[str, Any]) -> None:
    """What ranks load of a checkpoint is, described, that checkpoint."""
    mesh, specs = data.draw(cuts(whole))
    layouts = {name: specs[name].layout(one.shape) for name, one in whole.items()}
    if any(layout.contributions > 1 or layout.is_padded for layout in layouts.values()):
        return
    with small_folder(64) as folder:
        from checkpoint.checkpoint_files import write_file

        write_file(folder / "model.safetensors", whole)
        held = {
            rank: checkpoint.load(folder / "model.safetensors", layouts, rank)
            for rank in sorted(mesh.devices)
        }
        rules = [
            reshard.recipes.Rule(name.replace("[", "[[]"), str(spec) or "...")
            for name, spec in specs.items()
        ]
        try:
            found = checkpoint.describe_ranks(held, mesh, rules=rules)
        except ReshardError:
            # Empty parts, and copies, do not always tell the whole length.
            return
        if all(found[name].shape == one.shape for name, one in whole.items()):
            assert checkpoint.compare(found, folder / "model.safetensors").is_same


W = {0: {"w": (2, 4)}, 1: {"w": (2, 4)}}


@pytest.mark.parametrize(
    ("ranks", "rules", "error", "says"),
    [
        ({0: {"w": (2, 4)}}, ["w=tp, -"], ShardError, "nothing says what rank 1 of tp=2 holds"),
        ({**W, 7: {}}, ["w=tp, -"], UsageError, "rank 7 is none of tp=2, whose ranks are 0 to 1"),
        ({**W, 1: {}}, ["w=tp, -"], ShardError, r"'w' sharded by `tp, -`: rank 0 has \[2, 4\]"),
        ({**W, 1: {"w": (2, 5)}}, ["w=tp, -"], ShardError, "is 4 long on rank 0 and 5 on rank 1"),
        ({**W, 1: {"w": (3, 4)}}, ["w=tp, -"], ShardError, "rank 0 has .*2, 4.*of .5, 4"),
        ({**W, 1: {"w": (8,)}}, ["w=tp, -"], ShardError, "are not of one tensor"),
        ({**W, 1: {"w": ("int8", (2, 4))}}, ["w=tp, -"], ShardError, "not of one tensor"),
        ({**W, 1: {"w": "text"}}, ["w=tp, -"], UsageError, "has 'text' of 'w'; give a NumPy"),
        ({**W, 1: {"w": (2, -4)}}, ["w=tp, -"], UsageError, "give a NumPy array or a PyTorch"),
        (W, ["v=tp, -"], RecipeError, "no rule"),
        (W, ["w=tp"], RecipeError, "'w'"),
        ([W], ["w=tp, -"], UsageError, "ranks of list; give"),
    ],
)
def test_what_does_not_fit_is_said(ranks: Any, rules: Any, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        checkpoint.describe_ranks(ranks, TP2, rules=rules)


def test_arrays_are_not_copied(tmp_path: Path) -> None:
    held = {rank: {"w": np.full((2, 3), rank, np.int32)} for rank in range(2)}
    found = checkpoint.describe_ranks(held, TP2, rules=["w=tp, -"])
    held[1]["w"][...] = 9
    assert checkpoint.read_tensor(found, "w").tolist() == [[0] * 3] * 2 + [[9] * 3] * 2
    # A view of other strides is one too.
    held[0]["w"] = np.arange(6, dtype=np.int32).reshape(3, 2).T
    found = checkpoint.describe_ranks(held, TP2, rules=["w=tp, -"])
    checkpoint.convert(found, tmp_path / "dcp", to="full", format="torch-dcp")
    whole = checkpoint.load(tmp_path / "dcp")["w"]
    assert whole.tolist() == [[0, 2, 4], [1, 3, 5], [9] * 3, [9] * 3]
