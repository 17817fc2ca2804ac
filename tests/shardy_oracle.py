"""What Shardy says of a program, and what we say, side by side.

Shardy runs in processes of its own (`shardy_worker`). A program at which one dies is counted as
crashed and left out; the others go to a new process.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from reshard.errors import SpecError
from reshard.mesh import Axis, DeviceMesh
from reshard.notation.shardy import parse_shardy
from reshard.sharding import DimSpec, ShardingSpec
from reshard.spmd.graph import Graph, Operation, Value
from reshard.spmd.propagation.axes import AxisTable, collected
from reshard.spmd.propagation.propagation import PropagatedGraph
from reshard.spmd.propagation.reshards import PlacedGraph, explicit_reshards
from reshard.spmd.propagation.strategies import propagate_graph
from reshard.spmd.rules.rule_builder import replicated_rule
from reshard.spmd.rules.sharding_rule import OpShardingRule
from shardy_programs import random_program
from shardy_writer import Program

POPULATE = "func.func(sdy-populate-op-sharding-rules)"
PASSES = {
    "basic": "sdy-basic-propagate",
    "aggressive": "sdy-aggressive-propagate",
    "op-priority": "sdy-op-priority-propagate",
    "user-priority, basic": "sdy-user-priority-propagate{propagation-strategy=basic}",
    "user-priority": "sdy-user-priority-propagate",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "basic": {"strategy": "basic", "operator_priorities": False, "user_priorities": False},
    "aggressive": {"operator_priorities": False, "user_priorities": False},
    "op-priority": {"user_priorities": False},
    "user-priority, basic": {"strategy": "basic"},
    "user-priority": {},
}

# Operations that our table lacks, and one of which nobody has a rule.
CALLS = {"call", "gradient_of_pooling", "householder_product", "view"}
UNKNOWN = "unknown"
CLASSES = "pointwise calls that wait for a later stage"

Answers = dict[str, dict[str, Any]]


def answers_of(
    programs: Sequence[Program], pipelines: Sequence[str]
) -> Iterator[tuple[Program, Answers | None]]:
    """Each program with what Shardy makes of it by each pipeline; None where it crashes."""
    waiting = list(programs)
    while waiting:
        lines = [json.dumps({"text": one.text, "pipelines": list(pipelines)}) for one in waiting]
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("shardy_worker.py"))],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            check=False,
        )
        found = [json.loads(line) for line in done.stdout.splitlines()]
        if "Unable to parse" in done.stderr:
            raise ValueError(f"{waiting[len(found)].text}\n{done.stderr}")
        yield from zip(waiting, found, strict=False)
        if len(found) < len(waiting):
            yield waiting[len(found)], None
        waiting = waiting[len(found) + 1 :]


def graph_of(program: Program, rules: Sequence[str | None]) -> Graph:
    """The program as a graph, with the rules that Shardy found.

    Where it has none, ours is the one of an operator without a rule.
    """
    dtypes = {"f32": "float32", "i1": "bool", "i32": "int32"}
    operations = []
    for one, rule in zip(program.statements, rules, strict=True):
        shapes = [
            [program.values[n][0] for n in numbers] for numbers in (one.operands, one.numbers)
        ]
        found = replicated_rule(*shapes) if rule is None else rule_of(rule)
        operations.append(Operation(one.name, tuple(one.operands), tuple(one.numbers), found))
    values = [
        Value(number, shape, dtypes.get(dtype, dtype).replace("<", "_").replace(">", ""))
        for number, (shape, dtype) in enumerate(program.values)
    ]
    return Graph(tuple(values), tuple(program.inputs), tuple(operations), tuple(program.outputs))


def rule_of(text: str) -> OpShardingRule:
    """A rule as Shardy prints it."""
    body = text.removeprefix("#sdy.op_sharding_rule<").removesuffix(">")
    body = body if "{" in body else f"{body} {{}}"
    return OpShardingRule.parse(body.replace("blocked_propagation", "blocked"))


def ours(program: Program, graph: Graph, way: str) -> PropagatedGraph:
    """What we say, by the same pass."""
    return propagate_graph(graph, program.annotations, outputs=program.asked, **OPTIONS[way])


def in_their_class(graph: Graph) -> Graph:
    """The graph whose calls count as no elementwise operators, whatever their rules are.

    An operator that the table lacks is elementwise for us where its rule is. Shardy goes by the
    kind of operation: custom calls and gradients of pooling wait for a later stage.
    """
    operations = tuple(
        replace(one, operator="sort") if one.operator in CALLS else one for one in graph.operations
    )
    return replace(graph, operations=operations)


def differences(program: Program, found: PropagatedGraph, answer: dict[str, Any]) -> list[str]:
    """Each value of which Shardy says something else, in words."""
    theirs: dict[int, str | None] = dict(zip(program.inputs, answer["arguments"], strict=True))
    for one, texts in zip(program.statements, answer["operations"], strict=True):
        theirs |= dict(zip(one.numbers, texts, strict=True))
    said = []
    for number, text in sorted(theirs.items()):
        spec = found.values[number]
        other = read(program, text, len(program.values[number][0]))
        if plain(spec) != plain(other):
            said.append(f"%{number}: ours {spec}, Shardy {other}")
    for place, text in enumerate(answer["outputs"]):
        ndim = len(program.values[program.outputs[place]][0])
        spec, other = found.outputs[place], read(program, text, ndim)
        if plain(spec) != plain(other):
            said.append(f"output {place}: ours {spec}, Shardy {other}")
    return said


def is_explained(program: Program, found: PropagatedGraph, answer: dict[str, Any]) -> bool:
    """Whether a difference is deliberate: parts of an axis that no tensor can have together.

    An axis of 6 is 2 x 3 or 3 x 2. Shardy takes `a:(1)2` for the beginning of `a:(1)3` and
    extends the one to the other, though no cut of the first gives the second. For us they
    conflict. The predicate: parts with such bounds meet in what was given, or in an answer.
    """
    specs = [*program.annotations.values(), *program.asked.values()]
    specs += [spec for spec in (*found.values, *found.outputs) if spec is not None]
    texts = [*answer["arguments"], *answer["outputs"]]
    texts += [text for one in answer["operations"] for text in one]
    bounds: dict[str, set[int]] = {}
    for spec in specs:
        for axis in (*spec.replicated_axes, *spec.partial_axes, *all_axes(spec)):
            if axis.size is not None:
                bounds.setdefault(axis.name, set()).update((axis.pre, axis.pre * axis.size))
    for name, pre, size in re.findall(r'"(\w+)":\((\d+)\)(\d+)', " ".join(filter(None, texts))):
        bounds.setdefault(name, set()).update((int(pre), int(pre) * int(size)))
    return any(
        high % low
        for numbers in bounds.values()
        for low, high in itertools.pairwise(sorted(numbers))
    )


def all_axes(spec: ShardingSpec) -> list[Axis]:
    """The axes of all dimensions."""
    return [axis for dim in spec.dim_specs for axis in dim.axes]


def read(program: Program, text: str | None, ndim: int) -> ShardingSpec | None:
    """A sharding from Shardy's text. One with parts that cannot be together is told apart."""
    if text is None:
        return None
    try:
        return parse_shardy(text, program.mesh, (1,) * ndim)
    except SpecError:
        return UNREADABLE


