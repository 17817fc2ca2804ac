"""One rank of a job of four or eight: modules with Megatron's attributes, differently parallel.

What a rank has of either model is computed from its number by NumPy (`test_megatron_models`), and
the refit sees only modules.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import reshard
from conformance.test_megatron_models import Model
from rank_cases import report_each
from refit_models import expect, expect_same, laid_out, module_of
from reshard.errors import ReshardError, ShardError
from reshard.megatron.names import MegatronNames
from reshard.megatron.ranks import MegatronRanks
from reshard.torch import (
    MegatronModel,
    Refit,
    build_centralized_reshard_plan,
    build_local_reshard_plan,
    execute_reshard_plan,
    refit,
)
from selection import choose

MODELS = {
    "tp4": Model(tp=4, pp=1, dp=1, ep=1, etp=1, vpp=1, offset=0),
    "tp2 dp2": Model(tp=2, pp=1, dp=2, ep=2, etp=2, vpp=1, offset=0),
    "dp4 ep4": Model(tp=1, pp=1, dp=4, ep=4, etp=1, vpp=1, offset=0),
    "tp2 pp2": Model(tp=2, pp=2, dp=1, ep=1, etp=2, vpp=1, offset=0),
    "tp1 pp2 vpp2 ep2": Model(tp=1, pp=2, dp=2, ep=2, etp=1, vpp=2, offset=0),
    "two ranks behind": Model(tp=2, pp=1, dp=1, ep=2, etp=1, vpp=1, offset=2),
    "two ranks": Model(tp=1, pp=2, dp=1, ep=1, etp=1, vpp=1, offset=0),
}


def list_chunks(model: Model, rank: int, is_empty: bool) -> list[torch.nn.Module] | None:
    """A rank's model chunks, with their values or empty; None where it has no part."""
    if not model.offset <= rank < model.offset + model.world:
        return None
    chunks: list[list[Any]] = [[] for _ in range(model.vpp)]
    for chunk, name, array, of in model.entries(rank):
        # Megatron marks experts only where ranks share them.
        says = {name: said for name, said in of.items() if name != "is_expert" or model.ep > 1}
        value = torch.from_numpy(array.copy()).to(torch.float32)
        chunks[chunk].append((name, torch.zeros_like(value) if is_empty else value, says))
    return [module_of(parameters) for parameters in chunks]


def process_groups(model: Model) -> dict[str, dist.ProcessGroup]:
    """The groups of this rank that Megatron would have made; every rank takes part."""
    ranks, found = model.names.ranks, {}
    assert isinstance(ranks, MegatronRanks)
    called = {"etp": "expt_tp", "edp": "expt_dp"}
    for axis in ("tp", "cp", "pp", "dp", "ep", "etp", "edp"):
        for members in ranks.groups(axis):
            made = dist.new_group(list(members))
            if dist.get_rank() in members:
                found[called.get(axis, axis)] = made
    return found


def of_groups(
    model: Model, groups: dict[str, dist.ProcessGroup], is_empty: bool, kind: int
) -> MegatronModel | None:
    """A rank's model, which says where it is by its process groups only, in one of three ways."""
    chunks = list_chunks(model, dist.get_rank(), is_empty)
    if chunks is None:
        return None
    if kind == 0:
        return MegatronModel(chunks, groups=groups)
    if kind == 1:
        # Copies are known without groups of their own.
        least = {axis: one for axis, one in groups.items() if "d" not in axis}
        return MegatronModel(chunks, groups=SimpleNamespace(**least))
    chunks[0].pg_collection = SimpleNamespace(**groups)  # type: ignore[assignment]
    return MegatronModel(chunks)


