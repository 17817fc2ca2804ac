"""One rank of a job of four: fused parameters to and from separate ones, against whole values.

What a fused parameter is made of is written with reshapes of whole tensors here, and what a rank
has of it by NumPy's rules: nothing comes from `reshard.recipes.naming`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

import reshard
from rank_cases import run_cases
from refit_models import expect, expect_same, laid_out, module_of, whole, zeros
from reshard.errors import ShardError
from reshard.layout import Layout
from reshard.megatron.names import MegatronNames
from reshard.megatron.ranks import MegatronRanks
from reshard.recipes.naming import Fusion
from reshard.torch import BlockQuantized, MegatronModel, Refit, refit
from selection import choose

HEAD, HIDDEN, INNER = 4, 6, 10
TABLE = {
    "*.qkv.weight": Fusion(("*.q.weight", "*.k.weight", "*.v.weight"), (8, 2, 2), 2),
    "*.qkv.bias": Fusion(("*.q.bias", "*.k.bias", "*.v.bias"), (8, 2, 2), 2),
    "*.fc1.weight": Fusion(("*.gate.weight", "*.up.weight")),
    "*.blocked.weight": Fusion(("*.q.weight", "*.k.weight", "*.v.weight"), (8, 2, 2)),
}


def separate(heads: int = 8, groups: int = 2) -> dict[str, torch.Tensor]:
    """Queries, keys, values, gate and up of one layer."""
    rows = {"q": heads * HEAD, "k": groups * HEAD, "v": groups * HEAD}
    found = {}
    for number, (name, length) in enumerate(rows.items()):
        found[f"l.{name}.weight"] = whole(number, length, HIDDEN)
        found[f"l.{name}.bias"] = whole(10 + number, length)
    found["l.gate.weight"], found["l.up.weight"] = (
        whole(20, INNER, HIDDEN),
        whole(21, INNER, HIDDEN),
    )
    return found


def fused(of: dict[str, torch.Tensor], groups: int = 2) -> dict[str, torch.Tensor]:
    """The same, interleaved by query group, and gate above up."""
    found = {}
    for kind in ("weight", "bias"):
        parts = [of[f"l.{name}.{kind}"].unflatten(0, (groups, -1)) for name in "qkv"]
        found[f"l.qkv.{kind}"] = torch.cat(parts, dim=1).flatten(0, 1)
    found["l.fc1.weight"] = torch.cat([of["l.gate.weight"], of["l.up.weight"]])
    return found


def layouts(of: dict[str, torch.Tensor], cut: str, mesh: reshard.DeviceMesh) -> dict[str, Layout]:
    """The first dimension cut."""
    return {
        name: reshard.spec(mesh, ", ".join([cut] + ["-"] * (value.ndim - 1))).layout(value.shape)
        for name, value in of.items()
    }


def moved_bytes(done: Refit) -> int:
    total = torch.tensor(done.received_bytes)
    dist.all_reduce(total)
    return int(total)


def fused_tensors_are_split_and_joined() -> None:
    """Cuts of either side, also inside groups and heads, and shared heads."""
    apart = separate()
    together = fused(apart)
    cuts = (
        ("tp", reshard.DeviceMesh.of(tp=2)),
        ("tp", reshard.DeviceMesh.of(tp=4)),
        ("tp", reshard.DeviceMesh.of(tp=3)),
        ("tp", reshard.DeviceMesh.of(dp=2, tp=2)),
        ("tp / dp", reshard.DeviceMesh.of(dp=2, tp=2)),
        ("tp@heads2", reshard.DeviceMesh.of(tp=4)),
    )
    pairs = [*pairwise(cuts), (cuts[-1], cuts[0])]
    # By default each is on one side.
    for (cut, mesh), (other_cut, other) in pairs[:: choose(2, 1)]:
        # Two query groups shared by four ranks: every rank has the whole of its group.
        there, here = layouts(together, cut, mesh), layouts(apart, other_cut, other)
        what = f"{cut} of {mesh} to {other_cut} of {other}"
        target = laid_out(zeros(apart), here)
        source = laid_out(together, there)
        done = refit(source, target, source_names=TABLE)
        expect_same(target, laid_out(apart, here), f"fused, {what}")
        back = laid_out(zeros(together), there)
        refit(laid_out(apart, here), back, target_names=TABLE, planning="centralized")
        expect_same(back, laid_out(together, there), f"separate, {what}")
        # The same values by the same rows: nothing travels that need not.
        rows = _rows_moved(apart, together, here, there)
        expect(moved_bytes(done) == rows, f"{moved_bytes(done)} bytes, {rows} are needed: {what}")


def _rows_moved(
    apart: dict[str, torch.Tensor],
    together: dict[str, torch.Tensor],
    here: dict[str, Layout],
    there: dict[str, Layout],
) -> int:
    """Bytes that ranks lack, found by numbering every row of every member."""
    row_bytes = {name: value[0].numel() * 4 for name, value in apart.items()}
    numbers = {}
    for number, (name, value) in enumerate(apart.items()):
        of_row = 1000.0 * number + torch.arange(float(len(value)))
        numbers[name] = of_row.reshape(-1, *[1] * (value.ndim - 1)).expand(value.shape)
    fused_numbers = fused(numbers)
    names = list(apart)
    total = 0
    for rank in range(4):
        had = set()
        for name in together:
            had |= set(_held(fused_numbers[name], there[name], rank))
        for name in apart:
            lacks = set(_held(numbers[name], here[name], rank)) - had
            total += sum(row_bytes[names[int(row // 1000)]] for row in lacks)
    return total


def _held(numbers: torch.Tensor, layout: Layout, rank: int) -> list[float]:
    if rank >= layout.slots:
        return []
    found = []
    for box in layout.boxes(rank):
        part = numbers[box.start[0] : box.stop[0]]
        found += (part if part.ndim == 1 else part[:, 0]).tolist()
    return found


def tensors_move_between_fusions() -> None:
    """Interleaved on one side, in blocks on the other; and the same fusion on both."""
    apart = separate()
    together = {"l.qkv.weight": fused(apart)["l.qkv.weight"]}
    blocked = {"l.blocked.weight": torch.cat([apart[f"l.{name}.weight"] for name in "qkv"])}
    mesh = reshard.DeviceMesh.of(tp=4)
    there = layouts(together, "tp", mesh)
    here = layouts(blocked, "tp@blocks[32,8,8]", mesh)
    target = laid_out(zeros(blocked), here)
    refit(laid_out(together, there), target, source_names=TABLE, target_names=TABLE)
    expect_same(target, laid_out(blocked, here), "blocked")
    names = {"l.blocked.weight": "l.qkv.weight"}
    same = laid_out(zeros(together), layouts(together, "-", mesh))
    done = refit(laid_out(together, there), same, source_names=TABLE, target_names=TABLE)
    expect_same(same, laid_out(together, layouts(together, "-", mesh)), "the same fusion")
    (item,) = done.part_items
    expect(item.match.name == "l.qkv.weight", "the same fusion was cut into pieces")
    # One name, but other members: the pieces that both have in common.
    other = {"l.qkv.weight": Fusion(("l.q.weight", "l.k.weight", "l.v.weight"), (8, 2, 2))}
    found = {"l.qkv.weight": laid_out(zeros(blocked), here)["l.blocked.weight"]}
    refit(laid_out(together, there), found, source_names=TABLE, target_names=other)
    expect_same(found, {"l.qkv.weight": laid_out(blocked, here)["l.blocked.weight"]}, f"{names}")


def fused_tensors_are_cast_in_each_run() -> None:
    """To bfloat16 at the sender; a second run with other values."""
    apart = separate()
    mesh, other = reshard.DeviceMesh.of(tp=4), reshard.DeviceMesh.of(tp=2)
    there, here = layouts(fused(apart), "tp", mesh), layouts(apart, "tp", other)
    narrow = {name: value.bfloat16() for name, value in apart.items()}
    source, target = laid_out(fused(apart), there), laid_out(zeros(narrow), here)
    done = refit(source, target, source_names=TABLE, cast=True, extra_bytes=512)
    expect_same(target, laid_out(narrow, here), "cast")
    for local, _ in source.values():
        local += 1
    done.run()
    expect_same(target, laid_out({n: v + 1 for n, v in narrow.items()}, here), "again")


def fused_tensors_of_megatron_move_to_separate_tensors_and_back() -> None:
    """Megatron's modules, gate and up with and without their mark, to separate tensors and back."""
    rank = dist.get_rank()
    apart = separate()
    together = fused(apart)
    is_cut = {"tensor_model_parallel": True}
    gates = [apart[f"l.{name}.weight"].chunk(2)[rank % 2] for name in ("gate", "up")]
    mesh = reshard.DeviceMesh.of(tp=4)
    here = layouts(apart, "tp", mesh)
    for marks in ({}, {"partition_stride": 2}):
        given = [
            *((n, together[n].chunk(2)[rank % 2].clone(), is_cut) for n in list(together)[:2]),
            ("l.fc1.weight", torch.cat(gates), is_cut | marks),
        ]
        names = MegatronNames(MegatronRanks(tp=2, dp=2))
        target = laid_out(zeros(apart), here)
        model = MegatronModel(module_of(given), names)
        refit(model, target, source_names=TABLE)
        expect_same(target, laid_out(apart, here), f"from Megatron, {marks}")
        empty = [(n, torch.zeros_like(value), says) for n, value, says in given]
        found = MegatronModel(module_of(empty), names)
        refit(laid_out(apart, here), found, target_names=TABLE)
        expect_same(found.chunks.state_dict(), model.chunks.state_dict(), f"to Megatron, {marks}")
        # Between two of Megatron's models that say the same of it.
        again = MegatronModel(module_of([(n, v.clone() * 0, s) for n, v, s in given]), names)
        refit(model, again, source_names=TABLE, target_names=TABLE)
        expect_same(again.chunks.state_dict(), model.chunks.state_dict(), f"Megatron, {marks}")


