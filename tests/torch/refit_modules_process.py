"""One rank of a job of two, whose models are modules that compute with more than their tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate

import reshard.torch
from rank_cases import run_cases
from refit_models import expect, refused
from reshard.errors import RunError, ShardError
from reshard.torch import Refit, redistribute

TOKENS = torch.arange(7)
WRAPPER = "_fsdp_wrapped_module."


class Net(torch.nn.Module):
    """An embedding, two layers and a head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(7, 4)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.head = torch.nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layers(self.embed(tokens))))


def sharded(seed: int, **options: Any) -> Any:
    """The model by FSDP2, each layer a unit of its own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Net(seed)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def expect_output(model: Any, whole: Net, what: str) -> None:
    """The module computes what one of the same weights does; FSDP2's root stays unsharded."""
    with torch.no_grad():
        expect(torch.equal(model(TOKENS), whole(TOKENS)), f"{what}: not the new weights")


def fill(source: Net, value: float) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(source.parameters()):
            parameter.copy_(torch.full_like(parameter, value + number / 8))


def copies_of_unsharded_targets_are_freed() -> None:
    """A forward without gradients leaves a copy, which a run must not leave to the next one."""
    source = Net(1)
    for what, options in (("root", {}), ("all", {"reshard_after_forward": False})):
        target = sharded(2, **options)
        given: dict[str, Any] = {"module": target, "state dict": target.state_dict()}
        for kind, model in given.items():
            expect_output(target, Net(2), "before")
            refit = Refit.prepare(source, model)
            for step in range(2):
                fill(source, step)
                refit.run()
                expect_output(target, source, f"{what}, {kind}")
                refit.verify()
                expect_output(target, source, f"{what}, {kind}, verified")
            fill(target.reshard() or source, 9)
            torch.manual_seed(2)
            reshard.torch.refit(Net(2), target)


def all_gathers_begun_before_a_run_are_repeated() -> None:
    """An all-gather that was begun before a run has the old weights."""
    source, target = Net(1), sharded(2)
    refit = Refit.prepare(source, target)
    target.unshard(async_op=True)
    refit.run()
    expect_output(target, source, "unshard(async_op=True)")


def unsharded_sources_compute_with_the_weights_they_sent() -> None:
    """A source computes with the weights that it sent, whoever wrote into which copy."""
    source, target = sharded(1), Net(2)
    refit = Refit.prepare(source, target)
    with torch.no_grad():
        source(TOKENS)
        source.head.weight.add_(1)
    refit.run()
    expect_output(source, target, "a source's copy")


def targets_are_refused_during_their_forward() -> None:
    """Within a forward of a target its copies cannot be freed: nothing is written."""
    source, target = Net(1), sharded(2)
    refit = Refit.prepare(source, target)
    found: list[str] = []
    hook = target.layers[0].register_forward_hook(
        lambda *_: found.append(refused(refit.run, RunError, "the target's parameters are in use"))
    )
    expect_output(target, Net(2), "a run within a forward")
    hook.remove()
    expect("FSDP computes with" in found[0], found[0])
    refit.run()
    expect_output(target, source, "a run after a forward")


def shards_replaced_after_a_forward_are_refused() -> None:
    """A module that got other DTensors computes with the shards that FSDP2 knows."""
    source, target = Net(1), sharded(2)
    refit = Refit.prepare(source, target)
    refit.run()
    expect_output(target, source, "before")
    target.reshard()
    old = target.head.weight
    target.head.weight = torch.nn.Parameter(torch.zeros_like(old))
    refused(refit.run, RunError, "the module has another tensor as head.weight")
    refused(lambda: Refit.prepare(source, target), ShardError, "head.weight: replaced after FSDP2")


def redistributions_and_loads_free_gathered_copies_too() -> None:
    """Parameters of a module, filled by a redistribution and from a file."""
    source, target = Net(1), sharded(2)
    expect_output(target, Net(2), "before")
    for name, parameter in target.state_dict(keep_vars=True).items():
        target(TOKENS)
        out, mesh = parameter.detach(), parameter.device_mesh
        whole = DTensor.from_local(source.state_dict()[name], mesh, [Replicate()])
        redistribute(whole, (mesh, parameter.placements), out=out)
        with torch.no_grad():
            target(TOKENS)
    expect_output(target, source, "redistribute")
    fill(source, 3)
    with TemporaryDirectory() as folder:
        save_file(source.state_dict(), str(Path(folder) / "model.safetensors"))
        reshard.torch.load(folder, target)
    expect_output(target, source, "load")