def plain(spec: ShardingSpec | None) -> object:
    """A sharding without its priorities; None where all dimensions are open and nothing is cut.

    Shardy writes that for the other results of an operation of which it cuts one.
    """
    if spec is None or (
        all(dim.is_open and not dim.levels for dim in spec.dim_specs)
        and not spec.replicated_axes
        and not spec.partial_axes
    ):
        return None
    return (
        [DimSpec(dim.levels, dim.is_open) for dim in spec.dim_specs],
        spec.replicated_axes,
        set(spec.partial_axes),
    )


# What stands for a sharding of which we cannot have an equal.
UNREADABLE = ShardingSpec(DeviceMesh("unreadable", (), ()), [])
PARTS = "parts of an axis that cannot be together"
RESHARDS = "func.func(sdy-insert-explicit-reshards{enable-full-version=true})"
Dims = tuple[tuple[str, ...], ...]


def dims_of(spec: ShardingSpec | None, ndim: int) -> Dims:
    """The axes of each dimension, in text."""
    if spec is None:
        return ((),) * ndim
    return tuple(tuple(map(str, dim.axes)) for dim in spec.dim_specs)


@dataclass
class Moves:
    """What an operation runs with, and what moves: the same of Shardy and of us."""

    operands: list[list[Dims]] = field(default_factory=list)
    results: list[list[Dims]] = field(default_factory=list)
    moved: Counter[tuple[int, str, Dims]] = field(default_factory=Counter)


