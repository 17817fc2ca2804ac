"""One rank of a job of four: refits that send only what changed, compared with whole ones.

After each run the target has to be, bit for bit, what a refit that sends everything makes of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import reshard
from rank_cases import run_cases
from refit_models import expect, refused
from reshard.errors import PlanError, RunError, ShardError
from reshard.notation.partitioned import PartitionedShard
from reshard.torch import BlockQuantized, PartitionedTensor, Refit, Transform
from reshard.torch.exchange import changes
from selection import choose

SHAPES = {"embed": (300, 64), "up": (96, 128), "down": (128, 96), "norm": (129,), "number": ()}
ROWS = {"embed": "tp, -", "up": "tp, -", "down": "tp, -", "norm": "-", "number": ""}
COLUMNS = {"embed": "-, tp", "up": "-, tp", "down": "-, tp", "norm": "-", "number": ""}
HEAD_BYTES = 24
UNITS: tuple[Any, ...] = ("elements", "blocks")
SHARES = (1.0, 0.0, 0.01, 0.2, 0.9, 0.001)
"""The share of elements that change before each step."""
FEW_SHARES = choose((1.0, 0.01, 0.9), SHARES)

Values = dict[str, torch.Tensor]


def bits(seed: int, dtype: torch.dtype = torch.float32, shapes: Any = None) -> Values:
    """Any bits at all, NaNs with payloads among them."""
    choose = np.random.default_rng(seed)
    found = {}
    for name, shape in (shapes or SHAPES).items():
        size = int(np.prod(shape)) * dtype.itemsize
        content = torch.from_numpy(choose.integers(0, 256, size, np.uint8))
        found[name] = content.view(dtype).view(shape)
    return found


def numbers(seed: int, dtype: torch.dtype, shapes: Any = None) -> Values:
    """Numbers that fit in every type."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-8, 9, shape, generator=generator).to(dtype)
        for name, shape in (shapes or SHAPES).items()
    }


def cut(given: Values, cuts: Any, axes: Any) -> dict[str, Any]:
    """What this rank has of it, with the layouts."""
    mesh = reshard.DeviceMesh.of(**axes)
    found = {}
    for name, value in given.items():
        layout = reshard.spec(mesh, cuts[name]).layout(value.shape)
        local = None
        if dist.get_rank() < layout.slots and layout.local_shape(dist.get_rank()) is not None:
            (box,) = layout.boxes(dist.get_rank())
            local = value[tuple(map(slice, box.start, box.stop))].clone()
        found[name] = (local, layout)
    return found


def set_to(model: dict[str, Any], given: Values) -> None:
    """The values of a model are others."""
    for name, (local, layout) in model.items():
        if local is not None:
            (box,) = layout.boxes(dist.get_rank())
            local.copy_(given[name][tuple(map(slice, box.start, box.stop))])


