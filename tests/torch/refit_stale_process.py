"""One rank of a job: what is kept between runs must not outlive what it was made of."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rank_cases import run_cases
from refit_models import expect, refused
from reshard.errors import RunError
from reshard.torch import Refit
from reshard.torch.exchange.groups import rank_group


def make_numbers(seed: str) -> list[int]:
    chance = random.Random(seed)
    return [chance.randint(-(1 << 63), (1 << 63) - 1) for _ in range(5)]


def maxima() -> None:
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
            found = among.find_maxima(every[rank])
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


CHANGES: list[Callable[[Any], None]] = [lie_elsewhere, be_another_type, be_longer, be_empty]


def moved_tensors() -> None:
    """Whatever a tensor is, and whatever is done to it, on one rank alone, all ranks are told."""
    last = dist.get_world_size() - 1
    for change in CHANGES:
        for name in models()[0]:
            for side in range(2):
                both = models()
                done = Refit.prepare(*both)
                done.run()
                done.run()
                # What others lie in must not be taken for what this one lay in.
                if dist.get_rank() == last:
                    change(both[side][name])
                refused(done.run, RunError, f"rank {last}: {name} is at another address")
                expect(done.is_usable, f"{change.__name__} of {name}: nothing was written")
                lie_elsewhere(both[side][name])
                anew = Refit.prepare(*both, cast=True) if change is lie_elsewhere else None
                if anew is not None:
                    anew.run()
                    expect(bool((local_of(both[1][name]) == 1).all()), f"{name} prepared anew")


def alike_but_for_one_thing() -> None:
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


CASES = [maxima, moved_tensors, alike_but_for_one_thing]


if __name__ == "__main__":
    run_cases(CASES)
