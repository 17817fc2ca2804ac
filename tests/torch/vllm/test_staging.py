"""Staged sources: each parameter is what the traced loader makes of whole tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from reshard.dtypes import dtype
from reshard.errors import ShardError
from reshard.recipes.engine_layouts import SourceTensor
from reshard.torch.loaders.tracing import trace_loading
from reshard.torch.vllm.staging import StagedSources

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
def test_parameters_are_what_the_loader_makes(case: str) -> None:
    load, filled = CASES[case]
    staged, _, right = stage(load)
    assert set(staged.parameters) == filled and not staged.by_loader
    for name in filled:
        assert torch.equal(staged.fill(name), right[name]), name


def test_only_what_is_taken_is_staged() -> None:
    staged, *_ = stage(fused)
    # Rows 0 to 5 of x for both parameters, which have different types; of y the rows of one.
    assert [list(staged.tensors[name][0].shape) for name in "xy"] == [[5, 4], [3, 4]]
    assert staged.size_bytes == (5 + 3) * 4 * 4


def test_what_shares_a_source_with_what_is_computed_is_the_loaders() -> None:
    def load(given: dict[str, torch.Tensor], to: dict[str, torch.Tensor]) -> None:
        to["a"].copy_(torch.exp(given["x"]))
        to["b"].copy_(given["x"][0])

    staged, *_ = stage(load)
    assert staged.by_loader == {"x"} and not staged.parameters
    assert [(name, list(one.shape)) for name, one in staged.list_whole()] == [("x", [6, 4])]


def test_a_loader_that_takes_nothing() -> None:
    with pytest.raises(ShardError, match=r"takes nothing of the 2 tensors .*first: 'x'"):
        stage(lambda given, to: None)
