"""One rank of a job of four on two hosts, as its topology says: tensors and models in stages.

Each result is compared, bit for bit, with the whole values; bytes with those that are planned.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import reshard
from rank_cases import run_cases
from refit_models import expect, expect_same, refused, whole
from refit_models import part as part_of
from reshard.errors import LayoutError, PlanError
from reshard.layout import Layout
from reshard.plans.hierarchical import StagedJob
from reshard.plans.job import Job, JobItem
from reshard.topology import Link, Overhead, Topology
from reshard.torch import BlockQuantized, Refit, redistribute
from selection import choose

# Ranks 0 and 1 are the trainer's host, 2 and 3 the engine's.
HOSTS = Topology([0, 0, 1, 1])
SLOW = Topology(
    [0, 0, 1, 1], None, Link(1e9), Link(1e8), overhead=Overhead(shared_network=Link(1e8))
)
FAR_WITHIN = Topology([0, 0, 1, 1], None, Link(1e6), Link(1e9))
TRAINER = reshard.DeviceMesh.of(fsdp=2)
ENGINE = reshard.DeviceMesh.of(tp=2, devices=[2, 3])
EVERYONE = reshard.DeviceMesh.of(x=4)
EXTRA_BYTES = 1 << 20
# Shapes with the cut at the source, and at the target. What is large goes through in many parts.
MODEL = {
    "large": ((2048, 1024), "fsdp, -", "-, -"),
    "cut": ((640, 512), "fsdp, -", "-, tp"),
    "column": ((300001,), "fsdp", "-"),
    "small": ((3, 5), "-, fsdp", "-, -"),
    "turned": ((512, 1024), "-, fsdp", "-, -"),
    "number": ((), "", ""),
    "empty": ((0, 4), "-, -", "-, -"),
}


def part(value: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor | None:
    """What a rank holds of a whole tensor, or of a number."""
    if not value.ndim:
        return value.clone() if rank in layout.local_shapes else None
    return part_of(value, layout, rank)


def layouts(side: int) -> dict[str, Any]:
    mesh = (TRAINER, ENGINE)[side]
    return {
        name: reshard.spec(mesh, cuts[side]).layout(shape) for name, (shape, *cuts) in MODEL.items()
    }


def models(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    """The source and an empty target on this rank, and what the target should be."""
    values = {n: whole(seed + i, *MODEL[n][0]) for i, n in enumerate(MODEL)}
    rank = dist.get_rank()
    source, target = (
        {n: (part(values[n], layout, rank), layout) for n, layout in layouts(side).items()}
        for side in (0, 1)
    )
    filled = {
        n: (own if own is None else own.to(dtype), layout) for n, (own, layout) in target.items()
    }
    empty = {
        n: (own if own is None else torch.zeros_like(own), layout)
        for n, (own, layout) in filled.items()
    }
    return source, empty, filled


def staged_job() -> StagedJob:
    items = [
        JobItem.between_ranks(n, reshard.dtypes.dtype("float32"), before, after)
        for (n, before), after in zip(layouts(0).items(), layouts(1).values(), strict=True)
    ]
    return StagedJob(Job(items), HOSTS)


def refits_in_stages_move_what_was_planned() -> None:
    """Every element arrives, in each run; what travels is what is planned."""
    staged, rank = staged_job(), dist.get_rank()
    every = ({}, {"buckets": 1 << 20}, {"planning": "centralized"})
    for options in choose(every[1:], every):
        source, target, filled = models(0)
        refit = Refit.prepare(
            source, target, method="stages", topology=HOSTS, extra_bytes=EXTRA_BYTES, **options
        )
        expect_same(target, models(0)[1], "before the run")
        refit.run()
        expect_same(target, filled, f"staged, {options}")
        expect(refit.sent_bytes == staged.sent_bytes[rank], f"sent {refit.sent_bytes}")
        expect(refit.received_bytes == staged.received_bytes[rank], "received bytes")
        expect(refit.extra_bytes <= EXTRA_BYTES, f"took {refit.extra_bytes}")
        expect(set(refit.report.staged.values()) <= {"asked for"}, "the report's reasons")
        across = [m for m in refit.plan if (m.sender < 2) != (m.receiver < 2)]
        if not options.get("planning"):
            total = sum(move.size_bytes for move in across)
            expect(total == staged.across_hosts_bytes, f"{total} bytes cross")
            expect(total == staged.across_hosts_bound_bytes, "the fewest that must")
        # Again, with other values.
        for name, (own, _) in models(50)[0].items():
            if own is not None:
                source[name][0].copy_(own)
        refit.run()
        expect_same(target, models(50)[2], "the second run")
        expect(not refit.verify().differences, "verified")
    # An element that is not what was handed on is found.
    if rank == 3:
        target["large"][0][5, 5] += 1
    refused(refit.verify, Exception, "large")


def casts_and_quantized_tensors_move_in_stages() -> None:
    """What is cast or quantised travels in stages too."""
    for dtype in (torch.bfloat16, torch.float64):
        source, target, filled = models(7, dtype)
        Refit.prepare(source, target, method="stages", topology=HOSTS, cast=True).run()
        expect_same(target, filled, f"cast to {dtype}")
    rank = dist.get_rank()
    values = whole(3, 256, 256)
    before = reshard.spec(TRAINER, "-, fsdp").layout((256, 256))
    after = reshard.spec(ENGINE, "-, -").layout((256, 256))
    scales = reshard.spec(ENGINE, "-, -").layout((2, 2))
    found = []
    for method in ("exchange", "stages"):
        target = {}
        if rank > 1:
            target["w.weight"] = (torch.zeros(256, 256, dtype=torch.float8_e4m3fn), after)
            target["w.weight_scale_inv"] = (torch.zeros(2, 2), scales)
        else:
            target = {
                "w.weight": (None, after),
                "w.weight_scale_inv": (None, scales),
            }
        Refit.prepare(
            {"w.weight": (part(values, before, rank), before)},
            target,
            transforms={"w.weight": BlockQuantized()},
            method=method,
            topology=HOSTS,
        ).run()
        found.append(target)
    expect_same(found[1], found[0], "quantised")


def redistributions_move_in_stages() -> None:
    """One tensor, in this thread and in the background, into new and given memory."""
    rank = dist.get_rank()
    for name, (shape, cut, wanted) in MODEL.items():
        before, after = (side[name] for side in (layouts(0), layouts(1)))
        values = whole(11, *shape)
        expected = part(values, after, rank)
        options: dict[str, Any] = {"source": before, "dtype": torch.float32, "method": "stages"}
        own = part(values, before, rank)
        out = redistribute(own, after, topology=HOSTS, extra_bytes=1 << 18, **options)
        expect_same({name: out}, {name: expected}, f"{cut} to {wanted}")
        into = None if expected is None else torch.zeros_like(expected)
        begun = redistribute(own, after, topology=HOSTS, out=into, async_op=True, **options)
        begun.wait()
        expect_same({name: into}, {name: expected}, "in the background")
    # Every rank gets all: each host half of it from the other.
    shape = (1024, 1024)
    rows, all_of = (reshard.spec(EVERYONE, cut).layout(shape) for cut in ("x, -", "-, -"))
    values = whole(2, *shape)
    options = {"source": rows, "dtype": torch.float32, "topology": HOSTS, "method": "stages"}
    begun = redistribute(part(values, rows, rank), all_of, async_op=True, **options)
    expect(torch.equal(begun.wait(), values), "gathered")
    job = Job([JobItem.between_ranks("w", reshard.dtypes.dtype("float32"), rows, all_of)])
    staged = StagedJob(job, HOSTS)
    expect(begun.sent_bytes == staged.sent_bytes[rank], f"sent {begun.sent_bytes}")
    # Contributions are combined where they arrive, and are exchanged.
    partial = reshard.spec(EVERYONE, "-, - | sum(x)").layout(shape)
    summed = redistribute(values, all_of, **{**options, "source": partial})
    expect(torch.equal(summed, 4 * values), "summed")


def set_source(source: Any, seed: int, share: float = 1.0) -> None:
    """Give what this rank has of the source new values, or so much of each tensor."""
    for name, (own, _) in models(seed)[0].items():
        if own is not None and own.ndim:
            rows = int(own.shape[0] * share)
            source[name][0][:rows] = own[:rows]
        elif own is not None and share:
            source[name][0].copy_(own)


def compared_tensors_move_in_stages_when_sent_whole() -> None:
    """What is compared goes in stages where all of it travels, and each rank its changes else."""
    staged, rank = staged_job(), dist.get_rank()
    whole_bytes = staged.sent_bytes[rank]
    for unit in choose(("blocks",), ("elements", "blocks")):
        source, target, filled = models(1)
        options: dict[str, Any] = {"topology": SLOW, "extra_bytes": EXTRA_BYTES}
        refit = Refit.prepare(source, target, changed_only=unit, **options)
        told = refit.report.staged
        expect(bool(told), "nothing is staged")
        expect(all(why.startswith("where all of it travels: ") for why in told.values()), f"{told}")
        expect(refit.sent_bytes == whole_bytes, f"{refit.sent_bytes} before the first run")
        refit.run()
        expect_same(target, filled, f"the first run, {unit}")
        expect(refit.sent_bytes == whole_bytes, f"{refit.sent_bytes} sent first, {whole_bytes} all")
        # What went in stages is remembered.
        refit.run()
        expect(refit.sent_bytes < 5000, f"{refit.sent_bytes} bytes of no change")
        expect_same(target, filled, f"the second run, {unit}")
        # All ranks that send see that most has changed, at the next run one of two.
        set_source(source, 70)
        refit.run()
        expect(refit.sent_bytes == whole_bytes, f"{refit.sent_bytes} sent where all has changed")
        expect_same(target, models(70)[2], f"all has changed, {unit}")
        if rank == 0:
            set_source(source, 80)
        refit.run()
        least, most = (0, 5000) if rank else (whole_bytes + 1, 1 << 60)
        expect(least <= refit.sent_bytes <= most, f"{refit.sent_bytes} sent, {whole_bytes} all")
        expect(not refit.verify().differences, f"one rank's has changed, {unit}")
        set_source(source, 90, share=0.1)
        refit.run()
        expect(not refit.verify().differences, f"a tenth has changed, {unit}")
        expect(refit.extra_bytes <= EXTRA_BYTES, f"took {refit.extra_bytes}")
        # What somebody wrote into the target is filled again, in stages.
        if rank == 3:
            target["large"][0][0] = 0
        refit.run()
        expect(refit.sent_bytes == whole_bytes, f"{refit.sent_bytes} sent where a target is new")
        expect(not refit.verify().differences, f"a target is new, {unit}")


def stages_are_chosen_where_links_between_hosts_are_slower() -> None:
    """The model chooses: stages where links between hosts are the slower ones."""
    for topology, is_staged in ((SLOW, True), (FAR_WITHIN, False), (None, False)):
        source, target, filled = models(1)
        refit = Refit.prepare(source, target, topology=topology)
        expect(bool(refit.report.staged) == is_staged, f"{topology}: {refit.report.staged}")
        refit.run()
        expect_same(target, filled, "chosen")
    rank = dist.get_rank()
    before, after = layouts(0)["large"], layouts(1)["large"]
    own = part(whole(1, 2048, 1024), before, rank)
    options: dict[str, Any] = {"source": before, "dtype": torch.float32, "async_op": True}
    sent = []
    for topology in (SLOW, FAR_WITHIN):
        begun = redistribute(own, after, topology=topology, **options)
        begun.wait()
        sent.append(begun.sent_bytes)
    # Directly the trainer sends both copies.
    expect(sent[0] < sent[1] if rank < 2 else sent[0] > sent[1], f"sent {sent}")
    # Ranks of one name share a host, and nothing crosses.
    redistribute(own, after, method="stages", **{**options, "async_op": False})
    source, target, _ = models(1)
    refused(lambda: Refit.prepare(source, target, method="stage"), Exception, "'stages'")
    refused(
        lambda: Refit.prepare(source, target, topology=HOSTS),
        LayoutError,
        "has no between_hosts link",
    )
    refused(
        lambda: redistribute(own, after, method="stages", topology="hosts", **options),
        Exception,
        "topology is a str",
    )
    few = Topology([0, 1])
    refused(
        lambda: Refit.prepare(source, target, method="stages", topology=few), LayoutError, "rank"
    )
    different = Topology([0, 0, 1, 1]) if rank else Topology([0, 1, 0, 1])
    refused(
        lambda: Refit.prepare(source, target, method="stages", topology=different),
        PlanError,
        "topology",
    )
    refused(
        lambda: redistribute(own, after, method="stages", topology=different, **options),
        PlanError,
        "method",
    )


if __name__ == "__main__":
    run_cases(
        [
            refits_in_stages_move_what_was_planned,
            casts_and_quantized_tensors_move_in_stages,
            redistributions_move_in_stages,
            compared_tensors_move_in_stages_when_sent_whole,
            stages_are_chosen_where_links_between_hosts_are_slower,
        ]
    )