def process_groups_describe_ranks_stages_layers_and_experts() -> None:
    """Ranks, stages, layers and experts are found from process groups alone."""
    models = MODELS | {"tp2 etp1": Model(tp=2, pp=1, dp=2, ep=1, etp=1, vpp=1, offset=0)}
    names = list(models)
    pairs = [
        (names[i], names[(i + step) % len(names)])
        for i in range(0, len(names), choose(4, 1))
        for step in choose((3,), (1, 3))
    ]
    groups = {name: process_groups(models[name]) for pair in pairs for name in pair}
    for number, (before, after) in enumerate(pairs):
        source, target, ours, theirs = models[before], models[after], groups[before], groups[after]
        found = of_groups(target, theirs, True, number % 3)
        given = of_groups(source, ours, False, (number + 1) % 3)
        if number % 4 == 0 and given is not None:
            # Sizes on one side; they are what num_experts completes.
            given = MegatronModel(given.chunks, replace(source.names, num_experts=None))
        refit(given, found, num_experts=4)
        expected = list_chunks(target, dist.get_rank(), is_empty=False)
        for one, other in zip(found.chunks if found else [], expected or [], strict=True):
            expect_same(one.state_dict(), other.state_dict(), f"by groups, {before} to {after}")


def invalid_groups_of_one_rank_are_refused_on_all() -> None:
    """What one rank says wrong, all raise."""
    rank, model = dist.get_rank(), MODELS["tp2 pp2"]
    groups, chunks = process_groups(model), list_chunks(model, rank, is_empty=False)
    alone = [dist.new_group([one]) for one in range(4)][rank]
    right = MegatronModel(chunks, groups=groups)
    for wrong, told in (
        (MegatronModel(chunks), "rank 2: a MegatronModel without names, process groups"),
        (MegatronModel(chunks, groups={"tpp": 3}), "rank 2: groups ['tpp']; they are along tp"),
        (MegatronModel(chunks, groups={"tp": 3}), "rank 2: the group along tp is 3"),
        (MegatronModel(chunks, groups={}), "rank 2: groups={} has none along"),
        (MegatronModel(chunks, groups=groups | {"tp": alone}), "the group [2, 3] along tp, but ra"),
        (MegatronModel(None, groups=groups), "rank 2: a MegatronModel of None; give a module"),
        (MegatronModel([], groups=groups), "rank 2 0 of"),
        (MegatronModel(chunks, groups=groups, stack="layers"), "of 'layers'"),
        (None, "in its group along pp, which has no part of the model"),
        (MegatronModel(chunks[0].decoder.layers, groups=groups), "one has [0] layers"),
        (
            MegatronModel(module_of([("decoder.layers.5.w", torch.ones(1), {})]), groups=groups),
            "chunk 0 has the layers 5 of 'decoder.layers'",
        ),
        (
            MegatronModel(chunks, model.names, groups=groups),
            "a MegatronModel with names and groups",
        ),
    ):
        refused(wrong if rank == 2 else right, told, num_experts=4)
    refused(
        right,
        "num_experts=None explains",
        source=of_groups(MODELS["dp4 ep4"], process_groups(MODELS["dp4 ep4"]), False, 0),
    )
    refused(right, "num_experts=0", num_experts=0)
    refused(right, "num_experts=True", num_experts=True if rank == 1 else 4)
    refused(MegatronModel(chunks, "names"), "names='names'; give MegatronNames", num_experts=4)
    said = {"*.norm.wieght": {"heads": 2}, "embedding.weight": {"heads": 24}}
    told = "*.norm.wieght: no rank of the target has such a parameter"
    refused(MegatronModel(chunks, model.names, said), told)
    refused(MegatronModel(chunks, model.names, [3]), "parameters=[3] of a MegatronModel")
    named = MegatronModel(chunks, model.names)
    refused(named, "num_experts=8, but the model's names are of 4", num_experts=8)
    refused(None, "no rank has a MegatronModel", source=None, num_experts=8)


def refused(target: Any, told: str, source: Any = None, **options: Any) -> None:
    try:
        Refit.prepare(source, target, **options)
    except ReshardError as error:
        expect(told in str(error), f"{told!r} is not in {error}")
        return
    raise SystemExit(f"nothing was raised where {told!r} was expected")


def models_move_between_any_two_of_seven_parallelisms() -> None:
    """Each two of seven, in one direction, planned in either way."""
    every = list(MODELS.items())
    # Any two numbers below 7 differ by exactly one of 1, 2 and 4.
    steps = choose((2,), (1, 2, 4))
    # By default each is in one pair, or two.
    numbers = choose(range(0, 7, 2), range(7))
    pairs = [(every[i], every[(i + step) % 7]) for i in numbers for step in steps]
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


