"""Other forms of parameters that forwards compute with: forgotten by a run, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.nn.utils import parametrizations, parametrize

from reshard.errors import RunError
from reshard.torch import Refit, redistribute
from reshard.torch.forward_copies import find_copies

X = torch.ones(2, 4)


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    """A job of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def linear(seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(4, 4)


def test_casts_of_autocast_are_made_anew() -> None:
    source, target = linear(1), linear(2)
    refit = Refit.prepare(source, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = target(X)
        refit.run()
        assert torch.equal(target(X), source(X))
        assert not torch.equal(before, target(X))


def test_casts_of_autocast_are_made_anew_after_a_redistribution() -> None:
    target, layout = linear(2), whole((4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        target(X)
        redistribute(torch.zeros(4, 4), layout, source=layout, out=target.weight.detach())
        assert torch.equal(target(X)[0], target.bias.bfloat16())


def whole(shape: tuple[int, ...]) -> object:
    from reshard.layout import Layout

    return Layout.replicated(shape)


def test_values_of_parametrizations_are_computed_again() -> None:
    source, target = (parametrizations.weight_norm(linear(seed)) for seed in (1, 2))
    refit = Refit.prepare(source, target)
    with parametrize.cached():
        target(X)
        refit.run()
        assert torch.equal(target(X), source(X))


class ParametrizedLstm(torch.nn.LSTM):
    """One whose weights are parametrized: PyTorch computes with those that were there before."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(4, 4)
        parametrize.register_parametrization(self, "weight_hh_l0", torch.nn.Tanh())


def test_weights_of_an_rnn_that_are_not_its_parameters() -> None:
    source, target = ParametrizedLstm(1), ParametrizedLstm(2)
    with pytest.raises(RunError, match="computes with weights that are not its parameters"):
        Refit.prepare(source, target)
    Refit.prepare(torch.nn.LSTM(4, 4), torch.nn.LSTM(4, 4)).run()


@pytest.mark.parametrize("freezes", [True, False])
def test_compiled_with_constants(freezes: bool) -> None:
    target = linear(2)
    compiled = SimpleNamespace(get_compiler_config=lambda: {"freezing": freezes})
    # As Module.compile does.
    target._compiled_call_impl = compiled  # type: ignore[assignment]
    assert bool(find_copies(target)) is freezes
    # A source is read where its parameters are.
    Refit.prepare(target, linear(1)).run()


class Adapted(torch.nn.Module):
    """A layer with an adapter that can be merged, as PEFT's."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.base_layer = linear(seed)
        self.lora = torch.nn.Linear(4, 4, bias=False)
        self.merged_adapters: list[str] = []

    @property
    def merged(self) -> bool:
        return bool(self.merged_adapters)


def test_merged_adapters_are_refused_where_they_would_count_twice() -> None:
    source, target = Adapted(1), Adapted(2)
    refit = Refit.prepare(source, target)
    refit.run()
    for side, name in ((source, "source"), (target, "target")):
        side.merged_adapters = ["default"]
        with pytest.raises(RunError, match=f"of the {name} has its adapters merged"):
            refit.run()
        side.merged_adapters = []
        refit.run()


def test_merged_weights_go_to_a_model_without_adapters() -> None:
    source, target = Adapted(1), linear(2)
    source.merged_adapters = ["default"]
    names = {"base_layer.weight": "weight", "base_layer.bias": "bias"}
    Refit.prepare(source, target, source_names=names, strict=False).run()
    assert torch.equal(source.base_layer.weight, target.weight)


class QuantizeMethodBase:
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing."""


class UnquantizedLinearMethod(QuantizeMethodBase):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs weights for some processors."""


class Fp8LinearMethod(QuantizeMethodBase):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.t())


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        (QuantizeMethodBase, ""),
        (UnquantizedLinearMethod, ""),
        (Fp8LinearMethod, "Fp8LinearMethod of Linear processes weights"),
    ],
)
def test_weights_that_an_engine_has_processed(method: type, problem: str) -> None:
    layer = linear(1)
    layer.quant_method = method()
    found = find_copies(torch.nn.Sequential(layer))
    assert found.startswith(f"0: {problem}") if problem else not found


def test_weights_that_an_engine_has_computed_of_others() -> None:
    layer = linear(1)
    layer.W_UK_T = layer.weight.detach().t().clone()
    assert "computes with W_UK_T" in find_copies(layer)
