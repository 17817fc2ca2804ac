"""One rank of a job of four: models refitted in every way, each compared with whole values.

A case that fails ends the process with what differs.
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import reshard
from rank_cases import run_cases
from refit_models import (
    CUTS,
    Allocations,
    Values,
    distributed,
    expect,
    expect_same,
    laid_out,
    layouts_of,
    refused,
    values,
    whole,
    zeros,
)
from reshard.errors import RunError, ShardError, UsageError
from reshard.plans.plan import Plan
from reshard.recipes.library import load_recipe
from reshard.torch import BlockQuantized, Cast, Refit, by_recipe, refit
from reshard.torch.exchange.agreement import gather, gather_all, scatter
from selection import choose

TP = {name: [Shard("tp" not in CUTS[name].split(",")[0])] for name in CUTS}
TP["norm"] = [Replicate()]
DP_TP = {name: [Replicate(), *places] for name, places in TP.items()}


def equal_values_are_sent_once() -> None:
    """Equal values travel once."""
    rank = dist.get_rank()
    even, odd = b"even" * 10, b"odd"
    own = even if rank % 2 == 0 else odd
    expected = {r: even if r % 2 == 0 else odd for r in range(4)}
    (found,), received_bytes = gather_all([own], None)
    expect(found == expected, f"gathered {found}")
    # Ranks 0 and 1 are the first with theirs.
    first = {0: len(odd), 1: len(even)}
    expect(received_bytes == first.get(rank, len(even + odd)), "received")
    (found,), received_bytes = gather_all([own], None, to_first=True)
    expect(received_bytes == (len(odd) if rank == 0 else 0), "received by the first")
    expect(rank != 0 or found == expected, f"gathered {found}")
    found = gather(b"" if rank else b"x", None)
    expect(found == {0: b"x", 1: b"", 2: b"", 3: b""}, f"gathered {found}")
    part, moved_bytes = scatter(iter("abcd") if rank == 0 else None, None)
    expect(part == "abcd"[rank], f"got {part}")
    expect(moved_bytes == len(pickle.dumps("a")) * (3 if rank == 0 else 1), "scattered")


def a_second_run_allocates_nothing() -> None:
    """Tensor parallel over 4 to over 2, twice in a row, without an allocation in the second."""
    mesh4 = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    mesh22 = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    source = distributed(values(), mesh4, TP)
    target = distributed(zeros(values()), mesh22, DP_TP)
    addresses = {name: value.to_local().data_ptr() for name, value in target.items()}
    done = refit(source, target)
    expect_same(target, distributed(values(), mesh22, DP_TP), "collocated")
    after = distributed(values(7), mesh4, TP)
    for name, value in source.items():
        value.to_local().copy_(after[name].to_local())
    with Allocations() as seen:
        done.run()
    expect(not seen.large, f"the second run allocates {seen.large}")
    expect(not seen.planned, f"the second run plans {seen.planned}")
    expect_same(target, distributed(values(7), mesh22, DP_TP), "the second run")
    now = {name: value.to_local().data_ptr() for name, value in target.items()}
    expect(addresses == now, "the target has moved")
    expect(done.extra_bytes <= 64 << 20, "too much memory")
    bound = torch.tensor([done.received_bytes, done.sent_bytes])
    dist.all_reduce(bound)
    least = 4 * sum(
        Plan(*(reshard.torch.layout_of(side[name]) for side in (source, target))).moved_elements
        for name in source
    )
    expect(bound.tolist() == [least, least], f"{bound.tolist()} bytes moved, {least} are needed")


def sides_on_different_ranks_number_their_own() -> None:
    """Two trainers to two others, each side numbering its ranks from 0."""
    is_trainer = dist.get_rank() < 2
    parts = []
    for planning in ("local", "centralized"):
        source = laid_out(values(), layouts_of(2)) if is_trainer else None
        cuts = {name: "-, tp" if cut == "tp, -" else cut for name, cut in CUTS.items()}
        target = None if is_trainer else laid_out(zeros(values()), layouts_of(2, cuts), 2)
        done = Refit.prepare(source, target, target_offset=2, planning=planning)
        for _ in range(2):
            done.run()
            if target is not None:
                expect_same(target, laid_out(values(), layouts_of(2, cuts), 2), "disjoint")
        expect(done.report.planning == planning, "another planning")
        expect(done.report.planned_ranks == _planned_ranks(planning), "other parts")
        expect((done.report.scattered_bytes > 0) == (planning == "centralized"), "scattered")
        items = done.part_items
        parts.append([(one.match, one.change, str(one.transfers), one.batch) for one in items])
    expect(parts[0] == parts[1] != [], "both ways to plan find different parts")


def a_second_engine_of_the_same_kind_reuses_the_plan() -> None:
    """A second engine of the same kind is not planned again; another kind, or option, is."""
    source = laid_out(values(), layouts_of(4))
    cuts = {name: "-, tp" if cut == "tp, -" else cut for name, cut in CUTS.items()}
    kinds = [CUTS, CUTS, cuts, CUTS]
    targets = [laid_out(zeros(values()), layouts_of(4, of)) for of in kinds]
    refits = [Refit.prepare(source, target) for target in targets[:3]]
    refits.append(Refit.prepare(source, targets[3], strict=False))
    plans = [one._whole for one in refits]
    expect(plans[0] is plans[1] is not None, "planned again")
    planned = [one.report.planned_ranks for one in refits]
    expect(planned == [1, 0, 1, 1], f"planned {planned}")
    expect(len({id(plan) for plan in plans}) == 3, "another kind has the same plan")
    for of, target, one in zip(kinds, targets, refits, strict=True):
        one.run()
        expect_same(target, laid_out(values(), layouts_of(4, of)), "planned before")
    # What both of a kind send is packed in one place: they run in any order.
    for of, target, one in reversed(list(zip(kinds, targets, refits, strict=True))):
        for local, _ in target.values():
            if local is not None:
                local.zero_()
        one.run()
        expect_same(target, laid_out(values(), layouts_of(4, of)), "planned before, again")


def _planned_ranks(planning: str) -> int:
    if planning == "local":
        return 1
    return 4 if dist.get_rank() == 0 else 0


def overlapping_ranks_are_refitted() -> None:
    """From ranks 0 and 1 to ranks 1 and 2; rank 3 has nothing."""
    rank = dist.get_rank()
    source = laid_out(values(), layouts_of(2)) if rank < 2 else None
    target = laid_out(zeros(values()), layouts_of(2), 1) if rank in (1, 2) else {}
    done = refit(source, target, target_offset=1, extra_bytes=256)
    if target:
        expect_same(target, laid_out(values(), layouts_of(2), 1), "overlapping")
    expect(done.extra_bytes <= 256, "too much memory")
    expect(rank != 3 or (done.tensors, done.received_bytes) == (0, 0), "rank 3 has a part")


def a_group_of_some_ranks_is_refitted() -> None:
    """Three of four ranks, in a group of their own."""
    group = dist.new_group([1, 2, 3])
    rank = dist.get_rank()
    if rank == 0:
        try:
            refit(None, None, group=group)
        except reshard.errors.UsageError:
            return
        raise SystemExit("rank 0 is not in the group")
    for planning in ("local", "centralized"):
        source = laid_out(values(), layouts_of(2), 1) if rank < 3 else None
        target = laid_out(zeros(values()), layouts_of(1), 3) if rank == 3 else None
        refit(source, target, source_offset=1, target_offset=3, group=group, planning=planning)
        if target is not None:
            expect_same(target, laid_out(values(), layouts_of(1), 3), "in a group")


def elements_are_sent_in_the_narrower_type() -> None:
    """Elements travel as the narrower of both types."""
    sent = {}
    for before, after in (
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float32, torch.float8_e4m3fn),
        (torch.int32, torch.float32),
    ):
        source = laid_out(values(dtype=before), layouts_of(4))
        target = laid_out(zeros(values(dtype=after)), layouts_of(2))
        done = refit(source, target, cast=before != after, extra_bytes=512)
        expect_same(target, laid_out(values(dtype=after), layouts_of(2)), f"{before} to {after}")
        total = torch.tensor(done.sent_bytes)
        dist.all_reduce(total)
        sent[before, after] = int(total)
    f32, bf16 = torch.float32, torch.bfloat16
    expect(sent[f32, bf16] == sent[bf16, f32] == sent[f32, f32] // 2, f"{sent} bytes")
    expect(sent[f32, torch.float8_e4m3fn] == sent[f32, f32] // 4, f"{sent} bytes")
    wide = {n: v * 300 for n, v in values(dtype=torch.int32).items()}
    target = laid_out(zeros(values(dtype=torch.int8)), layouts_of(2))
    refit(laid_out(wide, layouts_of(4)), target, cast=True)
    wrapped = {n: v.to(torch.int8) for n, v in wide.items()}
    expect_same(target, laid_out(wrapped, layouts_of(2)), "wrapped whole numbers")
    some = {name: name != "norm" for name in values()}
    source = laid_out(values(), layouts_of(4))
    target = laid_out(
        {n: v.to(bf16) if some[n] else v for n, v in zeros(values()).items()}, layouts_of(2)
    )
    refit(source, target, cast={n: "bfloat16" for n, is_cast in some.items() if is_cast})
    expect_same(
        target,
        laid_out({n: v.to(bf16) if some[n] else v for n, v in values().items()}, layouts_of(2)),
        "cast by name",
    )


class Net(torch.nn.Module):
    """A module with a buffer that is kept, one that is not, and tied weights."""

    def __init__(self, seed: int, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.full((3,), float(seed)), persistent=False)
        with torch.no_grad():
            for number, value in enumerate(self.state_dict().values()):
                value.copy_(whole(seed + number, *value.shape))


def plain_modules_buffers_and_ties_are_refitted() -> None:
    """A plain module on rank 1 to plain ones on all; buffers, and ties."""
    rank = dist.get_rank()
    source, target = Net(1), Net(20)
    ties, both = {"head.weight": "embed.weight"}, ("head.weight", "embed.weight")
    version = target.embed.weight._version
    done = refit(source if rank == 1 else None, target, ties=ties)
    expect_same(target.state_dict(), source.state_dict(), "modules")
    expect(float(target.scratch[0]) == 20, "a buffer that is not kept was written")
    expect(target.embed.weight._version > version, "autograd does not see the write")
    # The tied weight is filled once.
    size = sum(v.nbytes for n, v in source.state_dict().items() if n not in ties)
    expect(done.received_bytes == (rank != 1) * size, f"{done.received_bytes} bytes, not {size}")
    untied = Net(20, is_tied=False)
    given = {n: v for n, v in source.state_dict().items() if n != "head.weight"}
    refit(given if rank == 1 else None, untied, ties=ties)
    expect_same(untied.state_dict(), source.state_dict(), "a target that is not tied")
    # One that has the tied weight once takes it by either name; the other one is not left over.
    for name in ("embed.weight", "head.weight"):
        once = {n: v for n, v in Net(20).state_dict().items() if n == name or n not in both}
        refit(source if rank == 1 else None, once)
        expect_same(once, {n: source.state_dict()[n] for n in once}, f"a target with {name} alone")
    with torch.no_grad():
        source.norm.bias.data = torch.ones(4)
    refused(done.run, RunError, "rank 1: norm.bias is at another address")
    expect(done.is_usable, "nothing was written, but the target is not usable")


def fsdp2_becomes_tensor_parallelism() -> None:
    """From FSDP2 over all ranks to tensor parallel DTensors."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    given = {name: value.detach().clone() for name, value in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    places = {name: [Replicate(), Shard(0)] for name in given}
    target = distributed(zeros(given), mesh, places)
    refit(model, target)
    expect_same(target, distributed(given, mesh, places), "FSDP2")