def their_moves(program: Program, answer: dict[str, Any]) -> Moves:
    """What Shardy's explicit reshards say."""
    found = Moves()
    cut: dict[str, Dims] = {}
    value: dict[str, int] = dict(zip(answer["inputs"], program.inputs, strict=True))
    for name, number, text in zip(
        answer["inputs"], program.inputs, answer["arguments"], strict=True
    ):
        ndim = len(program.values[number][0])
        cut[name] = dims_of(read(program, text, ndim), ndim)
    statements = iter(program.statements)
    for one, texts in zip(answer["walk"], answer["operations"], strict=True):
        if one["name"].startswith("sdy.") and one["name"] != "sdy.sharding_constraint":
            (source,), (made,) = one["operands"], one["results"]
            value[made] = value[source]
            ndim = len(program.values[value[made]][0])
            cut[made] = dims_of(read(program, texts[0], ndim), ndim)
            axes = ", ".join(re.findall(r'"[^"]*"(?::\(\d+\)\d+)?', one["axes"]))
            kind = "reduce " + axes.replace('"', "") if one["axes"] else "reshard"
            found.moved[value[made], kind, cut[made]] += 1
            continue
        statement = next(statements)
        value |= dict(zip(one["results"], statement.numbers, strict=True))
        found.operands.append([cut[name] for name in one["operands"]])
        for name, text in zip(one["results"], texts, strict=True):
            ndim = len(program.values[value[name]][0])
            cut[name] = dims_of(read(program, text, ndim), ndim)
        found.results.append([cut[name] for name in one["results"]])
    return found


def our_moves(program: Program, placed: PlacedGraph) -> Moves:
    """What we say."""
    found = Moves()
    if placed.propagated.mesh is None:
        return found
    for operands, results in zip(placed.operands, placed.results, strict=True):
        found.operands.append([dims_of(spec, spec.ndim) for spec in operands])
        found.results.append([dims_of(spec, spec.ndim) for spec in results])
    for move in placed.moved:
        kind = "reduce " + ", ".join(map(str, move.reduced)) if move.reduced else "reshard"
        found.moved[move.value, kind, dims_of(move.target, move.target.ndim)] += 1
    return found


def move_differences(ours: Moves, theirs: Moves) -> list[str]:
    """Each disagreement in words."""
    if not ours.operands:
        return []
    said = []
    for number, (a, b) in enumerate(zip(ours.operands, theirs.operands, strict=True)):
        if a != b:
            said.append(f"operands of operation {number}: ours {a}, Shardy {b}")
    for number, (a, b) in enumerate(zip(ours.results, theirs.results, strict=True)):
        if a != b:
            said.append(f"results of operation {number}: ours {a}, Shardy {b}")
    for move in sorted((ours.moved - theirs.moved) + (theirs.moved - ours.moved)):
        said.append(f"{move}: ours {ours.moved[move]} times, Shardy {theirs.moved[move]} times")
    return said


def why_moves_differ(found: PropagatedGraph) -> str | None:
    """The deliberate difference that a program's movements may have; None if it may have none.

    Overflow: Shardy leaves an operation alone whose dimension is cut by axes that cut no factor;
    we reshard. Asked-for contributions: Shardy believes an operation whose result is said to be
    partial; we keep contributions only through operators that are linear in those operands, and
    say what makes the result partial where the operation does not. A concatenation of slices:
    Shardy has a rule of its own for one, until it puts a reshard behind a slice; then the
    concatenation has another rule.
    """
    if found.mesh is None:
        return None
    if any(spec is not None and spec.partial_axes for spec in found.outputs):
        return "contributions asked for"
    table = AxisTable.of(found.mesh)
    for operation in found.graph.operations:
        for number in operation.results:
            spec = found.values[number]
            if spec is not None and spec.partial_axes:
                return "contributions asked for"
        rule = operation.rule
        if operation.operator == "concat" and rule.permutation:
            return "concatenations of slices"
        for number, mapping in zip(
            (*operation.operands, *operation.results), rule.tensors, strict=True
        ):
            spec = found.values[number]
            sharding = None if spec is None else table.encoded(spec)
            cuts = collected(mapping, rule.sizes, sharding, frozenset())
            if any(cut.overflow for cut in cuts.values()):
                return "axes that overflow"
            if operation.operator == UNKNOWN and sharding is not None and any(sharding.dims):
                return "operators without a rule"
    return None