def stacked_experts_move_to_separate_experts_and_back() -> None:
    """Gate and up of all experts in one stacked tensor, to experts of their own, and back."""
    experts = {
        f"e.{i}.{name}.weight": whole(10 * i + j, 6, 4)
        for i in range(4)
        for j, name in enumerate(("gate", "up"))
    }
    stack = torch.stack(
        [torch.cat([experts[f"e.{i}.gate.weight"], experts[f"e.{i}.up.weight"]]) for i in range(4)]
    )
    stacked = {"e.gate_up": stack}
    names = {"e.*.gate_up": Fusion(("e.*.gate.weight", "e.*.up.weight"))}
    stacks = {"e.gate_up": "e.{}.gate_up"}
    mesh = reshard.DeviceMesh.of(ep=2, tp=2)
    there = {"e.gate_up": reshard.spec(mesh, "ep, tp@blocks[6,6], -").layout((4, 12, 4))}
    here = layouts(experts, "tp", reshard.DeviceMesh.of(tp=4))
    target = laid_out(zeros(experts), here)
    refit(laid_out(stacked, there), target, source_names=names, stacks=stacks)
    expect_same(target, laid_out(experts, here), "a stack of fused experts")
    back = laid_out(zeros(stacked), there)
    refit(target, back, target_names=names, stacks=stacks)
    expect_same(back, laid_out(stacked, there), "to a stack of fused experts")


