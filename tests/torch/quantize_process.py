"""One rank of a job of four: wide weights to float8 in blocks, against converted checkpoints.

What a target has to be is a checkpoint of the whole weights that one process converts with
`quantize="fp8-block128"`, cut by NumPy's rules; elements and scales are compared bit for bit.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import reshard
from rank_cases import run_cases
from refit_models import expect, part, refused
from reshard.checkpoint import convert
from reshard.errors import PlanError, RunError, ShardError
from reshard.recipes.naming import Fusion
from reshard.torch import Refit
from selection import choose

FORMAT, SUFFIX = "fp8-block128", "_scale_inv"
LAYER = "model.layers.0"
HIDDEN = 300
SHAPES = {
    f"{LAYER}.self_attn.q_proj.weight": (512, HIDDEN),
    f"{LAYER}.self_attn.k_proj.weight": (256, HIDDEN),
    f"{LAYER}.self_attn.v_proj.weight": (256, HIDDEN),
    f"{LAYER}.mlp.gate_proj.weight": (512, HIDDEN),
    f"{LAYER}.mlp.up_proj.weight": (512, HIDDEN),
    f"{LAYER}.mlp.down_proj.weight": (HIDDEN, 512),
    f"{LAYER}.input_layernorm.weight": (HIDDEN,),
    **{f"{LAYER}.mlp.experts.{number}.up_proj.weight": (256, HIDDEN) for number in range(4)},
}
NORM = f"{LAYER}.input_layernorm.weight"
EXPERTS = f"{LAYER}.mlp.experts.up_proj.weight"
QKV, GATE_UP = f"{LAYER}.self_attn.qkv_proj.weight", f"{LAYER}.mlp.gate_up_proj.weight"
FUSED = {
    "*.qkv_proj.weight": Fusion(tuple(f"*.{one}_proj.weight" for one in "qkv"), (2, 1, 1)),
    "*.gate_up_proj.weight": Fusion(("*.gate_proj.weight", "*.up_proj.weight")),
}
STACKS = {
    "*.experts.up_proj.weight": "*.experts.{}.up_proj.weight",
    f"*.experts.up_proj.weight{SUFFIX}": f"*.experts.{{}}.up_proj.weight{SUFFIX}",
}

Values = dict[str, torch.Tensor]


def weights(dtype: torch.dtype, seed: int = 0) -> Values:
    """Weights of a layer, of many magnitudes, with blocks of zeros and of one element."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in SHAPES.items():
        value = torch.randn(shape, generator=generator)
        value *= torch.exp(4 * torch.randn(shape, generator=generator))
        if value.ndim == 2:
            value[128:256, :128] = 0
            value[130, 5] = -3e-6
        found[name] = value.to(dtype)
    return found


def converted(given: Values) -> Values:
    """What a checkpoint of them has that is converted."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "wide").mkdir()
        save_file(given, f"{folder}/wide/model.safetensors")
        convert(f"{folder}/wide", f"{folder}/made", to="full", quantize=FORMAT)
        return load_file(f"{folder}/made/model.safetensors")


def join(given: Values) -> Values:
    """The same with what is fused and stacked in its place, of elements and scales alike."""
    found = dict(given)

    def take(names: list[str], as_one: str, join_all: Any) -> None:
        for suffix in ("", SUFFIX):
            if names[0] + suffix in found:
                parts = [found.pop(name + suffix) for name in names]
                bits = [one.view(torch.uint8) for one in parts]
                found[as_one + suffix] = join_all(bits).view(parts[0].dtype)

    take([f"{LAYER}.self_attn.{one}_proj.weight" for one in "qkv"], QKV, torch.cat)
    take([f"{LAYER}.mlp.{one}_proj.weight" for one in ("gate", "up")], GATE_UP, torch.cat)
    experts = [f"{LAYER}.mlp.experts.{number}.up_proj.weight" for number in range(4)]
    take(experts, EXPERTS, torch.stack)
    return found


def lay_out(given: Values, cut_of: Any, axes: dict[str, int], fill: bool = True) -> dict[str, Any]:
    """This rank's part of all, or zeros of its shape."""
    mesh = reshard.DeviceMesh.of(**axes)
    found = {}
    for name, value in given.items():
        layout = reshard.spec(mesh, cut_of(name, value)).layout(value.shape)
        # PyTorch indexes no float8.
        bits = value.view(torch.uint8).view(*value.shape, value.itemsize) if value.ndim else value
        local = None
        if dist.get_rank() < layout.slots and layout.local_shape(dist.get_rank()) is not None:
            planes = [part(bits[..., i], layout, dist.get_rank()) for i in range(value.itemsize)]
            local = torch.stack(planes, dim=-1).contiguous().view(value.dtype).squeeze(-1)  # type: ignore[arg-type]
            local = local if fill else torch.zeros_like(local)
        found[name] = (local, layout)
    return found