@dataclass
class Tally:
    """What came of a campaign."""

    programs: int = 0
    crashed: int = 0
    refused: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    conflicts: int = 0
    explained: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        compared = ", ".join(f"{way} {count}" for way, count in self.compared.items())
        explained = ", ".join(f"{why} {count}" for why, count in self.explained.items()) or "none"
        few = [f"{name} {count}" for name, count in sorted(self.operators.items()) if count < 50]
        return (
            f"{self.programs} programs ({self.conflicts} of those compared to the end have "
            f"conflicts; Shardy crashes at {self.crashed}, and makes reshards that its own "
            f"verifier refuses for {self.refused}); compared: {compared}; deliberate differences: "
            f"{explained}; "
            f"unexplained: {len(self.unexplained)}; {len(self.operators)} kinds of operations; "
            f"fewer than 50 times: {', '.join(few) or 'none'}"
        )


def campaign(seeds: Sequence[int], batch: int = 250) -> Tally:
    """Compare random programs of these seeds: every propagation, and what moves after the last.

    Explicit reshards abort on some programs with contributions, so they run by themselves.
    """
    tally = Tally()
    for start in range(0, len(seeds), batch):
        chosen = seeds[start : start + batch]
        programs = [random_program(Random(seed)) for seed in chosen]
        answers = zip(chosen, answers_of(programs, [POPULATE, *PASSES.values()]), strict=True)
        movable = []
        for seed, (program, answer) in answers:
            tally.programs += 1
            if answer is None:
                tally.crashed += 1
                continue
            graph = graph_of(program, answer[POPULATE]["rules"])
            found = _count_shardings(tally, seed, program, graph, answer)
            if found is not None:
                movable.append((seed, program, found))
        pipeline = f"{PASSES['user-priority']},{RESHARDS}"
        moves = answers_of([program for _, program, _ in movable], [pipeline])
        for (seed, program, found), (_, answer) in zip(movable, moves, strict=True):
            explicit_reshards(found)
            if answer is None:
                tally.crashed += 1
            elif "refused" in answer[pipeline]:
                tally.refused += 1
            else:
                _count_moves(tally, seed, program, found, answer[pipeline])
    return tally


def _count_shardings(
    tally: Tally, seed: int, program: Program, graph: Graph, answer: Answers
) -> PropagatedGraph | None:
    """What the last pass says where we agree with it, and there is something to compare further."""
    tally.operators.update(operation.operator for operation in graph.operations)
    last = None
    for way, name in PASSES.items():
        found = ours(program, graph, way)
        said = differences(program, found, answer[name])
        tally.compared[way] += 1
        last = None if said else found
        if said and is_explained(program, found, answer[name]):
            tally.explained[PARTS] += 1
        elif said and not differences(
            program, ours(program, in_their_class(graph), way), answer[name]
        ):
            tally.explained[CLASSES] += 1
        elif said:
            tally.unexplained.append(f"seed {seed}, {way}, {program.mesh}\n" + "\n".join(said))
    return last


def _count_moves(
    tally: Tally, seed: int, program: Program, found: PropagatedGraph, answer: dict[str, Any]
) -> None:
    placed = explicit_reshards(found)
    tally.conflicts += bool(placed.moved)
    tally.compared["explicit reshards"] += 1
    said = move_differences(our_moves(program, placed), their_moves(program, answer))
    why = why_moves_differ(found)
    if said and is_explained(program, found, answer):
        why = PARTS
    if said and why is not None:
        tally.explained[why] += 1
    elif said:
        tally.unexplained.append(f"seed {seed}, reshards, {program.mesh}\n" + "\n".join(said))