def fused_sources_are_quantized_by_the_ranks_of_whole_blocks() -> None:
    """A fused source: float8 is made by the ranks of each piece where blocks are whole."""
    apart = {f"l.{name}.weight": separate()[f"l.{name}.weight"] for name in "qkv"}
    together = {"l.qkv.weight": fused(separate())["l.qkv.weight"]}
    block = BlockQuantized((4, 4))
    expected: dict[str, torch.Tensor] = {}
    for name, value in apart.items():
        made = {
            name: torch.zeros(value.shape).to(torch.float8_e4m3fn),
            f"{name}_scale_inv": torch.zeros(len(value) // 4, 2),
        }
        block.finish_receive(name, value, made)
        expected |= {one: values.float() for one, values in made.items()}
    mesh = reshard.DeviceMesh.of(tp=4)
    here = layouts(expected, "tp", reshard.DeviceMesh.of(tp=2))
    inside = {"l.q.weight": "dimension 0 is cut inside a block of 4, at 0:13"}
    sent = []
    for cut, at_target in (("tp", {}), ("tp@sizes[13,11,12,12]", inside)):
        there = layouts(together, cut, mesh)
        target = {
            name: (local if local is None or "scale" in name else local.to(torch.float8_e4m3fn), of)
            for name, (local, of) in laid_out(zeros(expected), here).items()
        }
        source = laid_out(together, there)
        done = refit(source, target, source_names=TABLE, transforms={"*.weight": block})
        found = {n: (None if one is None else one.float(), of) for n, (one, of) in target.items()}
        expect_same(found, laid_out(expected, here), f"quantised of pieces, {cut}")
        told = done.report.made_at_target, set(done.report.made_at_source)
        wanted = at_target, apart.keys() - at_target.keys()
        # Ranks 2 and 3 have none of the target, and tell what they send.
        is_told = told == wanted
        if dist.get_rank() > 1:
            is_told = told[0].items() <= wanted[0].items() and told[1] <= wanted[1]
        expect(is_told, f"{told}")
        sent.append(moved_bytes(done))
    # Rows 12:24 and 24:48 go to ranks 0 and 1, but for what these have: q 12:16, k, v of group 0,
    # and all of group 1 but nothing of it is on rank 1. A block of 4 rows has two scales.
    rows = 4 + 4 + 4 + 24
    expect(sent[0] == rows * HIDDEN + rows // 4 * 2 * 4, f"{sent} bytes")
    # The wide ones: q 13:16, and all of group 1's.
    wide, narrow = 3 + 16, 4 + 4 + 4 + 4
    expect(sent[1] == 4 * wide * HIDDEN + narrow * HIDDEN + narrow // 4 * 2 * 4, f"{sent} bytes")


def quantized_blocks_are_half_the_bytes_of_bfloat16() -> None:
    """Blocks of 128 by 128: a byte an element and four a block travel, not two an element."""
    weight = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = {"w": torch.zeros(512, 256).to(torch.float8_e4m3fn), "w_scale_inv": torch.zeros(4, 2)}
    BlockQuantized().finish_receive("w", weight, made)
    expected = {name: value.float() for name, value in made.items()}
    there = layouts({"w": weight}, "tp", reshard.DeviceMesh.of(tp=4))
    here = layouts(expected, "tp", reshard.DeviceMesh.of(dp=2, tp=2))
    target = laid_out(zeros(expected), here)
    target["w"] = (target["w"][0].to(torch.float8_e4m3fn), here["w"])
    source = laid_out({"w": weight}, there)
    done = refit(source, target, transforms={"w": BlockQuantized()})
    found = {name: (local.float(), of) for name, (local, of) in target.items()}
    expect_same(found, laid_out(expected, here), "blocks of 128")
    # Of eight halves, each of two quarters, two quarters are there.
    quarters = 4 * 2 - 2
    expect(moved_bytes(done) == quarters * (128 * 256 + 4 * 2), f"{moved_bytes(done)} bytes")
    # Where nothing travels, nothing is gained by making it before.
    source = laid_out({"w": weight}, {"w": here["w"]})
    done = refit(source, target, transforms={"w": BlockQuantized()})
    expect_same({n: (t.float(), of) for n, (t, of) in target.items()}, found, "in place")
    why = {"w": "0 bytes would travel, 0 otherwise"}
    expect(done.report.made_at_target == why, f"{done.report}")
    # Two ranks send halves of one block, and one of them the only scale.
    block = {"w": weight[:128, :128].contiguous()}
    both = {"w": Layout.whole((128, 128), [0, 1], 2)}
    there = {"w": Layout.whole((128, 128), [3], 4), "w_scale_inv": Layout.whole((1, 1), [3], 4)}
    alone = {"w": torch.zeros(128, 128).to(torch.float8_e4m3fn), "w_scale_inv": torch.zeros(1, 1)}
    is_last = dist.get_rank() == 3
    target = {name: (value if is_last else None, there[name]) for name, value in alone.items()}
    done = refit(laid_out(block, both), target, transforms={"w": BlockQuantized()})
    expect((done.sent_bytes > 0) == (dist.get_rank() < 2), f"{done.sent_bytes} bytes")
    if is_last:
        expect(torch.equal(alone["w"].float(), expected["w"][:128, :128]), "one block")
        expect(torch.equal(alone["w_scale_inv"], expected["w_scale_inv"][:1, :1]), "one scale")


def members_that_do_not_fit_are_refused_by_name() -> None:
    """What does not fit is told by the names of members."""
    apart = separate()
    together = fused(apart)
    mesh = reshard.DeviceMesh.of(tp=4)
    there, here = layouts(together, "tp", mesh), layouts(apart, "tp", mesh)
    source, target = laid_out(together, there), laid_out(zeros(apart), here)
    _refused(source, target, "l.q.weight: not in the source", source_names=None)
    short = {name: value for name, value in target.items() if name != "l.up.weight"}
    _refused(source, short, "l.up.weight, which l.fc1.weight has: in the source only")
    longer = laid_out(
        {**apart, "l.gate.weight": torch.zeros(12, 6)},
        here | layouts({"l.gate.weight": torch.zeros(12, 6)}, "tp", mesh),
    )
    _refused(source, longer, "l.gate.weight: shape [12, 6], the source's [10, 6]")
    less = {name: value for name, value in target.items() if name != "l.k.bias"}
    told = "l.k.bias: not in the source (a member of l.qkv.bias)"
    _refused(less, source, told, source_names=None, target_names=TABLE)
    wrong = {"*.qkv.weight": Fusion(("*.q.weight", "*.k.weight"), (5, 2))}
    _refused(source, target, "length 48 cannot be cut into 1 groups", source_names=wrong)
    other = TABLE if dist.get_rank() else {}
    _refused(source, target, "ranks of the source name different members", source_names=other)
    holes = Layout.flat_ranges((48, 6), {0: (0, 100), 1: (100, 288)})
    flat = {"l.qkv.weight": (torch.zeros(holes.local_shape(dist.get_rank() % 2)), holes)}
    if dist.get_rank() > 1:
        flat = {"l.qkv.weight": (None, holes)}
    _refused(flat, {n: target[n] for n in ("l.q.weight",)}, "several boxes", strict=False)


def _refused(source: Any, target: Any, text: str, **options: Any) -> None:
    try:
        Refit.prepare(source, target, **({"source_names": TABLE} | options))
    except ShardError as error:
        expect(text in str(error), f"{text!r} is not in {error}")
        return
    raise SystemExit(f"nothing was raised where {text!r} was expected")


CASES = [
    fused_tensors_are_split_and_joined,
    tensors_move_between_fusions,
    fused_tensors_are_cast_in_each_run,
    fused_tensors_of_megatron_move_to_separate_tensors_and_back,
    stacked_experts_move_to_separate_experts_and_back,
    fused_sources_are_quantized_by_the_ranks_of_whole_blocks,
    quantized_blocks_are_half_the_bytes_of_bfloat16,
    members_that_do_not_fit_are_refused_by_name,
]


if __name__ == "__main__":
    run_cases(CASES)