def models_move_between_the_parallelisms_of_megatrons_tests() -> None:
    """On the first ranks, and on ranks behind the source's; in the smallest job that has them."""
    for sizes in choose(SIZES[::2], SIZES):
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
    given = list_chunks(source, rank, is_empty=False)
    found = list_chunks(target, rank, is_empty=True)
    done = refit(
        None if given is None else MegatronModel(given, source.names),
        None if found is None else MegatronModel(found, target.names),
        **options,
    )
    expected = list_chunks(target, rank, is_empty=False)
    for one, other in zip(found or [], expected or [], strict=True):
        expect_same(one.state_dict(), other.state_dict(), what)
    expect(done.is_usable, "not usable")


def both_sides_number_their_ranks_from_0() -> None:
    """Both sides number their ranks from 0."""
    rank = dist.get_rank()
    source = Model(tp=2, pp=1, dp=1, ep=2, etp=1, vpp=1, offset=0)
    target = Model(tp=1, pp=2, dp=1, ep=1, etp=1, vpp=1, offset=0)
    given = list_chunks(source, rank, is_empty=False)
    found = list_chunks(target, rank - 2, is_empty=True)
    refit(
        None if given is None else MegatronModel(given, source.names),
        None if found is None else MegatronModel(found, target.names),
        target_offset=2,
    )
    expected = list_chunks(target, rank - 2, is_empty=False)
    for one, other in zip(found or [], expected or [], strict=True):
        expect_same(one.state_dict(), other.state_dict(), "with offsets")


def plans_move_the_slices_that_megatron_lists() -> None:
    """The lists of slices, executed here by hand, and by the plan itself."""
    rank = dist.get_rank()
    names = [*MODELS]
    pairs = [*zip(names, [*names[1:], names[0]], strict=True)]
    # Both ways to plan are among every third.
    for number, (before, after) in [*enumerate(pairs)][:: choose(3, 1)]:
        source, target = MODELS[before], MODELS[after]
        given = list_chunks(source, rank, is_empty=False)
        found = list_chunks(target, rank, is_empty=True)
        build = (build_local_reshard_plan, build_centralized_reshard_plan)[number % 2]
        plan = build(
            None if given is None else MegatronModel(given, source.names),
            None if found is None else MegatronModel(found, target.names),
        )
        sent: list[Any] = [None] * dist.get_world_size()
        own = [
            (op.peer_rank, op.my_slice, op.peer_slice, tensors(given)[op.param_name][op.my_slice])
            for op in plan.send_ops
        ]
        dist.all_gather_object(sent, own)
        # The k-th receive from a rank belongs to its k-th send to this one, as with isend, irecv.
        arriving = [iter([op for op in one if op[0] == rank]) for one in sent]
        by_hand = {name: torch.full_like(tensor, -1) for name, tensor in tensors(found).items()}
        for op in plan.recv_ops:
            _, theirs, mine, value = next(arriving[op.peer_rank])
            expect((theirs, mine) == (op.peer_slice, op.my_slice), f"{op} gets {theirs} to {mine}")
            by_hand[op.param_name][op.my_slice] = value
        expect(not any([*one] for one in arriving), "sends without a receive")
        expected = tensors(list_chunks(target, rank, is_empty=False))
        expect_same(by_hand, expected, f"by hand, {before} to {after}")
        execute_reshard_plan(plan, given, found, group=None)
        expect_same(tensors(found), expected, f"by the plan, {before} to {after}")


def tensors(chunks: list[torch.nn.Module] | None) -> dict[str, torch.Tensor]:
    """The tensors of a rank's chunks, by the names that plans have for them."""
    several = chunks is not None and len(chunks) > 1
    return {
        f"{number}.{name}" if several else name: tensor
        for number, chunk in enumerate(chunks or [])
        for name, tensor in chunk.state_dict().items()
    }


def given_parameters_complete_the_attributes() -> None:
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
        {"embedding": {"true_length": 13}, "k*": {"heads": 2}},
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


