"""One rank of a job of four or eight: modules with Megatron's attributes, differently parallel.

What a rank has of either model is computed from its number by NumPy (`test_megatron_models`), and
the refit sees only modules.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import reshard
from conformance.test_megatron_models import Model
from refit_models import expect, expect_same, laid_out, module_of
from reshard.errors import ShardError
from reshard.notation.megatron_names import MegatronNames
from reshard.notation.megatron_ranks import MegatronRanks
from reshard.torch import MegatronModel, Refit, refit

MODELS = {
    "tp4": Model(tp=4, pp=1, dp=1, ep=1, etp=1, vpp=1, offset=0),
    "tp2 dp2": Model(tp=2, pp=1, dp=2, ep=2, etp=2, vpp=1, offset=0),
    "dp4 ep4": Model(tp=1, pp=1, dp=4, ep=4, etp=1, vpp=1, offset=0),
    "tp2 pp2": Model(tp=2, pp=2, dp=1, ep=1, etp=2, vpp=1, offset=0),
    "tp1 pp2 vpp2 ep2": Model(tp=1, pp=2, dp=2, ep=2, etp=1, vpp=2, offset=0),
    "two ranks behind": Model(tp=2, pp=1, dp=1, ep=2, etp=1, vpp=1, offset=2),
    "two ranks": Model(tp=1, pp=2, dp=1, ep=1, etp=1, vpp=1, offset=0),
}


def chunks_of(model: Model, rank: int, is_empty: bool) -> list[torch.nn.Module] | None:
    """A rank's model chunks, with their values or empty; None where it has no part."""
    if not model.offset <= rank < model.offset + model.world:
        return None
    chunks: list[list[Any]] = [[] for _ in range(model.vpp)]
    for chunk, name, array, says in model.entries(rank):
        value = torch.from_numpy(array.copy()).to(torch.float32)
        chunks[chunk].append((name, torch.zeros_like(value) if is_empty else value, says))
    return [module_of(parameters) for parameters in chunks]


def between_all_pairs() -> None:
    """Each two of seven, in one direction, planned in either way."""
    every = list(MODELS.items())
    # Any two numbers below 7 differ by exactly one of 1, 2 and 4.
    pairs = [(every[i], every[(i + step) % 7]) for i in range(7) for step in (1, 2, 4)]
    for number, ((before, source), (after, target)) in enumerate(pairs):
        planning = "centralized" if number % 2 else "local"
        refitted(source, target, f"{before} to {after}", planning=planning)


# The pairs of sizes (tp, pp, ep) that Megatron's own tests have.
SIZES = [
    ((2, 1, 1), (1, 1, 1)),
    ((2, 1, 1), (4, 1, 1)),
    ((1, 2, 1), (2, 4, 1)),
    ((2, 1, 1), (1, 2, 1)),
    ((1, 1, 2), (1, 1, 4)),
    ((1, 1, 2), (1, 2, 2)),
    ((4, 1, 1), (1, 1, 4)),
    ((2, 1, 2), (4, 1, 1)),
]


def between_megatrons_own_pairs() -> None:
    """On the first ranks, and on ranks behind the source's; in the smallest job that has them."""
    for sizes in SIZES:
        source, target = (
            Model(tp=tp, pp=pp, dp=ep, ep=ep, etp=tp, vpp=1, offset=0) for tp, pp, ep in sizes
        )
        ranks = dist.get_world_size()
        smallest = 0 if ranks == 4 else 4
        if smallest < max(source.world, target.world) <= ranks:
            refitted(source, target, f"{sizes}")
        if smallest < source.world + target.world <= ranks:
            refitted(source, replace(target, offset=source.world), f"{sizes}, apart")


def refitted(source: Model, target: Model, what: str, **options: Any) -> None:
    """Refit this rank's chunks, and compare them with those that it should have."""
    rank = dist.get_rank()
    given = chunks_of(source, rank, is_empty=False)
    found = chunks_of(target, rank, is_empty=True)
    done = refit(
        None if given is None else MegatronModel(given, source.names),
        None if found is None else MegatronModel(found, target.names),
        **options,
    )
    expected = chunks_of(target, rank, is_empty=False)
    for one, other in zip(found or [], expected or [], strict=True):
        expect_same(one.state_dict(), other.state_dict(), what)
    expect(done.is_usable, "not usable")


def with_offsets() -> None:
    """Both sides number their ranks from 0."""
    rank = dist.get_rank()
    source = Model(tp=2, pp=1, dp=1, ep=2, etp=1, vpp=1, offset=0)
    target = Model(tp=1, pp=2, dp=1, ep=1, etp=1, vpp=1, offset=0)
    given = chunks_of(source, rank, is_empty=False)
    found = chunks_of(target, rank - 2, is_empty=True)
    refit(
        None if given is None else MegatronModel(given, source.names),
        None if found is None else MegatronModel(found, target.names),
        target_offset=2,
    )
    expected = chunks_of(target, rank - 2, is_empty=False)
    for one, other in zip(found or [], expected or [], strict=True):
        expect_same(one.state_dict(), other.state_dict(), "with offsets")


def with_what_attributes_leave_out() -> None:
    """A vocabulary without its padding, shared heads, to plain layouts; a cast; a wrong shape."""
    rank = dist.get_rank()
    vocabulary, heads = torch.arange(26.0).reshape(13, 2), torch.arange(8.0).reshape(4, 2)
    padded = torch.zeros(16, 2)
    padded[:13] = vocabulary
    says = {"tensor_model_parallel": True}
    module = module_of(
        [
            ("embedding", padded.chunk(4)[rank].clone(), says),
            ("kv", heads[2 * (rank // 2) :][:2].clone(), says),
        ]
    )
    model = MegatronModel(
        module,
        MegatronNames(MegatronRanks(tp=4)),
        {"embedding": {"true_length": 13}, "kv": {"heads": 2}},
    )
    mesh = reshard.DeviceMesh.of(tp=4)
    layouts = {
        "embedding": reshard.spec(mesh, "-, -").layout((13, 2)),
        "kv": reshard.spec(mesh, "tp, -").layout((4, 2)),
    }
    whole = {"embedding": vocabulary.bfloat16(), "kv": heads.bfloat16()}
    target = laid_out({n: torch.zeros_like(v) for n, v in whole.items()}, layouts)
    refit(model, target, cast=True)
    expect_same(target, laid_out(whole, layouts), "left out by attributes")
    wrong = MegatronModel(module_of([("w", torch.zeros(3 + rank % 2, 2), {})]), model.names)
    try:
        Refit.prepare(wrong, None, strict=False)
    except ShardError as error:
        expect("disagree" in str(error) or "local" in str(error), str(error))
        return
    raise SystemExit("ranks of different shapes were accepted")


def main() -> None:
    dist.init_process_group("gloo")
    between_megatrons_own_pairs()
    if dist.get_world_size() == 4:
        between_all_pairs()
        with_offsets()
        with_what_attributes_leave_out()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
