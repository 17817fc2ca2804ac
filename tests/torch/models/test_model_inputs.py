"""Tensors of modules: their names, and whether they are the modules' memory."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from reshard.errors import RunError, ShardError
from reshard.torch import Refit
from reshard.torch.models.model_inputs import ModuleSlots, tensors_of


@pytest.fixture
def job() -> Iterator[None]:
    """A job of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("job")
def test_modules_around_a_module_do_not_rename_it() -> None:
    own = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    names = [name for name, _ in tensors_of(own)]
    assert names[:2] == ["0.weight", "0.bias"]
    parallel = DistributedDataParallel(own)
    compiled = torch.compile(parallel, backend="eager")
    inside = DistributedDataParallel(torch.compile(own, backend="eager"))
    for one in (parallel, compiled, inside):
        found = dict(tensors_of(one))
        assert list(found) == names
        assert found["0.weight"] is own[0].weight


def test_tensors_of_a_scripted_module() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(torch.nn.Linear(2, 2))
    assert [name for name, _ in tensors_of(scripted)] == ["weight", "bias"]
    assert ModuleSlots.of(scripted, scripted.parameters()).find_change(is_target=True) == ""


def test_views_in_a_state_dict_are_the_parameters() -> None:
    module = torch.nn.Linear(2, 2)
    module.register_state_dict_post_hook(
        lambda _module, state, *_: state.update(renamed=state.pop("weight").detach())
    )
    found = dict(tensors_of(module))
    assert found["renamed"] is module.weight


def test_copies_in_a_state_dict_are_refused() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    module.register_state_dict_post_hook(
        lambda _module, state, *_: state.update({"0.bias": state["0.bias"].clone()})
    )
    with pytest.raises(ShardError, match=r"^0\.bias: in the state dict of Sequential, but not"):
        tensors_of(module)


@pytest.mark.usefixtures("job")
def test_parameters_that_deepspeed_has_partitioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    source, target = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    weight, part = source.weight, torch.arange(4.0)
    weight.data, weight.ds_shape = torch.empty(0), torch.Size([2, 2])
    part.ds_numel, weight.ds_process_group, weight.ds_tensor = 4, dist.group.WORLD, part
    refit = Refit.prepare(source, target)
    refit.run()
    assert target.weight.flatten().tolist() == [0, 1, 2, 3]
    with pytest.raises(RunError, match="weight is partitioned by DeepSpeed's ZeRO-3, which"):
        Refit.prepare(target, source)
    weight.ds_tensor.data = part.clone()
    with pytest.raises(RunError, match="the module has another tensor as weight"):
        refit.run()
    part.ds_numel = 8
    with pytest.raises(ShardError, match="quantised or swapped to a disk"):
        tensors_of(source)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("weight", "problem"),
    [
        (torch.empty(2, 2, device="meta"), "hooks that offload parameters"),
        (TwoTensor(torch.ones(2, 2), torch.ones(2, 2)), "TwoTensor has no memory of its own"),
    ],
)
@pytest.mark.parametrize("is_target", [True, False])
def test_parameters_without_memory_of_their_own(
    weight: torch.Tensor, problem: str, is_target: bool
) -> None:
    odd, plain = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    odd.weight = torch.nn.Parameter(weight)
    with pytest.raises(ShardError, match=problem):
        Refit.prepare(*((plain, odd) if is_target else (odd, plain)))