def verify_finds_a_single_different_element() -> None:
    """Both ends are compared, whatever lies between them; one element that differs is told."""
    mesh4 = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    mesh22 = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    narrow, wide = torch.bfloat16, torch.float64
    for types in ((torch.float32, torch.float32), (torch.float32, narrow), (narrow, wide)):
        source = distributed(values(1, types[0]), mesh4, TP)
        target = distributed(zeros(values(1, types[1])), mesh22, DP_TP)
        done = Refit.prepare(source, target, cast=True)
        refused(done.verify, RunError, "not the source's: ")
        done.run()
        found = done.verify()
        size = sum(value.to_local().numel() for value in target.values())
        least = min(one.itemsize for one in types)
        expect(found.compared_bytes >= size * least, f"{found} of {size} elements")
        expect(not found.left_out, f"{found.left_out}")
        if dist.get_rank() == 2:
            target["up.weight"].to_local()[-1, -1] += 8
        told = refused(done.verify, RunError, "rank 2: not the source's: up.weight (")
        expect("down.weight" not in told, told)
        done.run()
        done.verify()
    target = distributed({"w": torch.zeros(8, 6)}, mesh4, {"w": [Replicate()]})
    pending = {"w": DTensor.from_local(torch.ones(8, 6), mesh4, [Partial()])}
    done = refit(pending, target)
    expect(done.verify().left_out == ("w",), "a sum is not compared")


