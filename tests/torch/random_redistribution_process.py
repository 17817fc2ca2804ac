"""One rank of a job that redistributes tensors between layouts of every kind.

All ranks draw the same examples, and compare with the plan carried out in one process.
"""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import reshard
from oracle import Contents, shards_of
from rank_cases import report_each
from reshard.errors import ReshardError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.torch import Redistribution, redistribute
from reshard.torch.exchange.exchange import MessageExchange
from reshard.torch.exchange.packing.messages import RankTransfers
from selection import choose
from strategies import (
    LayoutAndContents,
    box_layouts,
    contents_of_spec,
    flat_range_layouts,
    meshes,
    overlapping_box_layouts,
    shapes,
    specs,
    whole_layouts,
)

DTYPES = ("float32", "float64", "complex64", "bfloat16", "int16", "uint8")
ALWAYS = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    # Ranks that shrink a failure would wait for those that have none.
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


@st.composite
def layouts_on(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> LayoutAndContents:
    """Layouts of every kind, of which no slot is beyond the job's ranks."""
    if draw(st.booleans()):
        mesh = draw(meshes(max_devices=ranks))
        devices = draw(st.permutations(range(ranks)))[: mesh.size]
        mesh = DeviceMesh("mesh", mesh.shape, mesh.axis_names, devices)
        spec = draw(specs(mesh, shape))
        return spec.layout(shape), contents_of_spec(spec, shape)
    kinds = (whole_layouts, flat_range_layouts, box_layouts)
    kind = draw(st.sampled_from([*kinds, overlapping_box_layouts]))
    if kind is overlapping_box_layouts:
        return draw(overlapping_box_layouts(shape, max_slots=ranks))
    layout, contents = draw(kind(shape))
    assume(max(layout.holders, default=0) < ranks)
    return layout, contents


@st.composite
def movements_on(draw: st.DrawFn, ranks: int) -> tuple[LayoutAndContents, Layout]:
    shape = draw(shapes())
    source = draw(layouts_on(shape, ranks))
    target, _ = draw(layouts_on(shape, ranks))
    return source, target


def tensors(contents: Contents, dtype: str) -> dict[int, torch.Tensor]:
    """The local tensors of all ranks: of random numbers, so that the order of sums matters."""
    random = np.random.default_rng(7)
    shape = contents.shape
    dense = [random.normal(0, 50, shape) for _ in range(contents.contributions)]
    kind = getattr(torch, dtype)
    found = {}
    for slot, local in shards_of(contents, dense).items():
        values = torch.from_numpy(np.asarray(abs(local) if dtype == "uint8" else local))
        found[slot] = values.to(kind)
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return (
        tensor.clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
        if tensor.numel()
        else b""
    )


def outcome(action: Callable[[], Any]) -> Any:
    """What it gives, or the error that it raises, as text."""
    try:
        return action()
    except ReshardError as error:
        return f"{type(error).__name__}: {error}"


MOVED: list[tuple[int, int, int]] = []


@settings(max_examples=choose(16, 80), **ALWAYS)
@given(st.data())
def random_redistributions_give_what_the_plan_gives(data: st.DataObject) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    (source, contents), target = data.draw(movements_on(ranks))
    dtype = data.draw(st.sampled_from(DTYPES))
    limit = data.draw(st.sampled_from([64, 160, 1 << 10, 1 << 20]))
    in_place = data.draw(st.booleans())
    shards = tensors(contents, dtype)
    plan = reshard.plan(source, target)
    expected = outcome(lambda: plan.run(shards))
    kind = getattr(torch, dtype)
    out = None
    if in_place and not isinstance(expected, str) and rank in expected:
        # Every other element of a tensor twice as wide.
        out = torch.zeros((*expected[rank].shape, 2), dtype=kind)[..., 1]
    begun = outcome(
        lambda: redistribute(
            shards.get(rank),
            target,
            source=source,
            dtype=kind,
            out=out,
            extra_bytes=limit,
            async_op=True,
        )
    )
    if isinstance(begun, str) or isinstance(expected, str):
        assert isinstance(begun, str), expected
        assert isinstance(expected, str), begun
        assert expected.split(":")[0] in begun
        return
    assert isinstance(begun, Redistribution)
    found = begun.wait()
    assert begun.extra_bytes <= limit
    MOVED.append((begun.plan.lower_bound_bytes, begun.received_bytes, begun.sent_bytes))
    if rank not in expected:
        assert found is None
        return
    assert found.dtype == kind
    assert found.shape == expected[rank].shape
    assert bits(found) == bits(expected[rank]), (found, expected[rank])
    assert out is None or found is out


@settings(max_examples=choose(10, 30), **ALWAYS)
@given(st.data())
def grouped_messages_give_what_the_plan_gives(data: st.DataObject) -> None:
    """Several tensors at once, the messages of all pairs posted together, as NCCL needs it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    movements, expected = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        (source, contents), target = data.draw(movements_on(ranks))
        shards = tensors(contents, "float32")
        plan = reshard.plan(source, target, dtype="float32")
        found = outcome(lambda plan=plan, shards=shards: plan.run(shards))
        assume(not isinstance(found, str))
        shape = target.local_shape(rank) if rank < target.slots else None
        local = None if shape is None else torch.zeros(shape)
        own = shards.get(rank)
        movements.append(RankTransfers.of(plan.change, plan.for_rank(rank), rank, own, local))
        expected.append(found.get(rank))
    limit = 64 * (ranks - 1)
    exchange = MessageExchange(movements, None, torch.device("cpu"), limit, is_grouped=True)
    assert exchange.extra_bytes <= limit
    for _ in range(2):
        for movement in movements:
            if movement.targets[0] is not None:
                movement.targets[0].zero_()
        exchange.run()
        for movement, whole in zip(movements, expected, strict=True):
            if movement.targets[0] is not None:
                assert bits(movement.targets[0]) == bits(whole)


def random_redistributions_move_the_fewest_bytes() -> None:
    moved = torch.tensor(MOVED)
    dist.all_reduce(moved)
    fewest = torch.tensor([lower_bound for lower_bound, *_ in MOVED])
    assert torch.equal(moved[:, 1], fewest)
    assert torch.equal(moved[:, 2], fewest)
    assert len(MOVED) > choose(6, 30)


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    warnings.filterwarnings("ignore", message="ComplexHalf|Casting complex")
    report_each(
        [
            random_redistributions_give_what_the_plan_gives,
            grouped_messages_give_what_the_plan_gives,
            random_redistributions_move_the_fewest_bytes,
        ]
    )


if __name__ == "__main__":
    main()
