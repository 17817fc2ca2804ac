"""Every rank of a job gets its own part of a checkpoint, however the checkpoint is cut."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.checkpoint_files import Tensor, tensor, write_file
from reshard import DeviceMesh, checkpoint
from reshard.errors import ShardError, UsageError

torch = pytest.importorskip("torch")

from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

import reshard.torch  # noqa: E402
from checkpoint.torch_checkpoints import cut, mesh_of, standing_for  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def as_torch(whole: Tensor) -> Any:
    data = torch.frombuffer(bytearray(whole.bits.tobytes()), dtype=torch.uint8)
    return data.view(getattr(torch, whole.dtype.name)).reshape(whole.shape)


def save_torch(tensors: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)


def assert_equal_parameters(model: Any, other: Any) -> None:
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def bits(value: Any) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


WHOLE = {
    "w": tensor("float32", (13, 6), 1),
    "h": tensor("bfloat16", (5, 4, 3), 2),
    "b": tensor("int64", (10,), 3),
    "s": tensor("float64", (), 4),
}


def stored(folder: Path, to: str) -> Path:
    write_file(folder / "model.safetensors", WHOLE)
    if to == "full":
        return folder
    rules = ["s=...", "w=-, tp", "*=tp, ..."]
    checkpoint.convert(
        folder, folder.with_name("cut"), to=to, rules=[*rules, "*=..."] if rules else []
    )
    return folder.with_name("cut")


@pytest.mark.parametrize(
    ("before", "ranks"), list(itertools.product(["full", "tp=2", "tp=3"], [1, 2, 4]))
)
def test_shards_of_a_one_dimensional_mesh(tmp_path: Path, before: str, ranks: int) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    source = stored(folder, before)
    for rank in range(ranks):
        with standing_for(rank, ranks):
            mesh = mesh_of(ranks)
            places = {"w": Shard(0), "h": Shard(1), "b": Shard(0), "s": Replicate()}
            expected = {n: cut(as_torch(WHOLE[n]), mesh, [p]) for n, p in places.items()}
            state = {n: torch.zeros_like(value) for n, value in expected.items()}
            addresses = {n: value.to_local().data_ptr() for n, value in state.items()}
            report = reshard.torch.load(source, state)
            for name, value in state.items():
                assert bits(value.to_local()) == bits(expected[name].to_local()), (name, rank)
                assert value.to_local().data_ptr() == addresses[name]
            assert report.tensors == 4
            local = [value.to_local() for value in expected.values()]
            assert report.local_bytes == sum(v.numel() * v.element_size() for v in local)


@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0), Shard(0)],
        [Shard(1), Shard(0)],
        [Replicate(), Shard(1)],
        [_StridedShard(0, split_factor=2), Shard(0)],
        [_StridedShard(1, split_factor=2), Shard(1)],
        [Shard(-1), Replicate()],
    ],
    ids=str,
)
def test_a_mesh_of_two_dimensions(tmp_path: Path, placements: list[Any]) -> None:
    write_file(tmp_path / "model.safetensors", {"w": WHOLE["w"]})
    for rank in range(4):
        with standing_for(rank, 4):
            expected = cut(as_torch(WHOLE["w"]), mesh_of(2, 2, names=("dp", "tp")), placements)
            value = torch.zeros_like(expected)
            reshard.torch.load(tmp_path, {"w": value})
            assert bits(value.to_local()) == bits(expected.to_local()), rank


def test_a_layout_names_the_mesh_dimensions() -> None:
    with standing_for(1, 4):
        mesh = mesh_of(2, 2, names=("dp", "tp"))
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        value = cut(torch.zeros(8, 2), mesh, placements)
        assert str(reshard.torch.sharding_of(value)) == "dp@stride2 / tp, -"
        partial = torch.distributed.tensor.DTensor.from_local(
            torch.zeros(4, 2), mesh, [Partial("avg"), Shard(0)], run_check=False
        )
        assert str(reshard.torch.sharding_of(partial)) == "tp, - | mean(dp)"
        assert reshard.torch.layout_of(partial).contributions == 2


def test_a_module_with_buffers(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    wanted = {
        name: torch.rand_like(v.float()).to(v.dtype) for name, v in model.state_dict().items()
    }
    arrays = {name: value.numpy() for name, value in wanted.items()}
    from safetensors.numpy import save_file

    save_file({n: np.asarray(a, order="C") for n, a in arrays.items()}, tmp_path / "m.safetensors")
    report = reshard.torch.load(tmp_path / "m.safetensors", model)
    assert report.tensors == len(wanted)
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name])


def test_all_mismatches_of_a_load_are_one_error(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", WHOLE)
    state = {
        "w": torch.zeros(13, 5),
        "h": torch.zeros(5, 4, 3),
        "b": torch.full((10,), 7),
        "x": torch.zeros(1),
    }
    with pytest.raises(ShardError) as caught:
        reshard.torch.load(tmp_path, state)
    message = str(caught.value)
    assert message.startswith("4 tensors do not fit")
    assert "x: not in the checkpoint" in message
    assert "s: in the checkpoint only" in message
    assert "w: shape [13, 5], stored [13, 6]" in message
    assert "h: dtype float32, stored bfloat16" in message
    assert torch.equal(state["b"], torch.full((10,), 7))


def test_tensors_that_cannot_be_written_are_reported(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", WHOLE)
    state = {
        "w": torch.zeros(13, 6, device="meta"),
        "h": torch.zeros(5, 4, 1, dtype=torch.bfloat16).expand(5, 4, 3),
        "b": torch.zeros(10, dtype=torch.int64).to_sparse(),
        "s": torch.zeros((), dtype=torch.float64),
    }
    with pytest.raises(ShardError) as caught:
        reshard.torch.load(tmp_path, state)
    message = str(caught.value)
    assert message.startswith("3 tensors do not fit")
    assert "w: a torch.strided tensor on meta; give one dense and in memory" in message
    assert "strides [4, 1, 0], so that elements of it share memory" in message
    assert "b: a torch.sparse_coo tensor" in message
    assert state["s"] == 0


def test_invalid_models_and_numbers_of_threads_are_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", WHOLE)
    for target in (None, 3, [torch.zeros(1)]):
        with pytest.raises(UsageError, match="a model of type"):
            reshard.torch.load(tmp_path, target)  # type: ignore[arg-type]
    state = {"b": torch.zeros(10, dtype=torch.int64)}
    for threads in (0, -1, "a"):
        with pytest.raises(UsageError, match=r"threads .* must be"):
            reshard.torch.load(tmp_path, state, strict=False, threads=threads)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_module_and_autograd(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"weight": WHOLE["w"], "bias": WHOLE["w"]})
    model = torch.nn.Module()
    for name in ("weight", "bias"):
        setattr(model, name, torch.nn.Parameter(torch.zeros(13, 6)))
    version = model.weight._version
    reshard.torch.load(tmp_path, torch.compile(model))
    assert bits(model.weight.detach()) == WHOLE["w"].bits.tobytes()
    # Whoever saved it for a backward is told that it has changed.
    assert model.weight._version > version


def test_names_only_in_the_checkpoint_may_be_ignored(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", WHOLE)
    state = {"b": torch.zeros(10, dtype=torch.int64)}
    report = reshard.torch.load(tmp_path, state, strict=False)
    assert bits(state["b"]) == WHOLE["b"].bits.tobytes()
    assert report.unused == ("w", "h", "s")


def test_the_models_names_are_found_after_a_trainers_prefix(tmp_path: Path) -> None:
    model, saved = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    state = {
        **{f"app.model.{name}": value for name, value in saved.state_dict().items()},
        "app.optim.state.weight.exp_avg": torch.ones(4, 3),
        "app.optim.state.bias.exp_avg": torch.ones(4),
        "rng_state": torch.zeros(8),
    }
    save_torch(state, tmp_path / "m.safetensors")
    report = reshard.torch.load(tmp_path / "m.safetensors", model)
    assert report.prefix == "app.model."
    assert report.tensors == 2
    assert {*report.unused} == {name for name in state if ".model." not in name}
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True)
    )


@pytest.mark.parametrize("nested", [True, False])
def test_an_ordinary_save_of_pytorch_is_loaded(tmp_path: Path, nested: bool) -> None:
    import torch.distributed.checkpoint as dcp

    saved = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(saved.parameters())
    saved(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    if nested:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(saved, optimizer)
        dcp.save({"model": weights, "optim": moments, "step": 3}, checkpoint_id=tmp_path / "saved")
    else:
        state = {"model": saved.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
        torch.save(state, tmp_path / "saved")
    assert reshard.torch.load(tmp_path / "saved", model).prefix == "model."
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True)
    )


def test_what_only_a_training_checkpoint_has_of_the_model_is_an_error(tmp_path: Path) -> None:
    state = {"model.weight": torch.ones(4, 3), "model.bias": torch.ones(4)}
    others = {"model.head": torch.ones(2), "other.weight": torch.ones(4, 5)}
    save_torch({**state, **others}, tmp_path / "m.safetensors")
    model = torch.nn.Linear(3, 4)
    with pytest.raises(ShardError, match=r"2 tensors do not fit") as caught:
        reshard.torch.load(tmp_path / "m.safetensors", model)
    assert "model.head: in the checkpoint only" in str(caught.value)
    assert reshard.torch.load(tmp_path / "m.safetensors", model, strict=False).tensors == 2


def test_several_models_and_layers_are_not_guessed(tmp_path: Path) -> None:
    both = {"weight": torch.ones(4, 3), "bias": torch.ones(4)}
    for prefixes in (("model.", "ema."), ("layers.0.",), ("model.layers.0.", "model.layers.1.")):
        state = {f"{one}{name}": v.clone() for one in prefixes for name, v in both.items()}
        save_torch(state, tmp_path / "m.safetensors")
        model = torch.nn.Linear(3, 4)
        before = model.weight.clone()
        with pytest.raises(ShardError, match=rf"select='{prefixes[0][:-1]}'"):
            reshard.torch.load(tmp_path / "m.safetensors", model, strict=False)
        assert torch.equal(model.weight, before)
        chosen = checkpoint.open(tmp_path / "m.safetensors", select=prefixes[0][:-1])
        assert reshard.torch.load(chosen, model).tensors == 2


def test_many_other_names_are_summarized(tmp_path: Path) -> None:
    stored = {f"decoder.{number}.w": torch.ones(2) for number in range(30)}
    save_torch(stored, tmp_path / "m.safetensors")
    target = {f"model.layers.{number}.w": torch.zeros(2) for number in range(30)}
    with pytest.raises(ShardError) as caught:
        reshard.torch.load(tmp_path / "m.safetensors", target)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "30 of the target's 30 names, such as 'model.layers.0.w'" in lines[1]
    assert "'decoder.0.w'" in lines[1]
    assert "rename" in lines[1]
    assert "30 tensors are in the checkpoint only (first: decoder.0.w); strict=False" in lines[2]
    inner = {f"outer.{name}": value.clone() for name, value in stored.items()}
    with pytest.raises(ShardError, match=r"has them without 'outer\.'"):
        reshard.torch.load(tmp_path / "m.safetensors", inner)


def test_a_mesh_in_another_order_of_ranks(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"b": WHOLE["b"]})
    order = [3, 1, 2, 0]
    for rank in range(4):
        with standing_for(rank, 4):
            mesh = torch.distributed.device_mesh.DeviceMesh("cpu", torch.tensor(order))
            local = torch.zeros(len(range(10)[3 * order.index(rank) :][:3]), dtype=torch.int64)
            value = torch.distributed.tensor.DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=torch.Size([10]), stride=(1,)
            )
            reshard.torch.load(tmp_path, {"b": value})
            place = order.index(rank)
            expected = as_torch(WHOLE["b"])[3 * place : 3 * place + 3]
            assert torch.equal(value.to_local(), expected)
            assert reshard.torch.sharding_of(value).mesh == DeviceMesh(
                "torch", (4,), ("dim0",), order
            )