def partial_sums_are_combined() -> None:
    """A sum that is not done yet arrives added up."""
    mesh = init_device_mesh("cpu", (4,))
    given = whole(3, 8, 6)
    source = DTensor.from_local(given * dist.get_rank(), mesh, [Partial()], run_check=False)
    target = distributed({"g": torch.zeros(8, 6)}, mesh, {"g": [Shard(1)]})
    refit({"g": source}, target)
    expect_same(target, distributed({"g": 6 * given}, mesh, {"g": [Shard(1)]}), "partial")
    # To a sum: one rank has the values, the others what adds nothing.
    back = {"g": DTensor.from_local(torch.full((8, 6), 9.0), mesh, [Partial()], run_check=False)}
    refit(target, back)
    total = back["g"].to_local().clone()
    dist.all_reduce(total)
    expect_same({"g": total}, {"g": 6 * given}, "to a sum")


def stages_that_count_from_0_become_a_whole_model() -> None:
    """Two pipeline stages that count from 0, to one model of other names."""
    rank = dist.get_rank()
    stage, layers = rank // 2, {f"layers.{i}.up": whole(i, 4, 6) for i in range(4)}
    mesh = reshard.DeviceMesh.of(pp=2, tp=2)
    source = {}
    for number in range(2):
        layout = reshard.spec(mesh, f"tp, - | only(pp={stage})").layout((4, 6))
        value = layers[f"layers.{2 * stage + number}.up"]
        source |= laid_out({f"layers.{number}.up": value}, {f"layers.{number}.up": layout})

    def of_all(name: str) -> str:
        head, number, tail = name.split(".")
        return f"{head}.{int(number) + 2 * stage}.{tail}"

    whole_mesh = reshard.DeviceMesh.of(tp=4)
    layouts = {
        f"model.layers.{i}.up_proj": reshard.spec(whole_mesh, "-, tp").layout((4, 6))
        for i in range(4)
    }
    expected = {f"model.{name}_proj": value for name, value in layers.items()}
    target = laid_out(zeros(expected), layouts)
    table = {"model.layers.*_proj": "layers.*"}
    refit(source, target, source_names=of_all, target_names=table)
    expect_same(target, laid_out(expected, layouts), "renamed")


