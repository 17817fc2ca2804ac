"""Random StableHLO functions with random shardings, for Shardy and for us.

`random_program(random)` writes one; its text is MLIR.
"""

from __future__ import annotations

import math
from random import Random

from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import DimSpec, ShardingSpec
from shardy_operations import OFTEN, OTHERS, Maker
from shardy_rarer_operations import RARER
from shardy_writer import Program, Writer

MAKERS = [*OFTEN, *OFTEN, *OTHERS, *RARER]


def random_mesh(random: Random) -> DeviceMesh:
    """1 to 4 axes, at most 64 devices."""
    while True:
        sizes = [random.choice([2, 2, 3, 4, 4, 6, 8]) for _ in range(random.randint(1, 4))]
        if math.prod(sizes) <= 96:
            return DeviceMesh("mesh", sizes, ["a", "b", "c", "d"][: len(sizes)])


def random_spec(random: Random, mesh: DeviceMesh, ndim: int, *, partial: float) -> ShardingSpec:
    """Axes and parts of axes dealt to dimensions, some replicated, some partial."""
    parts: list[Axis] = []
    for name, size in zip(mesh.axis_names, mesh.shape, strict=True):
        divisors = [d for d in range(2, size) if size % d == 0]
        if divisors and random.random() < 0.35:
            cut = random.choice(divisors)
            parts += [Axis(name, 1, cut), Axis(name, cut, size // cut)]
        else:
            parts.append(Axis(name))
    random.shuffle(parts)
    dims: list[list[Axis]] = [[] for _ in range(ndim)]
    replicated: list[Axis] = []
    unreduced: list[Axis] = []
    for part in parts:
        draw = random.random()
        if draw < 0.55 and ndim:
            random.choice(dims).append(part)
        elif draw < 0.62:
            replicated.append(part)
        elif draw < 0.62 + partial:
            unreduced.append(part)
    unreduced.sort()
    specs = []
    for axes in dims:
        is_open = random.random() < 0.5
        has_priority = (axes or is_open) and random.random() < 0.25
        specs.append(DimSpec(axes, is_open, random.choice([1, 1, 2, 5]) if has_priority else 0))
    return ShardingSpec(mesh, specs, replicated, unreduced)


def random_program(random: Random, *, makers: list[Maker] | None = None) -> Program:
    """A function of 1 to 12 operations, and shardings of some of its values."""
    mesh = random_mesh(random)
    sizes = random.choice([[2, 4, 8], [4, 8, 16], [2, 3, 4, 6, 8], [3, 5, 7, 8], [1, 2, 6, 12]])
    w = Writer(random, sizes)
    w.argument(tuple(random.choice(sizes) for _ in range(random.randint(1, 3))))
    for _ in range(random.choice([1, 2, 3, 4, 5, 6, 8, 10, 12])):
        if len(w.statements) < 12:
            random.choice(makers or MAKERS)(w)
    used = {number for one in w.statements for number in one.operands}
    made = [number for one in w.statements for number in one.numbers]
    outputs = [number for number in made if number not in used or random.random() < 0.1]
    program = Program(mesh, w.values, sorted(w.inputs), w.statements, outputs)
    partial = random.choice([0.0] * 7 + [0.1])
    how_many = random.choice([0.3, 0.6, 0.9])
    for number, (shape, _) in enumerate(w.values):
        share = how_many if number in w.inputs else how_many / 3
        if random.random() < share:
            program.annotations[number] = random_spec(random, mesh, len(shape), partial=partial)
    for one in w.statements:
        if one.name == "sharding_constraint":
            shape = w.shape(one.numbers[0])
            program.annotations[one.numbers[0]] = random_spec(
                random, mesh, len(shape), partial=partial
            )
    for place, number in enumerate(outputs):
        if random.random() < how_many / 3:
            program.asked[place] = random_spec(random, mesh, len(w.shape(number)), partial=partial)
    return program
