"""One rank of a job of two, whose target is compiled or captured before it gets its values.

A consumer keeps the memory of its parameters, or what it has read of them. It must see new values,
in the same places, without being compiled again.

Arguments: backends of torch.compile; without, one that needs no compiler of C++.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import reshard
from rank_cases import run_cases
from refit_models import expect, expect_same, laid_out, whole
from reshard.torch import Refit

ROWS, COLUMNS, INNER = 6, 8, 12


class Net(torch.nn.Module):
    """Two products and a buffer."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.up = torch.nn.Linear(COLUMNS, INNER)
        self.down = torch.nn.Linear(INNER, COLUMNS)
        self.register_buffer("scale", torch.zeros(COLUMNS))
        for number, value in enumerate([*self.parameters(), *self.buffers()]):
            given = torch.zeros(1) if seed is None else whole(seed + number, *value.shape)
            value.data = given.expand(value.shape).clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * self.scale + x


def cut(model: torch.nn.Module) -> dict[str, Any]:
    """The model in rows over both ranks."""
    mesh = reshard.DeviceMesh.of(tp=2)
    state = model.state_dict()
    layouts = {
        name: reshard.spec(mesh, "tp, ...", ndim=value.ndim).layout(tuple(value.shape))
        for name, value in state.items()
    }
    return dict(laid_out(state, layouts))


def addresses(model: torch.nn.Module) -> dict[str, int]:
    return {name: value.data_ptr() for name, value in model.state_dict().items()}


def seen_by(consumer: Callable[[torch.Tensor], torch.Tensor], model: Net, what: str) -> None:
    """Refit twice what a consumer has run with already, and look what it gives."""
    x = whole(99, ROWS, COLUMNS)
    with torch.no_grad():
        first = consumer(x)
        expect(torch.equal(first, model(x)), f"{what}: not the model's output")
        where = addresses(model)
        given = cut(Net(3))
        refit = Refit.prepare(given, model)
        for seed in (3, 33):
            for name, (local, _) in cut(Net(seed)).items():
                given[name][0].copy_(local)
            refit.run()
            expect(torch.equal(consumer(x), Net(seed)(x)), f"{what}: not the new values")
            expect(not torch.equal(consumer(x), first), f"{what}: nothing has changed")
            expect(addresses(model) == where, f"{what}: the tensors have moved")


def a_compiled_module_sees_new_weights() -> None:
    """By torch.compile: one compilation, before the first refit."""
    for backend in sys.argv[1:] or ["aot_eager"]:
        torch._dynamo.reset()
        model, counter = Net(None), CompileCounterWithBackend(backend)
        seen_by(torch.compile(model, backend=counter), model, backend)
        expect(counter.frame_count == 1, f"{backend}: compiled {counter.frame_count} times")


def a_captured_graph_sees_new_weights() -> None:
    """A graph of the operators, that has the tensors themselves as constants."""
    model = Net(None)
    graph = make_fx(model)(torch.zeros(ROWS, COLUMNS))
    seen_by(graph, model, "a captured graph")
    exported = torch.export.export(Net(None), (torch.zeros(ROWS, COLUMNS),))
    kept = exported.module()
    Refit.prepare(cut(Net(7)), kept).run()
    x = whole(98, ROWS, COLUMNS)
    expect(torch.equal(kept(x), Net(7)(x)), "an exported program")


def a_compiled_module_is_refitted_as_the_module_inside() -> None:
    """What torch.compile gives is taken for the module, also where parts are compiled."""
    model = Net(None)
    Refit.prepare(cut(Net(5)), torch.compile(model, backend="eager")).run()
    expect_same(model.state_dict(), Net(5).state_dict(), "a compiled module")
    model.up = torch.compile(model.up, backend="eager")
    Refit.prepare(cut(Net(6)), model).run()
    inner = {n.replace("_orig_mod.", ""): v for n, v in model.state_dict().items()}
    expect_same(inner, Net(6).state_dict(), "a module of compiled parts")


if __name__ == "__main__":
    run_cases(
        (
            a_compiled_module_sees_new_weights,
            a_captured_graph_sees_new_weights,
            a_compiled_module_is_refitted_as_the_module_inside,
        )
    )