def separate_experts_become_stacked_ones_and_back() -> None:
    """Experts of their own on one side, stacked on the other, both ways."""
    experts = {f"experts.{i}.up": whole(i, 6, 4) for i in range(8)}
    stacked: Values = {"experts.up": torch.stack(list(experts.values()))}
    mesh = reshard.DeviceMesh.of(ep=2, tp=2)
    alone = {
        f"experts.{i}.up": reshard.spec(mesh, f"tp, - | only(ep={i // 4})").layout((6, 4))
        for i in range(8)
    }
    together = {
        "experts.up": reshard.spec(reshard.DeviceMesh.of(ep=4), "ep, -, -").layout((8, 6, 4))
    }
    stacks = {"experts.up": "experts.{}.up"}
    target = laid_out(zeros(stacked), together)
    refit(laid_out(experts, alone), target, stacks=stacks)
    expect_same(target, laid_out(stacked, together), "stacked experts")
    back = laid_out(zeros(experts), alone)
    refit(target, back, stacks=stacks)
    expect_same(back, laid_out(experts, alone), "separate experts")
    plain = zeros(experts)
    refit(stacked if dist.get_rank() == 2 else None, plain, stacks=stacks)
    expect_same(plain, experts, "a plain stack")
    wrong = {"experts.up": (torch.zeros(3, 6, 4), together["experts.up"])}
    refused(lambda: refit(wrong, back, stacks=stacks), ShardError, "experts.0.up: rank 0 has no")


