"""Models filled again, over stand-ins of vLLM's reloading, which does it in place.

With vLLM itself: `tests/engines/vllm/test_reloading.py`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch

from reshard.dtypes import dtype
from reshard.errors import RunError, ShardError
from reshard.recipes.engine_layouts import SourceTensor
from reshard.torch.loaders.tracing import trace_loading
from reshard.torch.vllm.reloading import ReloadedModel, StagedSources

pytestmark = pytest.mark.usefixtures("factory")

SHAPES = {"embed.weight": (6, 4), "router.weight": (2, 4), "experts.w": (2, 4, 4), "norm.b": (4,)}


class ServedModel(torch.nn.Module):
    """A router that is a part of its experts too, and a head that is the embedding's tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(4, 2, bias=False)
        self.experts = torch.nn.Module()
        self.experts.gate = self.router
        self.experts.w = torch.nn.Parameter(torch.zeros(2, 4, 4))
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.Module()
        self.norm.b = torch.nn.Parameter(torch.zeros(4))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        # The first name of each, as vLLM knows them.
        parameters = dict(self.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, weight in weights:
                parameters[name].copy_(weight)


def kinds(names: Iterable[str] = SHAPES) -> dict[str, SourceTensor]:
    return {name: SourceTensor(dtype("float32"), SHAPES[name]) for name in names}


def fill(reloaded: ReloadedModel, seed: int = 0) -> dict[str, torch.Tensor]:
    """Whole tensors, which are staged."""
    generator = torch.Generator().manual_seed(seed)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for name, (staged, _) in reloaded.staged.tensors.items():
        staged.copy_(whole[name])
    return whole


def test_tensors_of_several_names_are_filled_once() -> None:
    model = ServedModel()
    reloaded = ReloadedModel(model, None, kinds())
    whole = fill(reloaded)
    reloaded.apply()
    for name, tensor in whole.items():
        assert torch.equal(model.get_parameter(name), tensor)
    assert torch.equal(model.head.weight, whole["embed.weight"])
    assert torch.equal(model.experts.gate.weight, whole["router.weight"])


def test_unfilled_parameters_are_named() -> None:
    some = kinds(["embed.weight", "experts.w"])
    with pytest.raises(ShardError, match=r"fills router.weight, norm.b of vLLM's .*strict"):
        ReloadedModel(ServedModel(), None, some)
    model = ServedModel()
    reloaded = ReloadedModel(model, None, some, strict=False)
    kept, whole = model.router.weight.clone(), fill(reloaded)
    reloaded.apply()
    assert torch.equal(model.router.weight, kept)
    assert torch.equal(model.experts.w, whole["experts.w"])


def test_unknown_names_are_converted_for_the_loader() -> None:
    def convert(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.removeprefix("model."): one.T for name, one in tensors.items()}

    found = {f"model.{name}": one for name, one in kinds().items() if len(one.shape) == 2}
    sources = {name: SourceTensor(one.dtype, one.shape[::-1]) for name, one in found.items()}
    model = ServedModel()
    with pytest.raises(RunError, match="load_weights, run without values, raised KeyError"):
        ReloadedModel(model, None, sources, strict=False)
    reloaded = ReloadedModel(model, None, sources, convert=convert, strict=False)
    for staged, _ in reloaded.staged.tensors.values():
        staged.copy_(torch.arange(staged.numel()).view(staged.shape))
    reloaded.apply()
    assert torch.equal(model.embed.weight, torch.arange(24.0).view(4, 6).T)


class Kernel:
    """What packs the weights of experts, and counts how often."""

    def __init__(self) -> None:
        self.asked = 0

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.asked += 1


class Method:
    """Asks its kernel when the kernel is made, or always."""

    def __init__(self, asks: bool) -> None:
        self.asks = asks
        self.moe_kernel = types.SimpleNamespace(fused_experts=Kernel())

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if self.asks:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)


