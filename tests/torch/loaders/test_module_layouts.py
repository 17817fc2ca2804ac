"""Modules that say how they are cut, against what torch says of each rank's part."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from reshard.errors import LayoutError, UsageError
from reshard.mesh import DeviceMesh
from reshard.recipes.engine_layouts import EngineLayout
from reshard.torch.loaders.module_layouts import module_layouts


class Block(torch.nn.Module):
    """Two linear layers between norms, whose odd sizes divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(7)
        self.up = torch.nn.Linear(7, 11)
        self.down = torch.nn.Linear(11, 7)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("mask", torch.ones(3), persistent=False)


def parallelize(rank: int, dp: int, tp: int) -> Block:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    block = Block()
    if tp > 1:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if dp > 1:
        fully_shard(block, mesh=mesh["dp"])
    return block


def fill(layout: EngineLayout, rank: int, wholes: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The parameters of a rank, with the values that their pieces say."""
    found = {}
    for name, one in layout.rank(rank).parameters.items():
        values = torch.full(one.shape, -1.0)
        for piece in one.pieces:
            region = torch.as_strided(
                wholes[piece.source], piece.box.shape, piece.view.strides, piece.view.offset
            )
            at = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
            values[at] = region
        found[name] = values
    return found


def chunk(tensor: torch.Tensor, parts: int, part: int, dimension: int) -> torch.Tensor:
    """A part of a tensor cut by `torch.chunk`, which leaves empty ones out."""
    found = tensor.chunk(parts, dimension)
    return found[part] if part < len(found) else tensor.narrow(dimension, 0, 0)


# The dimension that tensor parallelism cuts; all parameters are cut again by FSDP.
CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1), (3, 1), (2, 2), (2, 3), (3, 2)])
def test_shards_on_two_mesh_axes_are_chunks_of_chunks(dp: int, tp: int) -> None:
    found = module_layouts(lambda rank: parallelize(rank, dp, tp), DeviceMesh.of(dp=dp, tp=tp))
    wholes = {
        name: torch.arange(float(tensor.numel())).reshape(tensor.shape)
        for name, tensor in Block().state_dict().items()
    }
    assert set(found.sources) == set(wholes) and "mask" not in found.sources
    for rank in range(dp * tp):
        values = fill(found, rank, wholes)
        for name, whole in wholes.items():
            part = whole
            if name in CUT:
                part = chunk(part, tp, rank % tp, CUT[name])
            if name != "scale":
                part = chunk(part, dp, rank // tp, 0)
            if part.numel():
                assert torch.equal(values[name], part), (rank, name)
            else:
                assert name not in values or not values[name].numel()
    # Every element of every tensor is on some rank.
    for name, layout in found.source_layouts().items():
        held = torch.zeros(wholes[name].shape, dtype=torch.bool)
        for rank in range(dp * tp):
            for box in layout.boxes(rank):
                held[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] = True
        assert held.all(), name


def test_tied_parameters_and_sources_of_other_stages_are_listed() -> None:
    def build(rank: int) -> dict[str, torch.Tensor]:
        weight = torch.empty(4, 3)
        return {"embed": weight, "head": weight} if rank == 0 else {"norm": torch.empty(3)}

    found = module_layouts(build, DeviceMesh.of(pp=2))
    assert found.rank(0).tied == (("embed", "head"),)
    assert found.rank(0).unread == ("norm",) and found.rank(1).unread == ("embed", "head")
    assert found.engine == "torch" and found.version == torch.__version__


@dataclass
class ShardedTensor:
    """As Megatron-core has it; what reads it goes by the name of the class."""

    key: str
    data: torch.Tensor
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    flattened_range: slice | None = None


@dataclass
class ShardedTensorFactory:
    key: str
    data: torch.Tensor
    parts: list[Any]

    def build(self) -> list[Any]:
        return self.parts


@dataclass
class ShardedObject:
    key: str


def test_sharded_tensors_are_boxes_of_their_keys() -> None:
    def build(rank: int) -> dict[str, Any]:
        row = torch.empty(2, 6)
        fused = torch.empty(4, 6)
        gate, up = (
            ShardedTensor("fc1", part, (2, 6), (3, 8, 6), (1, 2 * rank + first, 0))
            for part, first in zip(fused.chunk(2), (0, 4), strict=True)
        )
        return OrderedDict(
            {
                "layers.0.fc1": ShardedTensorFactory("fc1", fused, [{"w": [gate]}, up]),
                "layers.0.proj": ShardedTensor("proj", row, (2, 6), (3, 2, 12), (2, 0, 6 * rank)),
                "layers.0._extra_state": ShardedObject("state"),
            }
        )

    found = module_layouts(build, DeviceMesh.of(tp=2), "megatron", "0.16.1")
    assert found.sources["fc1"].shape == (3, 8, 6)
    wholes = {
        name: torch.arange(float(torch.Size(one.shape).numel())).reshape(one.shape)
        for name, one in found.sources.items()
    }
    for rank in (0, 1):
        values = fill(found, rank, wholes)
        halves = wholes["fc1"][1].chunk(2)
        expected = torch.cat([half[2 * rank : 2 * rank + 2] for half in halves])
        assert torch.equal(values["layers.0.fc1"], expected)
        assert torch.equal(values["layers.0.proj"], wholes["proj"][2, :, 6 * rank : 6 * rank + 6])


def wrong(entry: Any) -> Any:
    return lambda rank: {"w": entry}


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda rank: 3, UsageError, "a module, a state dict"),
        (wrong(3), UsageError, "'w' on rank 0 is a int"),
        (lambda rank: {"w": torch.empty(2 + rank)}, LayoutError, "'w' is float32 \\[2\\] on one"),
        (
            wrong(ShardedTensor("k", torch.empty(4), (4,), (8,), (0,), slice(0, 4))),
            LayoutError,
            "range of a flattened tensor",
        ),
        (
            wrong(
                ShardedTensorFactory(
                    "k",
                    torch.empty(4),
                    [ShardedTensor("k", torch.empty(4), (4,), (8,), (0,))],
                )
            ),
            LayoutError,
            "computed, or stored in another order",
        ),
    ],
)
def test_builds_that_return_no_model_are_refused(
    build: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        module_layouts(build, DeviceMesh.of(tp=2))