def plain_tensors_of_a_recipe_are_refitted() -> None:
    """Plain local tensors of a shipped recipe."""
    recipe = load_recipe("llama")
    shapes = {"model.layers.0.mlp.up_proj.weight": (8, 4), "model.norm.weight": (4,)}
    given = {name: whole(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    mesh = reshard.DeviceMesh.of(tp=4)
    own = {
        "model.layers.0.mlp.up_proj.weight": torch.zeros(2, 4),
        "model.norm.weight": torch.zeros(4),
    }
    config = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    refit(
        given if dist.get_rank() == 3 else None,
        by_recipe(own, mesh, shapes, recipe, config=config),
    )
    rows = given["model.layers.0.mlp.up_proj.weight"].chunk(4)[dist.get_rank()]
    expected = {**given, "model.layers.0.mlp.up_proj.weight": rows}
    expect_same(own, expected, "a recipe")


def quantized_blocks_equal_those_of_the_whole_tensor() -> None:
    """Blocks of float8 with scales, equal to those of the whole tensor; in batches.

    Columns are cut 2, 2, 2, 0: between blocks of 2, where float8 travels, and inside blocks of 3,
    where the wide elements do.
    """
    given = {f"layers.{i}.w": torch.randn(16, 6, generator=_seeded(i)) for i in range(3)}
    mesh = reshard.DeviceMesh.of(tp=4)
    rows, columns = (reshard.spec(mesh, text).layout((16, 6)) for text in ("tp, -", "-, tp"))
    source = laid_out(given, dict.fromkeys(given, columns))
    for width in (2, 3):
        block = BlockQuantized(block=(4, width))
        scales = reshard.spec(mesh, "tp, -").layout((4, 6 // width))
        expected: dict[str, Any] = {}
        for name, value in given.items():
            target = {
                name: torch.zeros(16, 6).to(torch.float8_e4m3fn),
                name + "_scale_inv": torch.zeros(4, 6 // width),
            }
            block.finish_receive(name, value, target)
            cut = {name: rows, name + "_scale_inv": scales}
            expected |= laid_out({n: v.float() for n, v in target.items()}, cut)
        target = {
            name: (torch.zeros_like(local).to(_float8(name)), layout)
            for name, (local, layout) in expected.items()
        }
        # Wide, there is room for two of the three tensors at a time.
        done = refit(source, target, transforms={"*.w": block}, extra_bytes=1024)
        is_at_source = width == 2
        report = done.report
        expect(report.made_at_source == (tuple(given) if is_at_source else ()), f"{report}")
        why = "dimension 1 is cut inside a block of 3, at 0:2"
        expect(
            report.made_at_target == ({} if is_at_source else dict.fromkeys(given, why)),
            f"{report}",
        )
        sent = torch.tensor(done.sent_bytes)
        dist.all_reduce(sent)
        # Of each quarter of rows one rank has no part and three lack two thirds.
        wide = 3 * (3 * 4 * 4 + 4 * 6)
        blocks = 3 * (3 * 2 + 3)
        expect(int(sent) == (wide + 4 * blocks if is_at_source else 4 * wide), f"{sent} bytes")
        for _ in range(2):
            expect_same(
                {n: local.float() for n, (local, _) in target.items()},
                {n: local for n, (local, _) in expected.items()},
                f"quantised in blocks of {width}",
            )
            expect(done.extra_bytes <= 1024, f"{done.extra_bytes} bytes taken")
            for local, _ in target.values():
                local.zero_()
            done.run()
    refused(
        lambda: refit(source, target, transforms={"*.w": block}, extra_bytes=256),
        reshard.errors.UsageError,
        "is transformed",
    )
    refused(
        lambda: refit(source, target, transforms={"*.w": BlockQuantized((8, 2))}),
        RunError,
        "cuts a block of 8",
    )
    halves = laid_out({n: v.half() for n, v in zeros(given).items()}, dict.fromkeys(given, rows))
    done = refit(source, halves, transforms={"*": Cast("bfloat16")})
    expect_same(
        halves,
        laid_out({n: v.bfloat16().half() for n, v in given.items()}, dict.fromkeys(given, rows)),
        "cast on the way",
    )
    why = "Cast(dtype='bfloat16') is applied to what has arrived"
    expect(done.report.made_at_target == dict.fromkeys(given, why), f"{done.report}")


def _float8(name: str) -> torch.dtype:
    return torch.float32 if name.endswith("_scale_inv") else torch.float8_e4m3fn


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Steps:
    """Which batches begin and end, and which tensors are complete then."""

    def __init__(self, target: Any, expected: Any) -> None:
        self.target, self.expected = target, expected
        self.refit: Refit | None = None
        self.told: list[tuple[str, int]] = []

    def begin(self, number: int) -> None:
        self.told.append(("begin", number))

    def end(self, number: int) -> None:
        self.told.append(("end", number))
        for name in self.refit.complete_names[number]:
            expect_same({name: self.target[name]}, {name: self.expected[name]}, f"bucket {number}")


def tensors_are_complete_bucket_by_bucket() -> None:
    """Tensors are complete bucket by bucket, in the order of the target; with transforms behind."""
    given = {**values(), "extra.w": whole(9, 16, 8)}
    cuts = {**CUTS, "extra.w": "tp, -"}
    mesh4, mesh2 = (reshard.DeviceMesh.of(tp=ranks) for ranks in (4, 2))
    layouts = [
        {n: reshard.spec(mesh, cuts[n]).layout(given[n].shape) for n in given}
        for mesh in (mesh4, mesh2)
    ]
    source, expected = (laid_out(given, of) for of in layouts)
    # 992, 384, 384, 32 and 512 bytes.
    for buckets, names in (
        (400, [["embed.weight"], ["up.weight"], ["down.weight"], ["norm"]]),
        (800, [["embed.weight"], ["up.weight", "down.weight", "norm"]]),
        ("auto", [["embed.weight", "up.weight", "down.weight", "norm"]]),
        (None, [["embed.weight", "up.weight", "down.weight", "norm"]]),
        (
            {"embed.weight": 2, "norm": 0},
            [["norm"], [], ["embed.weight", "up.weight", "down.weight"]],
        ),
    ):
        target = laid_out(zeros(given), layouts[1])
        steps = Steps(target, expected)
        steps.refit = Refit.prepare(
            source, target, buckets=buckets, transforms={"extra.w": Cast("float32")}
        )
        found = [sorted(of) for of in steps.refit.complete_names]
        names = [sorted(of) for of in [*names, ["extra.w"]]]
        held = set(target) if dist.get_rank() < 2 else set()
        expect(found == [[n for n in of if n in held] for of in names] or not held, f"{found}")
        for _ in range(2):
            steps.told.clear()
            steps.refit.run(steps)
            order = [(at, n) for n in range(len(names)) for at in ("begin", "end")]
            expect(steps.told == order, f"{steps.told}")
            expect_same(target, expected, f"buckets {buckets}")
            for local, _ in target.values():
                if local is not None:
                    local.zero_()
    for wrong in (0, -1, True, "some", {"norm": -1}, 2.5):
        refused(partial(Refit.prepare, source, target, buckets=wrong), RunError, "buckets=")


def tensors_that_need_many_tiny_messages_are_refused() -> None:
    """Memory for so small messages that the time for each is all that counts."""
    mesh = reshard.DeviceMesh.of(tp=4)
    for rows in (1024, choose(8, 32)):
        layouts = [
            {"w": reshard.spec(mesh, cut).layout((rows, 1024))} for cut in ("tp, -", "-, tp")
        ]
        given = {"w": torch.arange(rows * 1024.0).view(rows, 1024)}
        source, target = laid_out(given, layouts[0]), laid_out(zeros(given), layouts[1])
        if rows == 1024:
            told = (
                "extra_bytes=64: 786432 bytes would be sent in messages of 16, each of which takes"
            )
            told = f"{told} about 0.1 ms; give at least 192"
            refused(partial(refit, source, target, extra_bytes=64), RunError, told)
        else:
            refit(source, target, extra_bytes=64)
            expect_same(target, laid_out(given, layouts[1]), "small messages")


def inference_tensors_are_filled() -> None:
    """Tensors of an engine that made them in inference mode."""
    with torch.inference_mode():
        target = laid_out(zeros(values()), layouts_of(2))
    done = refit(laid_out(values(), layouts_of(4)), target)
    done.run()
    expect_same(target, laid_out(values(), layouts_of(2)), "inference tensors")
    refit({"w": torch.ones(2), "b._extra_state": b"any"}, {"w": torch.zeros(2)})


def all_mismatches_are_in_one_error_on_every_rank() -> None:
    """All that does not fit is in one error, on every rank, before anything is written."""
    rank = dist.get_rank()
    source = laid_out(values(), layouts_of(4))
    target = laid_out({n: v + 77 for n, v in zeros(values()).items()}, layouts_of(2))
    before = {n: (local.clone(), of) for n, (local, of) in target.items() if local is not None}
    source["extra"] = source.pop("norm")
    source["up.weight"] = (torch.zeros(3, 9), Layout_whole((12, 9)))
    source["down.weight"] = (source["down.weight"][0].double(), source["down.weight"][1])
    if rank == 2:
        source["embed.weight"] = (torch.zeros(1, 8), source["embed.weight"][1])
    for planning in ("local", "centralized"):
        told = refused(
            partial(Refit.prepare, source, target, planning=planning), ShardError, "do not fit"
        )
        for line in (
            "norm: not in the source",
            "extra: in the source only",
            "up.weight: shape [12, 8], the source's [12, 9]",
            "down.weight: the source is float64, the target float32",
            "embed.weight: rank 2 has local shape [1, 8], the source's layout says [8, 8]",
        ):
            expect(line in told, f"{line!r} is not in {told!r}")
        every: list[str] = [""] * 4
        dist.all_gather_object(every, told)
        expect(len(set(every)) == 1, f"ranks say different things: {every}")
    expect_same({n: t for n, t in target.items() if n in before}, before, "refused")
    refused(
        lambda: refit(values() if rank else {"w": 5}, None, strict=False),
        ShardError,
        "rank 0: 'w' is a int",
    )
    refused(lambda: refit(None, None, extra_bytes=64 + rank), reshard.errors.PlanError, "extra")
    refused(
        lambda: refit(values(), None, source_names=lambda name: name[rank - 99]),
        ShardError,
        "rank 3: IndexError",
    )
    refused(lambda: refit({}, {"w": torch.zeros(1).expand(4)}), ShardError, "strides [0]")
    refused(lambda: refit({}, {}, planning="none"), RunError, "planning='none'")
    refused(lambda: refit({}, {}, method="fast"), RunError, "method='fast'; it is one of 'auto'")
    both = values(), zeros(values())
    told = refused(lambda: refit(*both, method="program"), reshard.errors.PlanError, "no program")
    expect("norm: a side of it is not a DTensor" in told, told)
    refused(lambda: refit({}, {}, extra_bytes=8), RunError, "extra_bytes=8")
    refused(lambda: refit({}, {}, extra_bytes="8"), RunError, "extra_bytes='8'")
    refused(lambda: refit({}, {}, transforms={"w": BlockQuantized}), RunError, "give a Transform")
    refused(lambda: refit({}, {}, stacks=["w"]), RunError, "stacks=['w']; give a table")
    refused(lambda: refit({}, {}, stacks={3: "w"}), RunError, "stacks={3: 'w'}")
    refused(lambda: refit({}, {}, source_offset=-1), RunError, "an offset of -1")
    refused(lambda: refit({}, {}, target_offset="1"), RunError, "an offset of '1'")
    told = "w: not in the target, but a transform is given for it"
    refused(lambda: refit({}, {}, transforms={"w": BlockQuantized()}), ShardError, told)
    refused(lambda: refit({}, {}, group="all"), UsageError, "group='all'; give a torch process")
    one = torch.zeros(4)
    # Only one rank has two tensors in one place, and would notice.
    twice = {"a": one, "b": one} if rank == 1 else None
    circle = {"a": "b", "b": "a"}
    refused(lambda: refit({"a": one + 1}, twice, ties=circle), RunError, "ties go round")
    refused(lambda: refit({"a": one}, None, source_names=3), ShardError, "names by 3")
    refused(lambda: refit({"a": one}, None, stacks={"a": 3}), ShardError, "members 3")
    mine = zeros(values())
    refused(lambda: refit(mine, {"norm": mine["norm"]}, strict=False), ShardError, "share memory")
    both = Net(1)
    refused(lambda: refit(Net(2, is_tied=False), both), ShardError, "declare ties")


def Layout_whole(shape: tuple[int, ...]) -> reshard.Layout:  # noqa: N802
    return reshard.spec(reshard.DeviceMesh.of(tp=4), "tp, -").layout(shape)


CASES = [
    equal_values_are_sent_once,
    a_second_run_allocates_nothing,
    sides_on_different_ranks_number_their_own,
    a_second_engine_of_the_same_kind_reuses_the_plan,
    overlapping_ranks_are_refitted,
    a_group_of_some_ranks_is_refitted,
    elements_are_sent_in_the_narrower_type,
    plain_modules_buffers_and_ties_are_refitted,
    fsdp2_becomes_tensor_parallelism,
    verify_finds_a_single_different_element,
    partial_sums_are_combined,
    stages_that_count_from_0_become_a_whole_model,
    separate_experts_become_stacked_ones_and_back,
    plain_tensors_of_a_recipe_are_refitted,
    quantized_blocks_equal_those_of_the_whole_tensor,
    tensors_are_complete_bucket_by_bucket,
    tensors_that_need_many_tiny_messages_are_refused,
    inference_tensors_are_filled,
    all_mismatches_are_in_one_error_on_every_rank,
]


if __name__ == "__main__":
    run_cases(CASES)
