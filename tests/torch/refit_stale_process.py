"""One rank of a job: what is kept between runs must not outlive what it was made of."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from rank_cases import run_cases
from refit_models import expect, part, refused
from reshard.errors import RunError, ShardError
from reshard.layout import Box, Layout
from reshard.torch import Refit, redistribute
from reshard.torch.exchange.groups import rank_group
from selection import choose


def make_numbers(seed: str) -> list[int]:
    chance = random.Random(seed)
    return [chance.randint(-(1 << 63), (1 << 63) - 1) for _ in range(5)]


def groups_of_any_ranks_find_the_maxima() -> None:
    """Groups of any number of ranks, in any order, find the greatest of all, time and again."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    order = [(3 * n + 1) % ranks for n in range(ranks)]
    for count in range(1, ranks + 1):
        group = dist.new_group(order[:count], sort_ranks=False)
        if rank not in order[:count]:
            continue
        among = rank_group(group)
        for turn in range(20):
            every = [make_numbers(f"{turn} {one}") for one in range(ranks)]
            found = among.allreduce_max(every[rank])
            expected = [max(every[one][n] for one in order[:count]) for n in range(5)]
            expect(found == expected, f"{found} of {count} ranks, not {expected}")


def models() -> tuple[dict[str, Any], dict[str, Any]]:
    """Both models, of plain tensors, parameters and DTensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def make(value: float, cut: Any) -> dict[str, Any]:
        whole = torch.full((10, 4), value)
        return {
            "plain": whole.clone(),
            "parameter": torch.nn.Parameter(whole.clone()),
            "cut": distribute_tensor(whole.clone(), mesh, [cut]),
            "cut parameter": torch.nn.Parameter(distribute_tensor(whole.clone(), mesh, [cut])),
        }

    return make(1.0, Shard(0)), make(0.0, Replicate())


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def lie_elsewhere(tensor: Any) -> None:
    """Other memory, of the same values."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = tensor._local_tensor.detach().clone()
    else:
        tensor.data = tensor.detach().clone()


def be_another_type(tensor: Any) -> None:
    if isinstance(tensor, DTensor):
        tensor._local_tensor = tensor._local_tensor.detach().double()
    else:
        tensor.data = tensor.detach().double()


def be_longer(tensor: Any) -> None:
    """Of more elements."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = tensor._local_tensor.detach().repeat(4, 1)
    else:
        tensor.data = tensor.detach().repeat(4, 1)


def be_empty(tensor: Any) -> None:
    """Without memory, as FSDP leaves what nobody needs."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = torch.empty(0)
    else:
        tensor.data = torch.empty(0)


