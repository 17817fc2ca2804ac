"""A traced layout beside what a real rank holds, element by element."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.vllm.real_ranks import COMPUTED, CONSTANT, UNFILLED
from reshard.recipes.engine_layouts import EngineLayout, ParameterLayout


def origins(parameter: ParameterLayout, bases: dict[str, int]) -> NDArray[np.int64]:
    """The place of every element of a parameter among all elements of the sources, or a mark."""
    found = np.full(parameter.shape, UNFILLED, dtype=np.int64)
    for piece in parameter.pieces:
        found[_index(piece.box)] = bases[piece.source] + piece.view.positions(piece.box.shape)
    for one in parameter.computed:
        found[_index(one.box)] = COMPUTED
    for constant in parameter.constants:
        found[_index(constant.box)] = CONSTANT
    return found


def _index(box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def differences(
    layout: EngineLayout, names: dict[str, tuple[str, list[int]]], held: Path
) -> list[str]:
    """What the real ranks of a folder hold otherwise than a layout says, in words."""
    sizes = [math.prod(shape) for _, shape in names.values()]
    bases = dict(zip(names, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
    found = []
    for rank in layout.ranks:
        path = held / f"rank-{rank.rank}.npz"
        if not path.exists():
            failed = held / f"rank-{rank.rank}.failed"
            text = failed.read_text().strip().splitlines()[-1] if failed.exists() else "not there"
            found.append(f"rank {rank.rank}: {text}")
            continue
        with np.load(path) as real:
            traced = set(rank.parameters)
            found += [f"rank {rank.rank}: {name} only real" for name in set(real) - traced]
            found += [f"rank {rank.rank}: {name} only traced" for name in traced - set(real)]
            for name in traced & set(real):
                of_real, of_trace = real[name], origins(rank.parameters[name], bases)
                if of_real.shape != of_trace.shape:
                    found.append(f"rank {rank.rank}: {name} {of_real.shape} {of_trace.shape}")
                elif not np.array_equal(of_real, of_trace):
                    at = tuple(int(i) for i in np.argwhere(of_real != of_trace)[0])
                    found.append(
                        f"rank {rank.rank}: {name} {list(of_real.shape)} differs in "
                        f"{(of_real != of_trace).sum()} elements, first at {at}: real "
                        f"{of_real[at]}, traced {of_trace[at]}"
                    )
    return found
