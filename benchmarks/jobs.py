"""Whole models as jobs, for benchmarks/plan.py: layouts of shapes only.

dense    a 70B-like model: 80 layers of 7 tensors (two norms, q, k and v together, o, gate and
         up with stride 2, down), embedding, head and last norm, from tp=8,pp=4,dp=N/32 to
         tp=4,dp=N/8, on half as many ranks
experts  256 experts of 2 tensors in 60 layers, from pp=4,ep=8,dp=8 to ep=32,dp=8: every
         expert a tensor of its own, or stacked with the experts as first dimension
flat     200 tensors of such layers in one flat buffer of FSDP, from 1,024 ranks to 768
"""

from __future__ import annotations

import reshard
from reshard.dtypes import dtype
from reshard.layout import Layout
from reshard.notation import FlatBuffer
from reshard.plans.job import JobItem

BFLOAT16 = dtype("bfloat16")
LAYERS, STAGES, HIDDEN, INNER, VOCABULARY = 80, 4, 8192, 28672, 32000
TENSORS = {
    "input_norm": ((HIDDEN,), "-"),
    "q": ((HIDDEN, HIDDEN), "tp, -"),
    "kv": ((2048, HIDDEN), "tp, -"),
    "o": ((HIDDEN, HIDDEN), "-, tp"),
    "norm": ((HIDDEN,), "-"),
    "gate_up": ((2 * INNER, HIDDEN), "tp@stride2, -"),
    "down": ((HIDDEN, INNER), "-, tp"),
}
Description = tuple[tuple[int, ...], str, int]


def dense_tensors() -> dict[str, Description]:
    """The shape, the cut and the pipeline stage of every tensor."""
    found: dict[str, Description] = {"embedding": ((VOCABULARY, HIDDEN), "tp, -", 0)}
    for layer in range(LAYERS):
        for name, (shape, cut) in TENSORS.items():
            found[f"{layer}.{name}"] = shape, cut, layer * STAGES // LAYERS
    last = STAGES - 1
    return found | {
        "last_norm": ((HIDDEN,), "-", last),
        "head": ((VOCABULARY, HIDDEN), "tp, -", last),
    }


def dense(ranks: int) -> list[JobItem]:
    """From `ranks` ranks to half of them."""
    before = reshard.DeviceMesh.of(pp=STAGES, dp=ranks // (8 * STAGES), tp=8)
    after = reshard.DeviceMesh.of(dp=ranks // 8, tp=4)
    known: dict[object, Layout] = {}

    def layout(mesh: reshard.DeviceMesh, text: str, shape: tuple[int, ...]) -> Layout:
        key = (mesh, text, shape)
        if key not in known:
            known[key] = reshard.spec(mesh, text).layout(shape)
        return known[key]

    return [
        JobItem.between_ranks(
            name,
            BFLOAT16,
            layout(before, f"{cut} | only(pp={stage})", shape),
            layout(after, cut, shape),
        )
        for name, (shape, cut, stage) in dense_tensors().items()
    ]


EXPERTS, EXPERT_LAYERS = 256, 60
EXPERT_SHAPES = {"fc1": (4096, 7168), "fc2": (7168, 2048)}


def experts() -> list[JobItem]:
    """Every expert by itself."""
    known: dict[object, tuple[Layout, Layout]] = {}
    items = []
    for layer in range(EXPERT_LAYERS):
        stage = layer * STAGES // EXPERT_LAYERS
        for expert in range(EXPERTS):
            for name, shape in EXPERT_SHAPES.items():
                key = (stage, expert // 8, name)
                if key not in known:
                    holders = [64 * stage + 8 * dp + expert // 32 for dp in range(8)]
                    wanters = [32 * dp + expert // 8 for dp in range(8)]
                    known[key] = tuple(Layout.whole(shape, on, 256) for on in (holders, wanters))
                name = f"{layer}.{expert}.{name}"
                items.append(JobItem.between_ranks(name, BFLOAT16, *known[key]))
    return items


def stacked_experts() -> list[JobItem]:
    """The experts of a layer as one tensor."""
    before = reshard.DeviceMesh.of(pp=STAGES, dp=8, ep=8)
    after = reshard.DeviceMesh.of(dp=8, ep=32)
    items = []
    for layer in range(EXPERT_LAYERS):
        stage = layer * STAGES // EXPERT_LAYERS
        for name, shape in EXPERT_SHAPES.items():
            whole = (EXPERTS, *shape)
            source = reshard.spec(before, f"ep, -, - | only(pp={stage})").layout(whole)
            target = reshard.spec(after, "ep, -, -").layout(whole)
            items.append(JobItem.between_ranks(f"{layer}.{name}", BFLOAT16, source, target))
    return items


def flat_buffer() -> list[JobItem]:
    """Tensors one behind another, cut evenly wherever that is."""
    shapes = {
        f"{number}.{name}": shape
        for number in range(200 // len(TENSORS) + 1)
        for name, (shape, _) in TENSORS.items()
    }
    shapes = dict(list(shapes.items())[:200])
    source, target = (FlatBuffer(shapes, ranks).layouts() for ranks in (1024, 768))
    return [JobItem.between_ranks(name, BFLOAT16, source[name], target[name]) for name in shapes]