def view_as(tensor: Any, look: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The same memory, looked at otherwise."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = look(tensor._local_tensor.detach())
    else:
        tensor.data = look(tensor.detach())


def be_halves(tensor: Any) -> None:
    view_as(tensor, lambda one: one.view(torch.float16))


def be_turned(tensor: Any) -> None:
    view_as(tensor, torch.Tensor.t)


def be_shorter(tensor: Any) -> None:
    view_as(tensor, lambda one: one[:1])


CHANGES: dict[Callable[[Any], None], str] = {
    **dict.fromkeys((lie_elsewhere, be_another_type, be_longer, be_empty), "is at another address"),
    be_halves: "dense elements of torch.float16, and had",
    be_turned: "elements of torch.float32 with strides (1, 4), and had",
    be_shorter: "has 4 dense elements of torch.float32, and had",
}


def tensors_whose_memory_changed_are_refused_on_all_ranks() -> None:
    """Whatever a tensor is, and whatever is done to it, on one rank alone, all ranks are told."""
    last = dist.get_world_size() - 1
    for change, said in CHANGES.items():
        for number, name in enumerate(models()[0]):
            for side in choose(range(number % 2, number % 2 + 1), range(2)):
                both = models()
                done = Refit.prepare(*both)
                done.run()
                done.run()
                # What others lie in must not be taken for what this one lay in.
                if dist.get_rank() == last:
                    change(both[side][name])
                told = refused(done.run, RunError, f"rank {last}: {name} ")
                expect(said in told, f"{said!r} is not in {told}")
                expect(done.is_usable, f"{change.__name__} of {name}: nothing was written")
                lie_elsewhere(both[side][name])
                anew = Refit.prepare(*both, cast=True) if change is lie_elsewhere else None
                if anew is not None:
                    anew.run()
                    expect(bool((local_of(both[1][name]) == 1).all()), f"{name} prepared anew")


def replaced_parameters_are_refused_on_all_ranks() -> None:
    """A module that has got another parameter, on one rank alone, is refused on all."""
    last = dist.get_world_size() - 1
    for side in range(2):
        both = [torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(2)]
        done = Refit.prepare(*both, check_replicas=False)
        done.run()
        kept = both[side][0].weight
        if dist.get_rank() == last:
            both[side][0].weight = torch.nn.Parameter(torch.zeros(4, 4))
        refused(done.run, RunError, f"rank {last}: the module has another tensor as 0.weight")
        both[side][0].weight = kept
        done.run()


def names_that_are_not_texts_are_refused_on_all_ranks() -> None:
    """A name that is no text, on one rank alone, is told to all."""
    last = dist.get_world_size() - 1
    model = {1 if dist.get_rank() == last else "1": torch.zeros(2)}
    refused(lambda: Refit.prepare(model, {}, strict=False), ShardError, f"rank {last}: a tensor na")


def tensors_that_differ_in_one_property_are_described_separately() -> None:
    """Tensors that are cut alike are described once; those that differ in one thing are not."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    other = init_device_mesh("cpu", (1, ranks))
    cuts = [(one, two) for one in (Shard(0), Shard(1)) for two in (Shard(1), Replicate())]
    kinds = itertools.product((mesh, other), cuts, (torch.float32, torch.float64), (10, 7))
    source, target, whole = {}, {}, {}
    for number, (on, (before, after), dtype, rows) in enumerate(kinds):
        ahead = [Replicate()] * (on.ndim - 1)
        # Twice, so that the second of each kind is one that is known.
        for copy in range(2):
            name = f"{number}.{copy}"
            whole[name] = (torch.arange(rows * 6).view(rows, 6) + 100 * number + copy).to(dtype)
            source[name] = distribute_tensor(whole[name], on, [*ahead, before])
            target[name] = distribute_tensor(torch.zeros_like(whole[name]), on, [*ahead, after])
    Refit.prepare(source, target).run()
    for name, expected in whole.items():
        found = target[name].full_tensor()
        expect(torch.equal(found, expected), f"{name}: {found}, not {expected}")


def cut_source() -> dict[str, Any]:
    """Squares of 4 rows for each rank, by layouts and as a DTensor; and one that all ranks have."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = reshard.spec(reshard.DeviceMesh.of(x=ranks), "x, -").layout((4 * ranks, 4))
    values = torch.arange(16.0).view(4, 4) + 16 * rank
    mesh = init_device_mesh("cpu", (ranks,))
    return {
        "layout": (values.clone(), rows),
        "other": (values + 1000, rows),
        "parameter": torch.nn.Parameter(DTensor.from_local(values + 2000, mesh, [Shard(0)])),
        "everywhere": (torch.ones(3), Layout.replicated((3,), ranks)),
    }


def held_of(value: Any) -> Any:
    """A tensor's memory here, as the same object each time."""
    tensor = value[0] if isinstance(value, tuple) else value
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def swap_layout(model: dict[str, Any], name: str) -> None:
    """The same tensor, of the next rank's rows."""
    ranks, tensor = dist.get_world_size(), model[name][0]
    starts = [4 * ((rank + 1) % ranks) for rank in range(ranks)]
    boxes = [(rank, Box((start, 0), (start + 4, 4))) for rank, start in enumerate(starts)]
    model[name] = tensor, Layout.from_boxes((4 * ranks, 4), boxes)


def swap_strides(model: dict[str, Any], name: str) -> None:
    """The same memory, its rows seen as columns."""
    held = held_of(model[name])
    held.set_(held.untyped_storage(), 0, (4, 4), (1, 4))


def move_memory(model: dict[str, Any], name: str) -> None:
    held = held_of(model[name])
    held.data = held.detach().clone() + 5


def replace_local(model: dict[str, Any], name: str) -> None:
    if isinstance(model[name], DTensor):
        model[name]._local_tensor = model[name]._local_tensor.detach().clone() + 7


def see_as_integers(model: dict[str, Any], name: str) -> None:
    """The same bytes as elements of another type."""
    held = held_of(model[name])
    held.data = held.detach().view(torch.int32)


def swap_names(model: dict[str, Any], name: str) -> None:
    model[name], model["other"] = model["other"], model[name]


def leave_out(model: dict[str, Any], name: str) -> None:
    del model[name]


def write_values(model: dict[str, Any], name: str) -> None:
    held_of(model[name]).detach().add_(3)


def flip_sign(model: dict[str, Any], name: str) -> None:
    """Marked negative, at the same address."""
    held = held_of(model[name])
    held.data = torch._neg_view(held.detach())


def shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value[1].shape if isinstance(value, tuple) else value.shape)


