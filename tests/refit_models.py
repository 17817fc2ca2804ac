"""Models of small whole numbers, cut for the ranks of a job, and compared with what is expected."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import reshard
from reshard.layout import Layout
from reshard.plans.job import Job
from reshard.plans.plan import Plan

Values = dict[str, torch.Tensor]


def whole(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that float8 can say, so that no cast loses any."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


SHAPES = {"embed.weight": (31, 8), "up.weight": (12, 8), "down.weight": (8, 12), "norm": (8,)}
CUTS = {"embed.weight": "tp, -", "up.weight": "tp, -", "down.weight": "-, tp", "norm": "-"}


def values(seed: int = 0, dtype: torch.dtype = torch.float32) -> Values:
    """The tensors of a small model."""
    return {
        name: whole(seed + i, *shape, dtype=dtype) for i, (name, shape) in enumerate(SHAPES.items())
    }


def zeros(of: Mapping[str, torch.Tensor]) -> Values:
    """Nothing of the same shapes."""
    return {name: torch.zeros_like(value) for name, value in of.items()}


def distributed(
    given: Mapping[str, torch.Tensor], mesh: Any, places: Mapping[str, Sequence[Any]]
) -> dict[str, DTensor]:
    """As DTensors."""
    return {
        name: distribute_tensor(value, mesh, places[name], src_data_rank=None)
        for name, value in given.items()
    }


def layouts_of(ranks: int, cuts: Mapping[str, str] = CUTS) -> dict[str, Layout]:
    """The small model's layouts over ranks that count from 0."""
    mesh = reshard.DeviceMesh.of(tp=ranks)
    return {name: reshard.spec(mesh, cuts[name]).layout(SHAPES[name]) for name in SHAPES}


def laid_out(
    given: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout], first_rank: int = 0
) -> dict[str, tuple[torch.Tensor | None, Layout]]:
    """This rank's tensors with their layouts; None where it has nothing."""
    own = dist.get_rank() - first_rank
    return {name: (part(given[name], layout, own), layout) for name, layout in layouts.items()}


def part(value: torch.Tensor, layout: Layout, slot: int) -> torch.Tensor | None:
    """What a slot of one cell holds of a whole tensor."""
    if not 0 <= slot < layout.slots or layout.local_shape(slot) is None:
        return None
    local = torch.zeros(layout.local_shape(slot), dtype=value.dtype)
    (cell,) = layout.cells_of(slot)
    index = torch.meshgrid(
        *(
            torch.cat([torch.arange(a, b) for a, b, _, _ in ((0, 0, 0, 0), *table.runs_of(int(p)))])
            for table, p in zip(layout.tables, layout.cell_part[cell], strict=True)
        ),
        indexing="ij",
    )
    local[...] = value[index] if index else value
    return local


def module_of(parameters: Iterable[tuple[str, torch.Tensor, dict[str, Any]]]) -> torch.nn.Module:
    """Nested modules, so that parameters have the names that are given."""
    root = torch.nn.Module()
    for name, value, says in parameters:
        at = root
        *path, last = name.split(".")
        for part in path:
            if part not in dict(at.named_children()):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        parameter = torch.nn.Parameter(value, requires_grad=value.is_floating_point())
        for attribute, said in says.items():
            # Megatron marks experts by their gradients.
            at_all = ("allreduce", not said) if attribute == "is_expert" else (attribute, said)
            setattr(parameter, *at_all)
        at.register_parameter(last, parameter)
    return root


def expect_same(found: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    """End the process where two models differ."""
    rank = os.environ["RANK"]
    if found.keys() != expected.keys():
        raise SystemExit(f"{what}: {sorted(found)}, expected {sorted(expected)} on rank {rank}")
    for name, value in expected.items():
        a, b = local_of(found[name]), local_of(value)
        if (a is None) != (b is None):
            raise SystemExit(f"{what}: {name} is {a}, expected {b} on rank {rank}")
        if a is None:
            continue
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.float(), b.float()):
            raise SystemExit(f"{what}: {name} differs on rank {rank}\n{a}\n{b}")


def expect(truth: bool, what: str) -> None:
    """End the process where something is not true."""
    if not truth:
        raise SystemExit(f"{what}, on rank {os.environ['RANK']}")


def local_of(value: Any) -> torch.Tensor | None:
    """A DTensor's, a pair's or a tensor's own part."""
    if isinstance(value, tuple):
        value = value[0]
    return value.to_local() if isinstance(value, DTensor) else value


def refused(call: Any, kind: type[Exception], text: str) -> str:
    """What a call raises; ends the process where that is another error, or none."""
    try:
        call()
    except kind as error:
        expect(text in str(error), f"{text!r} is not in {error}")
        return str(error)
    raise SystemExit(f"nothing was raised where {text!r} was expected")


class Allocations(TorchDispatchMode):
    """What is allocated and planned meanwhile, but for the few numbers ranks agree with."""

    def __enter__(self) -> Any:
        self.large: list[str] = []
        self.planned: list[str] = []
        self._made = {kind: kind.__init__ for kind in (Plan, Job)}
        for kind, made in self._made.items():

            def counted(one: Any, *args: Any, made: Any = made, **named: Any) -> None:
                self.planned.append(type(one).__name__)
                made(one, *args, **named)

            kind.__init__ = counted
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for kind, made in self._made.items():
            kind.__init__ = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if (
            isinstance(found, torch.Tensor)
            and found.untyped_storage().data_ptr() not in given
            and found.numel() > 16
        ):
            self.large.append(f"{func} {tuple(found.shape)}")
        return found
