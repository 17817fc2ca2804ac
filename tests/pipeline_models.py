"""A small network in stages, on one mesh each, and the same by one function on one device."""

from __future__ import annotations

from typing import Any

import numpy as np

import reshard
import reshard.spmd as sp

WIDTH, HIDDEN, BATCH, WORDS = 6, 8, 4, 11


def first(p: Any, tokens: Any) -> Any:
    return layer(p, sp.embedding(tokens, p["letters"]))


def layer(p: Any, x: Any) -> Any:
    n = sp.rms_norm(x, p["norm"])
    return x + sp.silu(n @ p["up"]) @ p["down"]


def last(p: Any, x: Any, targets: Any) -> Any:
    return sp.mean(sp.cross_entropy(layer(p, x) @ p["unembed"], targets))


def make_stages(n_stages: int) -> list[Any]:
    return [first, *[layer] * (n_stages - 2), last]


def make_arrays(n_stages: int, n_microbatches: int) -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(1)
    own = {"norm": (WIDTH,), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    parameters = [
        {name: rng.standard_normal(shape) for name, shape in own.items()} for _ in range(n_stages)
    ]
    parameters[0]["letters"] = rng.standard_normal((WORDS, WIDTH))
    parameters[-1]["unembed"] = rng.standard_normal((WIDTH, WORDS))
    batch = [tuple(rng.integers(0, WORDS, (2, BATCH, 3))) for _ in range(n_microbatches)]
    return parameters, batch


CUTS = {"up": "-, tp", "down": "tp, -", "norm": "-", "letters": "tp, -", "unembed": "-, tp"}


def place(
    parameters: list[Any],
    batch: list[Any],
    schedule: sp.PipelineSchedule,
    meshes: list[reshard.DeviceMesh],
    rank: int | None = None,
) -> tuple[list[Any], list[Any], list[reshard.ShardingSpec]]:
    """The arrays on their stages' meshes, and the sharding of what each stage takes.

    `meshes` are those of the schedule's ranks. For one rank, arrays on meshes that it is not in
    are None.
    """
    own = [meshes[schedule.rank_of[stage]] for stage in range(len(parameters))]

    def put(value: Any, mesh: reshard.DeviceMesh, cut: str) -> Any:
        is_here = rank is None or rank in mesh.devices
        return sp.array(value, reshard.spec(mesh, cut)) if is_here else None

    placed = [
        {name: put(value, mesh, CUTS[name]) for name, value in one.items()}
        for mesh, one in zip(own, parameters, strict=True)
    ]
    rows = [reshard.spec(mesh, "dp, -, -") for mesh in own]
    both = [(put(x, own[0], "dp, -"), put(y, own[-1], "dp, -")) for x, y in batch]
    return placed, both, rows


def whole(parameters: list[Any], batch: list[Any]) -> tuple[float, list[Any]]:
    """The same by one function of all stages, on one device."""
    given = [{name: sp.array(value) for name, value in one.items()} for one in parameters]

    def loss(given: Any) -> Any:
        total: Any = 0.0
        for tokens, targets in batch:
            x = sp.array(tokens)
            for stage, own in zip(make_stages(len(given))[:-1], given[:-1], strict=True):
                x = stage(own, x)
            total = total + last(given[-1], x, sp.array(targets))
        return total / len(batch)

    value, slopes = sp.value_and_grad(loss)(given)
    return float(value), slopes