def empty_columns(model: dict[str, Any]) -> dict[str, Any]:
    """A target that is cut along the last dimension, so that parts of the source's parts move."""
    ranks = dist.get_world_size()
    found = {}
    for name, value in model.items():
        shape = shape_of(value)
        text = ", ".join(["-"] * (len(shape) - 1) + ["x"])
        layout = reshard.spec(reshard.DeviceMesh.of(x=ranks), text).layout(shape)
        local = layout.local_shape(dist.get_rank())
        found[name] = None if local is None else torch.zeros(local), layout
    return found


def expect_filled(model: dict[str, Any], target: dict[str, Any], what: str) -> None:
    """The target's tensors are what the source's say now, rank by rank."""
    for name, value in model.items():
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, held_of(value).detach().clone())
        whole = torch.empty(shape_of(value))
        for rank, shard in enumerate(parts):
            if isinstance(value, tuple):
                (box,) = value[1].boxes(rank)
                whole[tuple(map(slice, box.start, box.stop))] = shard
            else:
                whole[4 * rank : 4 * rank + 4] = shard
        found, layout = target[name]
        for box in layout.boxes(dist.get_rank()) if found is not None else ():
            own = whole[tuple(map(slice, box.start, box.stop))]
            expect(torch.equal(found, own), f"{what}: {name}: {found}, not {own}")


def a_changed_source_is_listed_again_for_another_target() -> None:
    """For another target a source counts as known only where nothing of it has changed."""
    ranks = dist.get_world_size()

    def filled(model: dict[str, Any], what: str, **options: Any) -> Refit:
        target = empty_columns(model)
        found = Refit.prepare(model, target, **options)
        for _ in range(2):
            found.run()
            expect_filled(model, target, what)
        return found

    def sent(done: Refit) -> list[Any]:
        return [m for b in done._transfer.batches for e in b.exchanges for m in e.list_sent()]

    # 1. Nothing has changed, or only values: the same messages are sent.
    model = cut_source()
    first = filled(model, "first")
    again = [filled(model, "again"), filled(model, "other limit", extra_bytes=1 << 16)]
    write_values(model, "layout")
    again.append(filled(model, "values"))
    same = [list(map(id, sent(one))) == list(map(id, sent(first))) for one in again]
    expect(same == [True, False, True], f"messages are the same: {same}")
    # What only sends what changed, or has buckets, has messages of its own.
    for options in ({"changed_only": "elements"}, {"buckets": 64}, {"method": "exchange"}):
        filled(model, f"{options}", **options)
        filled(model, "plain again")
    first.run()
    # 2. Whatever changes, of any tensor.
    changes = (
        move_memory,
        replace_local,
        swap_strides,
        swap_layout,
        swap_names,
        leave_out,
        see_as_integers,
        flip_sign,
    )
    for change, name in itertools.product(changes, ("layout", "parameter")):
        if name == "parameter" and change in (swap_layout, swap_names, see_as_integers, flip_sign):
            continue
        model = cut_source()
        before = filled(model, "before")
        change(model, name)
        what = f"{change.__name__} of {name}"
        if change is see_as_integers:
            target = empty_columns(model)
            refused(lambda m=model, t=target: Refit.prepare(m, t), ShardError, "to convert, say")
        elif change is flip_sign:
            target = empty_columns(model)
            refused(lambda m=model, t=target: Refit.prepare(m, t), ShardError, "negative")
        else:
            filled(model, what)
        expect(before is not None, what)
    # 3. Another tensor of the same memory, which then moves.
    model = cut_source()
    before = filled(model, "before")
    model["other"] = model["other"][0].view(4, 4), model["other"][1]
    after = filled(model, "another of the same memory")
    move_memory(model, "other")
    refused(after.run, RunError, "other is at another address")
    before.run()
    # 4. Other groups: in another order, and one whose ranks share no memory.
    model = cut_source()
    first = filled(model, "all")
    turned = dist.new_group(list(range(ranks))[::-1], sort_ranks=False)
    filled(model, "turned", group=turned)
    os.environ["RESHARD_SHARED_MEMORY"] = "never"
    far = filled(model, "far", group=dist.new_group(list(range(ranks))))
    del os.environ["RESHARD_SHARED_MEMORY"]
    expect(not set(map(id, sent(far))) & set(map(id, sent(first))), "messages of other lengths")
    filled(model, "all again")