@pytest.mark.parametrize("asks", [False, True])
def test_experts_are_processed_once_however_vllm_does(
    asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.model_executor.model_loader.reload as reload

    model = ServedModel()
    method: Any = Method(asks)
    model.experts.quant_method = method

    def finalize(served: torch.nn.Module, _: Any) -> None:
        method.process_weights_after_loading(served.experts)

    monkeypatch.setattr(reload, "finalize_layerwise_reload", finalize)
    reloaded = ReloadedModel(model, None, kinds())
    for runs in (1, 2):
        fill(reloaded)
        reloaded.apply()
        assert method.moe_kernel.fused_experts.asked == runs
    # Nothing is left of it.
    assert "process_weights_after_loading" not in vars(method)
    assert "process_weights_after_loading" not in vars(method.moe_kernel.fused_experts)


def test_models_that_vllm_cannot_reload_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.model_executor.model_loader.reload as reload

    def finalize(*_: Any) -> Iterator[None]:
        raise RuntimeError("other sizes")

    monkeypatch.setattr(reload, "finalize_layerwise_reload", finalize)
    reloaded = ReloadedModel(ServedModel(), None, kinds())
    with pytest.raises(RunError, match="cannot reload its model: RuntimeError: other sizes"):
        reloaded.apply()


Loader = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]


def fused(given: dict[str, torch.Tensor], to: dict[str, torch.Tensor]) -> None:
    to["a"][:3].copy_(given["x"][2:5])
    to["a"][3:].copy_(given["y"][2:5])
    to["b"].copy_(given["x"][0])


def interleaved(given: dict[str, torch.Tensor], to: dict[str, torch.Tensor]) -> None:
    to["a"][:3].copy_(given["x"][1::2])
    to["a"][3:].copy_(given["y"][::2])


def transposed(given: dict[str, torch.Tensor], to: dict[str, torch.Tensor]) -> None:
    to["a"][:4].copy_(given["x"].t()[:, :4])


def padded(given: dict[str, torch.Tensor], to: dict[str, torch.Tensor]) -> None:
    to["a"][:2].copy_(given["x"][4:])
    to["a"][2:].fill_(0.5)


CASES: dict[str, tuple[Loader, set[str]]] = {
    "fused": (fused, {"a", "b"}),
    "interleaved": (interleaved, {"a"}),
    "transposed": (transposed, {"a"}),
    "padded": (padded, {"a"}),
}


def stage(load: Loader) -> tuple[StagedSources, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What is staged of two sources, filled from them; the sources, and what the loader makes."""
    given = {name: torch.randn(6, 4) for name in ("x", "y")}
    sources = {name: SourceTensor(dtype("float32"), (6, 4)) for name in given}
    targets = {"a": torch.zeros(6, 4), "b": torch.zeros(4, dtype=torch.bfloat16)}
    traced = trace_loading(
        lambda weights: load(weights, targets), sources, targets, form="dict", values=False
    )
    staged = StagedSources(traced, sources, 1)
    for name, (tensor, layout) in staged.tensors.items():
        (box,) = layout.boxes(1)
        region = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        tensor.copy_(given[name][region])
    load(given, targets)
    return staged, given, targets


@pytest.mark.parametrize("case", CASES)
def test_staged_parameters_equal_those_of_the_loader(case: str) -> None:
    load, filled = CASES[case]
    staged, _, right = stage(load)
    assert set(staged.parameters) == filled and not staged.by_loader
    for name in filled:
        assert torch.equal(staged.fill(name), right[name]), name


def test_only_boxes_that_a_rank_takes_are_staged() -> None:
    staged, *_ = stage(fused)
    # Rows 0 to 5 of x for both parameters, which have different types; of y the rows of one.
    assert [list(staged.tensors[name][0].shape) for name in "xy"] == [[5, 4], [3, 4]]
    assert staged.size_bytes == (5 + 3) * 4 * 4


def test_parameters_that_share_a_source_with_computed_parameters_are_loaded_whole() -> None:
    def load(given: dict[str, torch.Tensor], to: dict[str, torch.Tensor]) -> None:
        to["a"].copy_(torch.exp(given["x"]))
        to["b"].copy_(given["x"][0])

    staged, *_ = stage(load)
    assert staged.by_loader == {"x"} and not staged.parameters
    assert [(name, list(one.shape)) for name, one in staged.list_whole()] == [("x", [6, 4])]


def test_a_loader_that_reads_no_source_is_refused() -> None:
    with pytest.raises(ShardError, match=r"takes nothing of the 2 tensors .*first: 'x'"):
        stage(lambda given, to: None)