def set_to(model: dict[str, Any], given: Values, cut_of: Any) -> None:
    """The values of a model over four ranks are others."""
    for name, (local, _) in lay_out(given, cut_of, {"tp": 4}).items():
        if local is not None:
            model[name][0].copy_(local)


def expect_bits(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    expect(found.keys() == expected.keys(), f"{what}: {found.keys() ^ expected.keys()}")
    for name, (local, _) in expected.items():
        if local is not None:
            same = torch.equal(found[name][0].view(torch.uint8), local.view(torch.uint8))
            expect(same, f"{what}: {name} is another than in the converted checkpoint")


def by_rows(name: str, value: torch.Tensor) -> str:
    """A quarter of the rows each; of 512, a block each."""
    return "-" if value.ndim == 1 else "tp, -"


def by_columns(name: str, value: torch.Tensor) -> str:
    """A quarter of the columns each, 75 of 300."""
    return "-" if value.ndim == 1 else "-, tp"


def unevenly(name: str, value: torch.Tensor) -> str:
    """Rows that end inside blocks."""
    if value.ndim == 1:
        return "-"
    cuts = {512: "[1,130,381,0]", 256: "[0,77,79,100]", 300: "[299,0,0,1]"}[value.shape[0]]
    return f"tp@sizes{cuts}, -"


def at_blocks(name: str, value: torch.Tensor) -> str:
    """Two parts of whole blocks, by columns; in blocks where it is scales."""
    if value.ndim == 1:
        return "-"
    columns = {HIDDEN: "[256,44]", 3: "[2,1]", 512: "[128,384]", 4: "[1,3]"}[value.shape[-1]]
    return ", ".join(["-"] * (value.ndim - 1) + [f"tp@sizes{columns}"])


def every_sharding_of_the_source_gives_the_same_bits() -> None:
    """Cuts of the source of all kinds; the target in whole blocks, the same bits each time."""
    for dtype in choose((torch.bfloat16,), (torch.bfloat16, torch.float32)):
        given = weights(dtype)
        expected = converted(given)
        expect(expected[NORM].dtype == dtype and len(expected) == 2 * len(given) - 1, "converted")
        for source_cut in (by_rows, by_columns, unevenly):
            source = lay_out(given, source_cut, {"tp": 4})
            for axes in choose(({"dp": 2, "tp": 2},), ({"tp": 2}, {"dp": 2, "tp": 2})):
                target = lay_out(expected, at_blocks, axes, fill=False)
                done = Refit.prepare(source, target, quantize=FORMAT)
                done.run()
                wanted = lay_out(expected, at_blocks, axes)
                expect_bits(target, wanted, f"{dtype} {source_cut.__name__} {axes}")


def side_by_side(name: str, value: torch.Tensor) -> str:
    """As engines with tensor parallelism have it: of each fused part a half; experts apart."""
    if name.startswith((QKV, GATE_UP)):
        shares = (2, 1, 1) if name.startswith(QKV) else (1, 1)
        sizes = [value.shape[0] * share // sum(shares) for share in shares]
        return f"tp@blocks[{','.join(map(str, sizes))}], -"
    if name.startswith(EXPERTS):
        return "tp, -, -"
    return "-" if value.ndim == 1 else "-, -"


def fused_and_stacked_targets_are_quantized() -> None:
    """Targets of an engine: q, k, v in one, gate and up in one, experts stacked."""
    given = weights(torch.bfloat16, 3)
    expected = join(converted(given))
    wanted = lay_out(expected, side_by_side, {"tp": 2})
    for source_cut in choose((unevenly,), (by_rows, by_columns, unevenly)):
        source = lay_out(given, source_cut, {"tp": 4})
        target = lay_out(expected, side_by_side, {"tp": 2}, fill=False)
        done = Refit.prepare(source, target, quantize=FORMAT, target_names=FUSED, stacks=STACKS)
        done.run()
        expect_bits(target, wanted, f"fused, {source_cut.__name__}")
    # The other way round: what the source has stacked and fused.
    source = lay_out(join(given), side_by_side, {"tp": 2})
    apart = converted(given)
    target = lay_out(apart, at_blocks, {"tp": 2}, fill=False)
    done = Refit.prepare(source, target, quantize=FORMAT, source_names=FUSED, stacks=STACKS)
    done.run()
    expect_bits(target, lay_out(apart, at_blocks, {"tp": 2}), "fused source")


def a_changed_block_is_sent_with_its_scale_alone() -> None:
    """A block that changes is sent with its scale, and no other; the rest is what it was."""
    given = weights(torch.bfloat16, 5)
    del given[NORM]
    for unit in choose(("elements",), ("elements", "blocks")):
        # Each rank has whole blocks of four rows of blocks; scales of others go to all.
        four = {n: v.clone() for n, v in given.items() if v.shape == (512, HIDDEN)}
        source = lay_out(four, by_rows, {"tp": 4})
        expected = converted(four)
        target = lay_out(expected, at_blocks, {"tp": 2}, fill=False)
        done = Refit.prepare(source, target, quantize=FORMAT, changed_only=unit)
        done.run()
        first = done.sent_bytes
        expect(set(done.report.made_at_source) == four.keys(), f"{done.report}")
        done.run()
        nothing = done.sent_bytes
        # One element that is its block's greatest: of rank 3, to rank 1, who has the last columns.
        four[f"{LAYER}.mlp.up_proj.weight"][400, 299] = 1e6
        set_to(source, four, by_rows)
        done.run()
        expect_bits(target, lay_out(converted(four), at_blocks, {"tp": 2}), f"changed, {unit}")
        more = done.sent_bytes - nothing
        if dist.get_rank() < 3:
            expect(more == 0, f"{more} bytes of rank {dist.get_rank()}")
        else:
            # 128 by 44 elements of a byte, and the scale.
            most = 128 * 44 * 1.2 + 64 if unit == "elements" else 4 * 4096
            expect(0 < more < min(most, first), f"{unit}: {more} bytes of {first}")
    # Made of what has arrived: that travels whole, and is as right.
    source = lay_out(given, unevenly, {"tp": 4})
    target = lay_out(converted(given), at_blocks, {"tp": 2}, fill=False)
    done = Refit.prepare(source, target, quantize=FORMAT, changed_only=True)
    for step in range(3):
        done.run()
        wanted = lay_out(converted(given), at_blocks, {"tp": 2})
        expect_bits(target, wanted, f"at the target, step {step}")
        for value in given.values():
            value[step : 200 + step, 7] += 1
        set_to(source, given, unevenly)


def quantized_sources_move_unchanged() -> None:
    """What the source has in float8 with scales moves as it is, beside what it has not."""
    given = weights(torch.bfloat16, 6)
    expected = converted(given)
    up = f"{LAYER}.mlp.up_proj.weight"
    mixed = {**given, up: expected[up], up + SUFFIX: expected[up + SUFFIX]}
    source = lay_out(mixed, lambda _, value: "-" if value.ndim == 1 else "-, -", {"dp": 1})
    target = lay_out(expected, at_blocks, {"dp": 2, "tp": 2}, fill=False)
    Refit.prepare(source, target, quantize=FORMAT).run()
    expect_bits(target, lay_out(expected, at_blocks, {"dp": 2, "tp": 2}), "quantised already")


def tensors_that_cannot_be_quantized_are_refused_by_name() -> None:
    """What cannot be is told by its names, on all ranks, before anything is written."""
    name = f"{LAYER}.mlp.up_proj.weight"
    scales = name + SUFFIX
    given = {name: weights(torch.bfloat16)[name]}
    expected = converted(given)
    source = lay_out(given, by_columns, {"tp": 4})

    def told(target: Values, cut_of: Any, text: str, error: Any = ShardError, **said: Any) -> None:
        made = lay_out(target, cut_of, {"tp": 2}, fill=False)
        prepare = partial(Refit.prepare, source, made, **({"quantize": FORMAT} | said))
        refused(prepare, error, text)

    def inside(name: str, value: torch.Tensor) -> str:
        return "-, tp@sizes[200,100]" if name in given else "-, tp@sizes[2,1]"

    def scales_whole(name: str, value: torch.Tensor) -> str:
        return at_blocks(name, value) if name in given else "-, -"

    told(expected, inside, "has 0:200 of dimension 1, which cuts a block of 128", RunError)
    told(expected, scales_whole, "expected floating point [4, 2]", RunError)
    wrong = {**expected, scales: expected[scales].to(torch.int32)}
    told(wrong, at_blocks, "scales torch.int32", RunError)
    odd = {name: expected[name], scales: torch.zeros(4, 4)}
    told(odd, at_blocks, "expected floating point [4, 2]", RunError)
    alone = {name: expected[name]}
    for cast in (False, True):
        text = f"it needs scales {scales!r}, which the target has not"
        told(alone, at_blocks, text, cast=cast)
    wide = {name: given[name], scales: expected[scales]}
    told(wide, at_blocks, f"{scales}: not in the source")
    unknown = "quantize='fp9'; it is one of 'fp8-block128'"
    told(expected, at_blocks, unknown, RunError, quantize="fp9")
    apart = FORMAT if dist.get_rank() else None
    told(expected, at_blocks, "'quantize'", PlanError, quantize=apart)


if __name__ == "__main__":
    run_cases(
        [
            every_sharding_of_the_source_gives_the_same_bits,
            fused_and_stacked_targets_are_quantized,
            a_changed_block_is_sent_with_its_scale_alone,
            quantized_sources_move_unchanged,
            tensors_that_cannot_be_quantized_are_refused_by_name,
        ]
    )