def tied_tensors_are_compared_in_each_run() -> None:
    """Two tensors of a source that are declared to be one are compared at each run."""
    for planning in ("local", "centralized"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = torch.arange(40.0).reshape(10, 4)
        source = {
            "embed": distribute_tensor(whole.clone(), mesh, [Shard(0)]),
            "head": distribute_tensor(whole.clone(), mesh, [Shard(0)]),
        }
        tied = {"embed": torch.zeros(10, 4)}
        refit = Refit.prepare(source, tied, ties={"head": "embed"}, planning=planning)
        refit.run()
        expect(torch.equal(tied["embed"], whole), "equal tied tensors")
        apart = {"embed": torch.zeros(10, 4), "head": torch.zeros(10, 4)}
        both = Refit.prepare(source, apart, ties={"head": "embed"}, planning=planning)
        if dist.get_rank() == 1:
            source["head"]._local_tensor.add_(1)
        refused(refit.run, RunError, "head of the source differs from embed")
        refused(refit.verify, RunError, "head of the source differs from embed")
        expect(torch.equal(tied["embed"], whole), "written where tied tensors differ")
        # Each has its own in the target: nothing is lost.
        both.run()
        expect(torch.equal(apart["embed"], whole), "two tensors, embed")
        expect(torch.equal(apart["head"], source["head"].full_tensor()), "two tensors, head")
        source["head"]._local_tensor.copy_(source["embed"]._local_tensor)
        refit.run()
        tied_over_stages(planning)
        tied_over_shardings(planning)


def tied_over_stages(planning: Any) -> None:
    """The embedding of the first rank, and the head of the last."""
    rank, whole = dist.get_rank(), torch.arange(40.0).reshape(10, 4)
    source = {0: {"embed": whole.clone()}, dist.get_world_size() - 1: {"head": whole.clone()}}
    own = source.get(rank)
    tied = {"embed": torch.zeros(10, 4)}
    refit = Refit.prepare(own, tied, ties={"head": "embed"}, planning=planning)
    refit.run()
    refit.verify()
    expect(torch.equal(tied["embed"], whole), "equal tied tensors of two stages")
    if own is not None and "head" in own:
        own["head"][3, 1] += 1
    refused(refit.run, RunError, "nothing was moved: head of the source differs from embed")
    refused(refit.verify, RunError, "head of the source differs from embed")
    if own is not None and "head" in own:
        own["head"][3, 1] -= 1
    refit.run()
    expect(torch.equal(tied["embed"], whole), "after they were made equal again")


def tied_over_shardings(planning: Any) -> None:
    """An embedding over rows, and a head over columns, of the same ranks."""
    rank, ranks, whole = dist.get_rank(), dist.get_world_size(), torch.arange(40.0).reshape(10, 4)
    mesh = reshard.DeviceMesh.of(tp=ranks)
    rows, columns = (reshard.spec(mesh, text).layout((10, 4)) for text in ("tp, -", "-, tp"))
    source: dict[str, Any] = {}
    for name, layout in (("embed", rows), ("head", columns)):
        # Over more ranks than columns, the last ones have empty shards of the head.
        source[name] = part(whole, layout, rank), layout
    tied = {"embed": torch.zeros(10, 4)}
    refit = Refit.prepare(source, tied, ties={"head": "embed"}, planning=planning)
    refit.run()
    refit.verify()
    expect(torch.equal(tied["embed"], whole), "equal tied tensors of two shardings")
    if rank == 1:
        source["head"][0][7, 0] += 1
    refused(refit.run, RunError, "nothing was moved: head of the source differs from embed")
    refused(refit.verify, RunError, "head of the source differs from embed")
    other = {
        **source,
        "head": (torch.zeros(10, 4).bfloat16(), reshard.Layout.whole((10, 4), range(ranks), ranks)),
    }
    unlike = Refit.prepare(other, tied, ties={"head": "embed"}, planning=planning)
    refused(unlike.run, RunError, "differs from embed (bfloat16 and float32)")
    expect(torch.equal(tied["embed"], whole), "written where tied tensors differ")
    # Terms of a sum are not compared, which the first rank says.
    terms = reshard.spec(mesh, "-, - | sum(tp)").layout((10, 4))
    partial = {**source, "head": (whole / ranks, terms)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Refit.prepare(partial, tied, ties={"head": "embed"}, planning=planning).run()
    expect(
        [str(one.message)[:35] for one in said if "not compared" in str(one.message)]
        == ["head of the source was not compared"] * (rank == 0),
        f"{said}",
    )


def tensors_without_storage_are_refused() -> None:
    """Views of storages that were freed, and copies that FSDP gathered."""
    for freed, other in (("source", "target"), ("target", "source")):
        values = {name: torch.ones(6, 4) for name in ("source", "target")}
        views = {name: {"w": value[2:]} for name, value in values.items()}
        values[freed].untyped_storage().resize_(0)
        refused(partial(Refit.prepare, **views), ShardError, "w: its storage was freed")
        expect(bool((values[other] == 1).all()), f"{other} was written")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = fully_shard(torch.nn.Linear(4, 6, bias=False), mesh=mesh)
    source = {"weight": torch.ones(6, 4)}
    module.unshard()
    gathered = dict(module.named_parameters())
    told = "weight of the target: a copy that FSDP gathered"
    refused(partial(Refit.prepare, source, gathered), ShardError, told)
    module.reshard()
    refused(partial(Refit.prepare, source, gathered), ShardError, "weight: its storage was freed")
    refused(partial(Refit.prepare, gathered, source), ShardError, "weight: its storage was freed")
    Refit.prepare(source, dict(module.named_parameters())).run()
    expect(bool((module.weight.full_tensor() == 1).all()), "its shards")
    freed, spec = torch.ones(4), reshard.spec(reshard.DeviceMesh.of(x=dist.get_world_size()), "-")
    freed.untyped_storage().resize_(0)
    refused(
        partial(redistribute, freed, spec, source=spec, shape=(4,)), RunError, "storage was freed"
    )


def autograd_detects_values_that_a_run_overwrote() -> None:
    """Autograd refuses values of a target that a run has overwritten since they were saved."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # Long rows are copied by NumPy, and not by torch, which would count the write itself.
    shape = (8 * dist.get_world_size(), 1024)
    source = {"weight": distribute_tensor(torch.ones(shape), mesh, [Shard(0)])}
    for placement in (Shard(0), Shard(1), Replicate()):
        weight = torch.nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [placement]))
        refit = Refit.prepare(source, {"weight": weight})
        local = weight.to_local()
        inputs = torch.ones_like(local, requires_grad=True)
        total = (inputs * local).sum()
        refit.run()
        refused(total.backward, RuntimeError, "")
        expect(inputs.grad is None, f"a gradient of overwritten values, with {placement}")


CASES = [
    groups_of_any_ranks_find_the_maxima,
    tensors_whose_memory_changed_are_refused_on_all_ranks,
    replaced_parameters_are_refused_on_all_ranks,
    names_that_are_not_texts_are_refused_on_all_ranks,
    tensors_that_differ_in_one_property_are_described_separately,
    a_changed_source_is_listed_again_for_another_target,
    tied_tensors_are_compared_in_each_run,
    tensors_without_storage_are_refused,
    autograd_detects_values_that_a_run_overwrote,
]


if __name__ == "__main__":
    run_cases(CASES)