def gates_are_found_by_the_config_alone() -> None:
    """Gate and up of modules whose config alone says so, over other ranks: what each computes."""
    rank = dist.get_rank()
    marks: dict[str, Any] = {"tensor_model_parallel": True}
    gate, up = torch.arange(24.0).reshape(8, 3), -torch.arange(24.0).reshape(8, 3)

    def model_of(tp: int, is_empty: bool) -> MegatronModel | None:
        if rank >= tp:
            return None
        both = torch.cat([one.chunk(tp)[rank] for one in (gate, up)])
        # Two experts, one behind the other: [hidden, experts x 2 ffn].
        grouped = torch.cat([both.T, both.T + 100], 1)
        chunk = module_of(
            [
                ("layer.mlp.linear_fc1.weight", both, marks),
                ("layer.mlp.linear_fc1.bias", both[:, 0].clone(), marks),
                ("layer.mlp.linear_fc1.layer_norm_weight", torch.arange(16.0), {}),
                ("layer.other.linear_fc1.weight", gate.chunk(tp)[rank].clone(), marks),
                ("layer.mlp.experts.weight1", grouped, {"is_expert": True}),
            ]
        )
        gated = SimpleNamespace(gated_linear_unit=True)
        for module in (chunk.layer.mlp, chunk.layer.mlp.experts):  # type: ignore[union-attr]
            module.config = gated  # type: ignore[union-attr,assignment]
        if is_empty:
            for parameter in chunk.parameters():
                parameter.data.zero_()
        names = MegatronNames(MegatronRanks(tp=tp, etp=tp), num_experts=2)
        return MegatronModel(chunk, names)

    for before, after in ((1, 2), (2, 1), (4, 2), (1, 4)):
        found, right = model_of(after, True), model_of(after, False)
        refit(model_of(before, False), found)
        if found is not None and right is not None:
            expect_same(found.chunks.state_dict(), right.chunks.state_dict(), f"{before}, {after}")


def tied_models_move_to_one_stage_and_back() -> None:
    """A tied model whose last stage has an output layer of its own, to one stage and back."""
    rank, both = dist.get_rank(), torch.arange(12.0).reshape(6, 2)

    def model_of(
        pp: int, is_empty: bool, is_tied: bool = True, **says: Any
    ) -> MegatronModel | None:
        if rank >= pp:
            return None
        value = torch.zeros_like(both) if is_empty else both.clone()
        name = "embedding.word_embeddings.weight" if not rank else "output_layer.weight"
        parameters: list[tuple[str, torch.Tensor, dict[str, Any]]] = [(name, value, {})]
        if not is_tied:
            parameters.append(("output_layer.weight", value + 1, {}))
        chunk = module_of(parameters)
        chunk.share_embeddings_and_output_weights = is_tied  # type: ignore[assignment]
        config = SimpleNamespace(num_attention_heads=2, gated_linear_unit=False, **says)
        chunk.config = config  # type: ignore[assignment]
        return MegatronModel(chunk, MegatronNames(MegatronRanks(pp=pp)))

    for before, after in ((2, 1), (1, 2), (2, 2)):
        found, right = model_of(after, True), model_of(after, False)
        refit(model_of(before, False), found)
        if found is not None and right is not None:
            expect_same(found.chunks.state_dict(), right.chunks.state_dict(), f"{before}, {after}")
    # An output layer of its own is no embedding, and other norms are no norms of this model.
    shifted = {"layernorm_zero_centered_gamma": True}
    refit(model_of(1, False, **shifted), model_of(1, True, **shifted))
    for source, told in (
        (model_of(1, False, is_tied=False), "output_layer.weight: in the source only"),
        (
            model_of(1, False, **shifted),
            "the source's weights mean something else",
        ),
    ):
        refused(model_of(1, True), told, source)


def main() -> None:
    dist.init_process_group("gloo")
    report_each([models_move_between_the_parallelisms_of_megatrons_tests])
    if dist.get_world_size() == 4:
        report_each(
            [
                models_move_between_any_two_of_seven_parallelisms,
                plans_move_the_slices_that_megatron_lists,
                process_groups_describe_ranks_stages_layers_and_experts,
                invalid_groups_of_one_rank_are_refused_on_all,
                both_sides_number_their_ranks_from_0,
                given_parameters_complete_the_attributes,
                gates_are_found_by_the_config_alone,
                tied_models_move_to_one_stage_and_back,
            ]
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