def expect_equal(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    """Bit for bit."""
    for name, (local, _) in expected.items():
        if local is not None:
            same = found[name][0].contiguous().view(-1).view(torch.uint8)
            expect(
                torch.equal(same, local.contiguous().view(-1).view(torch.uint8)), f"{what}: {name}"
            )


def change(given: Values, share: float, seed: int) -> None:
    """Other bits in a share of the elements, scattered."""
    generator = torch.Generator().manual_seed(seed)
    for value in given.values():
        flat = value.view(-1).view(torch.uint8).view(value.numel(), -1)
        picked = torch.rand(len(flat), generator=generator) < share
        flat[picked] = flat.flip(0)[picked]


def change_rows(given: Values, share: float, seed: int) -> None:
    """The same of rows that lie together."""
    for value in given.values():
        flat = value.view(-1).view(torch.uint8).view(value.numel(), -1)
        count = int(share * len(flat))
        flat[seed : seed + count] = flat.flip(0)[seed : seed + count].clone()


def compare_steps(
    given: Values,
    target_dtype: torch.dtype,
    unit: Any,
    changed: Callable[[Values, float, int], None],
    shares: tuple[float, ...] = SHARES,
    **options: Any,
) -> list[tuple[float, int, int]]:
    """Runs of both kinds over steps; how many bytes all ranks sent of how many, by what changed."""
    source = cut(given, ROWS, {"tp": 4})
    blank = {name: torch.zeros(value.shape, dtype=target_dtype) for name, value in given.items()}
    target, expected = (cut(blank, COLUMNS, {"tp": 2}) for _ in range(2))
    whole = Refit.prepare(source, expected, cast=True, **options)
    delta = Refit.prepare(source, target, cast=True, changed_only=unit, **options)
    told = []
    for step, share in enumerate(shares):
        if step:
            changed(given, share, step)
            set_to(source, given)
        whole.run()
        delta.run()
        expect_equal(target, expected, f"{unit}, step {step} of {options}")
        sent = torch.tensor([delta.sent_bytes, whole.sent_bytes, delta.received_bytes])
        dist.all_reduce(sent)
        expect(sent[0] == sent[2], "what is sent is received")
        told.append((share, int(sent[0]), int(sent[1])))
    if given["up"].dtype == target_dtype:
        # A NaN of any bits that was cast is not the source's when it is cast back.
        delta.verify()
    return told


def bytes_follow_the_changed_elements() -> None:
    """Bytes follow what changed; whatever the bits, the types and the limits are."""
    for unit in UNITS:
        told = compare_steps(bits(1), torch.float32, unit, change)
        messages = told[1][1] // HEAD_BYTES
        expect(told[1][1] == HEAD_BYTES * messages and messages < 20, f"nothing changed: {told}")
        expect(told[0][1] == told[0][2] + told[1][1], f"a first run is whole: {told}")
        expect(all(sent <= total + told[1][1] for _, sent, total in told), f"never more: {told}")
        if unit == "elements":
            # Five bytes for each of four that changed.
            expect(told[2][1] < 0.02 * told[2][2] + told[1][1], f"one of a hundred: {told}")
            expect(told[3][1] < 0.3 * told[3][2], f"one of five: {told}")
        told = compare_steps(bits(1), torch.float32, unit, change_rows)
        expect(told[3][1] < 0.5 * told[3][2], f"{unit}, a fifth lies together: {told}")
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        told = compare_steps(bits(2, dtype), wide, "elements", change)
        expect(told[2][1] < 0.03 * told[2][2] + told[1][1], f"{dtype} to {wide}: {told}")
    for dtype in (torch.float8_e4m3fn, torch.int64, torch.complex64, torch.bool):
        given = numbers(3, dtype)
        for unit in choose(UNITS[:1], UNITS):
            compare_steps(given, dtype, unit, change, FEW_SHARES)
    for options in ({"extra_bytes": 4096}, {"buckets": 1 << 14}, {"planning": "centralized"}):
        for unit in choose(UNITS[1:], UNITS):
            values = bits(4, torch.int16)
            compare_steps(values, torch.int16, unit, change, FEW_SHARES, **options)


class Doubled(Transform):
    """What arrives is doubled."""

    def finish_receive(self, name: str, received: torch.Tensor, target: Any) -> None:
        target[name].copy_(2 * received)


def outputs_of_the_source_are_compared_and_others_sent_whole() -> None:
    """What the source makes is compared; what is made of what arrives travels whole."""
    shapes = {"w": (256, 256), "other": (64, 32)}
    given = numbers(5, torch.bfloat16, shapes)
    source = cut(given, {"w": "tp, -", "other": "tp, -"}, {"tp": 2})
    blank = {
        "w": torch.zeros(256, 256, dtype=torch.float8_e4m3fn),
        "w_scale_inv": torch.zeros(2, 2),
        "other": torch.zeros(64, 32, dtype=torch.bfloat16),
    }
    transforms = {"w": BlockQuantized(), "other": Doubled()}
    targets = [cut(blank, dict.fromkeys(blank, "-, tp"), {"tp": 2}) for _ in range(2)]
    runs = [
        Refit.prepare(source, target, transforms=transforms, changed_only=only)
        for target, only in zip(targets, (False, "elements"), strict=True)
    ]
    expect(runs[0].report.made_at_source == ("w",) or dist.get_rank() > 1, "at the source")
    for step in range(3):
        for one in runs:
            one.run()
        expect_equal(targets[1], targets[0], f"quantised, step {step}")
        sent_bytes = [one.sent_bytes for one in runs]
        if step and dist.get_rank() < 2:
            expect(sent_bytes[1] < sent_bytes[0] // 2, f"{sent_bytes}")
        given["w"][7, 5] = step + 0.5
        given["other"][3, 2] = -step
        set_to(source, given)


def written_targets_are_sent_whole_or_found_by_verify() -> None:
    """Writes that torch counts make the next run whole; others are found by `verify`."""
    rank = dist.get_rank()
    given = bits(6, torch.int32)
    source, target = cut(given, ROWS, {"tp": 4}), cut(given, COLUMNS, {"tp": 2})
    expected = cut(given, COLUMNS, {"tp": 2})
    done = Refit.prepare(source, target, changed_only="elements")
    first = None
    for step in range(4):
        if step == 2 and rank == 1:
            target["up"][0].add_(1)
        done.run()
        expect_equal(target, expected, f"step {step}")
        first = first or done.sent_bytes
        expect((done.sent_bytes == first) == (step in (0, 2)), f"step {step}: {done.sent_bytes}")
    if rank == 1:
        target["up"][0].numpy()[3] += 1
    done.run()
    refused(done.verify, RunError, "rank 1: not the source's: up (from rank")
    # Another refit into the same tensors is one of those who write.
    others = bits(7, torch.int32)
    Refit.prepare(cut(others, ROWS, {"tp": 4}), target).run()
    done.run()
    expect_equal(target, expected, "after another refit")
    done.verify()
    # Likewise into inference tensors, which count no writes.
    with torch.inference_mode():
        target = cut(given, COLUMNS, {"tp": 2})
    pair = [
        Refit.prepare(cut(one, ROWS, {"tp": 4}), target, changed_only="elements")
        for one in (given, others)
    ]
    for step in range(4):
        pair[step % 2].run()
        expect_equal(target, cut((given, others)[step % 2], COLUMNS, {"tp": 2}), f"by {step % 2}")
        expect(pair[step % 2].sent_bytes == first, "whole")
    pair[1].run()
    expect(pair[1].sent_bytes < first / 2, "nothing changed")


def the_run_after_a_failure_sends_everything() -> None:
    """A run that fails in the middle leaves nothing to compare with: the next one sends all."""
    given = bits(8, torch.int32)
    source, target = cut(given, ROWS, {"tp": 4}), cut(given, COLUMNS, {"tp": 2})
    for unit in UNITS:
        group = dist.new_group()
        done = Refit.prepare(source, target, changed_only=unit, group=group)
        done.run()
        whole_bytes = done.sent_bytes
        given["up"][5, 7] += 1
        set_to(source, given)
        real = changes.encode_words

        def fail(*arguments: Any, **keywords: Any) -> Any:
            raise MemoryError("no more")

        if dist.get_rank() == 3:
            changes.encode_words = fail
        told = refused(done.run, (RunError, MemoryError), "")
        changes.encode_words = real
        expect("no more" in told and not done.is_usable, told)
        done.renew(group)
        done.run()
        expect(done.sent_bytes == whole_bytes, "all is sent again")
        expect_equal(target, cut(given, COLUMNS, {"tp": 2}), "renewed")
        given["up"][5, 8] += 1
        set_to(source, given)
        done.run()
        expect(not whole_bytes or done.sent_bytes < whole_bytes, "and then what changes")
        done.verify()


def replicas_are_sent_from_one_copy_beside_programs() -> None:
    """Replicas are sent from one copy; what moves by collectives moves as ever."""
    given = bits(9, torch.int16, {"w": (512, 96)})
    source = cut(given, {"w": "-, -"}, {"tp": 1})
    target = cut(given, {"w": "-, -"}, {"dp": 4})
    done = Refit.prepare(source, target, changed_only="elements")
    for _ in range(2):
        done.run()
        given["w"][9, 9] += 1
        set_to(source, given)
    if dist.get_rank() == 0:
        expect(done.kept_bytes == 2 * 512 * 96, f"kept {done.kept_bytes}")
        expect(done.sent_bytes < 3 * 64, f"sent {done.sent_bytes}")
    expect(dist.get_rank() == 0 or done.kept_bytes == 0, f"kept {done.kept_bytes}")
    done.run()
    expect_equal(target, cut(given, {"w": "-, -"}, {"dp": 4}), "replicas")


def partial_sums_are_complete_in_each_run() -> None:
    """Contributions of ranks beside tensors that are whole: each run brings the sum of then."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (4,))
    plain = bits(3, torch.int32, {"w": (64, 96)})["w"]
    own = torch.arange(48.0).reshape(8, 6) * (rank + 1)
    source = {"sum": DTensor.from_local(own, mesh, [Partial()], run_check=False)}
    source["w"] = distribute_tensor(plain, mesh, [Shard(0)])
    target = {
        "sum": distribute_tensor(torch.zeros(8, 6), mesh, [Shard(1)]),
        "w": distribute_tensor(torch.zeros_like(plain), mesh, [Shard(1)]),
    }
    for unit in UNITS:
        done = Refit.prepare(source, target, changed_only=unit)
        for step in range(4):
            if step:
                # On one rank alone, and nowhere else.
                own[step, 2] += step * (rank == 3)
                plain[7 * step, step] += 1
                source["w"].copy_(distribute_tensor(plain, mesh, [Shard(0)]))
            done.run()
            added = own.clone()
            dist.all_reduce(added)
            expect(torch.equal(target["sum"].full_tensor(), added), f"{unit}: sum at {step}")
            expect(torch.equal(target["w"].full_tensor(), plain), f"{unit}: w at {step}")


#: Sources of ranks that have several boxes of a tensor, or more of it than others, or none.
PARTS = {
    "strided": ((96, 40), "tp@stride2, -", "-, tp"),
    "fused": ((60, 32), "tp@blocks[32,16,12], -", "-, tp@sizes[5,27]"),
    "in turn": ((101, 12), "tp@cyclic4, -", "tp, -"),
    "in turn of others": ((50, 30), "-, tp@cyclic3", "-, tp@cyclic8"),
    "uneven": ((77, 10), "tp@sizes[40,0,30,7], -", "tp@sizes[1,76], -"),
    "of a remainder": ((5, 9), "tp, -", "-, tp@balanced"),
}


def part(value: torch.Tensor, layout: Any) -> torch.Tensor | None:
    """What this rank has of it, where one dimension is cut: boxes lie behind each other there."""
    rank = dist.get_rank()
    shape = layout.local_shape(rank) if rank < layout.slots else None
    if shape is None:
        return None
    pieces = [value[tuple(map(slice, box.start, box.stop))] for box in layout.boxes(rank)]
    cut_dims = [dim for dim, size in enumerate(shape) if size != value.shape[dim]]
    joined = torch.cat(pieces, cut_dims[0] if cut_dims else 0) if pieces else value.new_empty(shape)
    return joined.reshape(shape).clone()


def several_boxes_and_uneven_parts_are_compared() -> None:
    """Boxes that lie apart, parts of different sizes and ranks with none: as a whole run."""
    shapes = {name: shape for name, (shape, _, _) in PARTS.items()}
    meshes = [reshard.DeviceMesh.of(tp=4), reshard.DeviceMesh.of(tp=2)]
    layouts = {
        name: [
            reshard.spec(mesh, text).layout(shape) for mesh, text in zip(meshes, texts, strict=True)
        ]
        for name, (shape, *texts) in PARTS.items()
    }
    given = bits(10, torch.int16, shapes)
    source = {name: (part(given[name], layouts[name][0]), layouts[name][0]) for name in given}
    blank = {name: torch.zeros_like(value) for name, value in given.items()}
    targets = [
        {name: (part(blank[name], layouts[name][1]), layouts[name][1]) for name in given}
        for _ in range(2)
    ]
    for unit in UNITS:
        whole, delta = (
            Refit.prepare(source, target, changed_only=only)
            for target, only in zip(targets, (False, unit), strict=True)
        )
        for step in range(4):
            if step:
                (change, change_rows)[step % 2](given, 0.02 * step, step)
                for name, (local, layout) in source.items():
                    if local is not None:
                        local.copy_(part(given[name], layout))
            whole.run()
            delta.run()
            expect_equal(targets[1], targets[0], f"{unit}, step {step}")
            own = {name: (part(given[name], layouts[name][1]), None) for name in given}
            expect_equal(targets[1], own, f"{unit}, step {step}, as given")
            sent = torch.tensor([delta.sent_bytes, whole.sent_bytes])
            dist.all_reduce(sent)
            expect(not step or unit == "blocks" or sent[0] < sent[1] / 2, f"{unit}: {sent}")
        delta.verify()


#: Rows of partitions on each of four ranks: unaligned, some empty, and on rank 2 all of them.
SPLITS = ((3, 0, 7, 2, 5), (1, 4, 0, 6, 2), (0, 0, 0, 0, 0), (2, 9, 1, 0, 8))


def partitioned_tensors_are_compared() -> None:
    """Tokens or weights of experts whose sizes differ: as a whole run, whatever end has them."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (4,))
    rows = sum(map(sum, SPLITS))
    shapes = {"w": (rows, 6), "bias": (rows,)}
    sizes = tuple(map(sum, zip(*SPLITS, strict=True)))
    unaligned = PartitionedShard(0, len(sizes), SPLITS)
    aligned = PartitionedShard(0, len(sizes), sizes, aligned=True)
    placements = {"unaligned": unaligned, "aligned": aligned, "rows": Shard(0)}

    def to(given: Values, end: str) -> dict[str, Any]:
        dense = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in given.items()}
        if end == "rows":
            return dense
        return {
            name: PartitionedTensor.distribute(one, placements[end]) for name, one in dense.items()
        }

    def local(value: Any) -> torch.Tensor:
        return value.to_local() if isinstance(value, DTensor) else value.local

    every = list(permutations(placements, 2))
    for number, unit in enumerate(UNITS):
        for before, after in choose(every[5 * number :: 5][:1], every):
            given = bits(11, torch.int32, shapes)
            source = to(given, before)
            targets = [to({n: 0 * one for n, one in given.items()}, after) for _ in range(2)]
            whole, delta = (
                Refit.prepare(source, target, changed_only=only)
                for target, only in zip(targets, (False, unit), strict=True)
            )
            for step in range(4):
                what = f"{before} to {after}, {unit}, step {step}"
                if step:
                    (change, change_rows)[step % 2](given, 0.03 * step, step)
                    for name, one in to(given, before).items():
                        local(source[name]).copy_(local(one))
                whole.run()
                delta.run()
                for target in targets:
                    for name, one in to(given, after).items():
                        expect(torch.equal(local(target[name]), local(one)), f"{what}: {name}")
                sent = torch.tensor([delta.sent_bytes, whole.sent_bytes])
                dist.all_reduce(sent)
                # A whole run has no heads, of which there are some for each message.
                heads = 2 * 4 * 3 * HEAD_BYTES
                few = unit == "elements" and step
                limit = sent[1] // 2 if few else sent[1]
                expect(bool(sent[0] <= limit + heads), f"{what}: {sent}")
            delta.run()
            expect(delta.sent_bytes < 200, f"nothing changed, and {delta.sent_bytes} bytes went")
            delta.verify()
    own = PartitionedTensor.of_splits(torch.zeros(sum(SPLITS[rank]), 6), SPLITS[rank], mesh)
    refused(partial(Refit.prepare, {"w": own}, {"w": own}), ShardError, "gather_splits()")
    known = own.gather_splits()
    known.local.fill_(rank)
    target = to({"w": torch.ones(rows, 6)}, "rows")
    done = Refit.prepare({"w": known}, target, changed_only=True)
    for _ in range(2):
        done.run()
        right = known.to_replicated().to_local()
        expect(torch.equal(target["w"].full_tensor(), right), "what ranks told each other")


def ranks_that_share_memory_get_everything() -> None:
    """By True only ranks that share no memory are sent what changed: none, rank 3, all of them."""
    rank = dist.get_rank()
    for apart in choose(({3},), (set[int](), {3}, {0, 1, 2, 3})):
        os.environ["RESHARD_SHARED_MEMORY"] = "never" if rank in apart else ""
        group = dist.new_group()
        given = bits(12, torch.int16)
        source, target = cut(given, ROWS, {"tp": 4}), cut(given, COLUMNS, {"tp": 4})
        whole, delta, compared = (
            Refit.prepare(source, target, changed_only=only, group=group)
            for only in (False, True, "elements")
        )
        far = set(range(4)) - {rank} if rank in apart else apart
        for refit in (compared, whole, delta):
            refit.run()
        whole_bytes, compared_bytes = whole.sent_bytes, compared.kept_bytes
        # Alike for each of three others, of which so many are far.
        expect(3 * delta.kept_bytes == len(far) * compared_bytes, f"{apart}: {delta.kept_bytes}")
        for step in range(1, 4):
            change(given, 0.01, step)
            set_to(source, given)
            delta.run()
            expect_equal(target, cut(given, COLUMNS, {"tp": 4}), f"{apart}, step {step}")
            least, most = whole_bytes * (3 - len(far)) / 3, whole_bytes * (3.2 - len(far)) / 3
            expect(least <= delta.sent_bytes <= most, f"{apart}: {delta.sent_bytes}")
        delta.verify()
    del os.environ["RESHARD_SHARED_MEMORY"]


def contributions_are_sent_whole() -> None:
    """Sums whose last bits depend on their order are those of a whole run, and no less is sent."""
    mesh = reshard.DeviceMesh.of(dp=2, tp=2)
    shape, rank = (48, 20), dist.get_rank()
    cases = (
        ("-, - | sum(dp tp)", "dp tp, -"),
        ("tp@stride2, - | sum(dp)", "-, tp"),
        ("-, tp@sizes[13,7] | mean(dp)", "-, -"),
        ("dp, - | max(tp)", "-, dp tp"),
    )
    for number, (text, wanted) in enumerate(cases):
        before, after = (reshard.spec(mesh, one).layout(shape) for one in (text, wanted))
        generator = torch.Generator().manual_seed(rank)
        local = torch.randn(before.local_shape(rank), generator=generator) * 10.0 ** (3 * rank)
        source = {"sum": (local, before)}
        targets = [{"sum": (torch.zeros(after.local_shape(rank)), after)} for _ in range(2)]
        for unit in choose(UNITS[number % 2 :][:1], UNITS):
            whole, delta = (
                Refit.prepare(source, target, changed_only=only, method="exchange")
                for target, only in zip(targets, (False, unit), strict=True)
            )
            for step in range(3):
                local[step] += (rank == 3) * step
                whole.run()
                delta.run()
                expect_equal(targets[1], targets[0], f"{text} to {wanted}, {unit}, step {step}")
                sent_bytes = (delta.sent_bytes, whole.sent_bytes)
                expect(sent_bytes[0] == sent_bytes[1], f"{text}: {sent_bytes}")
            expect(delta.kept_bytes == 0, "nothing is remembered")


def invalid_options_of_changes_are_refused() -> None:
    """What it cannot be, and ranks that say different things."""
    given = bits(1)
    source, target = cut(given, ROWS, {"tp": 4}), cut(given, COLUMNS, {"tp": 2})
    prepare = partial(Refit.prepare, source, target)
    for wrong in ("all", 1, None):
        refused(partial(prepare, changed_only=wrong), RunError, "'elements' or 'blocks'")
    apart = dist.get_rank() == 1
    refused(partial(prepare, changed_only=apart), PlanError, "'changed_only'")


if __name__ == "__main__":
    run_cases(
        [
            bytes_follow_the_changed_elements,
            outputs_of_the_source_are_compared_and_others_sent_whole,
            written_targets_are_sent_whole_or_found_by_verify,
            the_run_after_a_failure_sends_everything,
            replicas_are_sent_from_one_copy_beside_programs,
            partial_sums_are_complete_in_each_run,
            several_boxes_and_uneven_parts_are_compared,
            partitioned_tensors_are_compared,
            ranks_that_share_memory_get_everything,
            contributions_are_sent_whole,
            invalid_options_of_changes_are_refused,
        ]
    )