def flat_parameters_of_fsdp1_are_refitted() -> None:
    """FSDP1: ranks have ranges of flat parameters, some of them none of a parameter."""
    lower = MixedPrecision(param_dtype=torch.bfloat16)
    for options in (
        {"use_orig_params": True},
        {"use_orig_params": False, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD},
        {"use_orig_params": True, "mixed_precision": lower},
    ):

        def flat(model: Net, options: Any = options) -> Any:
            layers, cpu = ModuleWrapPolicy({torch.nn.Sequential}), torch.device("cpu")
            return FullyShardedDataParallel(
                model, auto_wrap_policy=layers, device_id=cpu, **options
            )

        source, engine, target = flat(Net(1)), Net(2), flat(Net(3))
        there, back = Refit.prepare(source, engine), Refit.prepare(engine, target)
        optimizer = torch.optim.SGD(source.parameters(), 0.5)
        for _ in range(2):
            source(TOKENS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for refit in (there, back):
                refit.run()
                refit.verify()
            with torch.no_grad():
                expect(torch.equal(source(TOKENS), target(TOKENS)), f"{options}: not the new")
        with FullyShardedDataParallel.summon_full_params(source):
            whole = dict(engine.named_parameters())
            for name, parameter in source.named_parameters():
                expect(torch.equal(parameter, whole[name.replace(WRAPPER, "")]), name)
        fill(engine, 4)
        with TemporaryDirectory() as folder:
            save_file(engine.state_dict(), str(Path(folder) / "model.safetensors"))
            reshard.torch.load(folder, target)
        reshard.torch.refit(engine, source)
        with torch.no_grad():
            expect(torch.equal(source(TOKENS), target(TOKENS)), f"{options}: not what was loaded")


def moved_flat_parameters_of_fsdp1_are_refused() -> None:
    """A parameter that was given other memory is what FSDP1 computes with; a moved shard is not."""
    source = FullyShardedDataParallel(Net(1), device_id=torch.device("cpu"), use_orig_params=True)
    target = Net(2)
    refit = Refit.prepare(source, target)
    for parameter in source.parameters():
        parameter.data = torch.ones_like(parameter)
    refit.run()
    expect(all(bool((one == 1).all()) for one in target.parameters()), "other memory")
    flat = source._handle.flat_param
    flat.data = flat.data.clone()
    refused(refit.run, RunError, "another tensor as the flat parameter of Net")


def state_dict_hooks_that_copy_are_refused() -> None:
    """Tensors that a state dict hook makes are refused, and views of parameters are not."""

    def hook(change: Callable[[torch.Tensor], torch.Tensor]) -> Net:
        model = Net(2)

        def put(_module: object, state: dict[str, torch.Tensor], *_: object) -> None:
            state.update({name: change(tensor) for name, tensor in state.items()})

        model.register_state_dict_post_hook(put)
        return model

    for pair in ((Net(1), hook(torch.clone)), (hook(torch.clone), Net(1))):
        told = refused(lambda pair=pair: Refit.prepare(*pair), ShardError, "state dict of Net")
        expect("embed.weight, layers.0.weight" in told, told)
    viewed = hook(torch.Tensor.detach)
    reshard.torch.refit(Net(1), viewed)
    expect_output(viewed, Net(1), "a hook that detaches")


if __name__ == "__main__":
    run_cases(
        (
            copies_of_unsharded_targets_are_freed,
            all_gathers_begun_before_a_run_are_repeated,
            unsharded_sources_compute_with_the_weights_they_sent,
            targets_are_refused_during_their_forward,
            shards_replaced_after_a_forward_are_refused,
            flat_parameters_of_fsdp1_are_refitted,
            moved_flat_parameters_of_fsdp1_are_refused,
            redistributions_and_loads_free_gathered_copies_too,
            state_dict_hooks_that_copy_are_refused,
        )
    )
