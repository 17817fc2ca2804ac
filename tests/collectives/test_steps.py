"""Steps: groups, moved elements, and illegal steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reshard
from collectives.program_checks import check
from reshard.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    JointAllToAll,
    Permute,
    Program,
    ReduceScatter,
    Slice,
    Step,
    find_program,
)
from reshard.cost import load_preset
from reshard.errors import PlanError, ShardError
from reshard.mesh import Axis
from reshard.text import duration_text

MESH = reshard.DeviceMesh.of(x=2, y=2)
LINE = reshard.DeviceMesh.of(x=4)
PAIRS = ((0, 1), (2, 3))
ALL = ((0, 1, 2, 3),)


def step_of(
    kind: type[Step],
    source: str,
    target: str,
    axes: str = "",
    shape: tuple[int, ...] = (4, 4),
    mesh: reshard.DeviceMesh = MESH,
) -> Step:
    sides = (reshard.spec(mesh, source), reshard.spec(mesh, target))
    return kind(shape, *sides, tuple(map(Axis.parse, axes.split())))


@pytest.mark.parametrize(
    ("step", "groups", "received", "live_shard", "extra"),
    [
        (step_of(Slice, "x, -", "x, y", "y"), ((0,), (1,), (2,), (3,)), [0] * 4, 8, 0),
        (step_of(AllGather, "x, y", "x, -", "y"), PAIRS, [4] * 4, 8, 8),
        (step_of(AllGather, "x, y", "-, -", "x y"), ALL, [12] * 4, 16, 24),
        (step_of(AllToAll, "x y, -", "x, y", "y"), PAIRS, [2] * 4, 4, 4),
        (step_of(JointAllToAll, "x y, -", "-, x y", "x y"), ALL, [3] * 4, 4, 6),
        (step_of(Permute, "x, y", "y, x"), ALL, [0, 4, 4, 0], 4, 0),
        (step_of(Permute, "x y, -", "y x, -"), ALL, [0, 4, 4, 0], 4, 0),
        (step_of(ReduceScatter, "x, - | sum(y)", "x y, -", "y"), PAIRS, [4] * 4, 8, 8),
        (step_of(AllReduce, "x, - | sum(y)", "x, -", "y"), PAIRS, [8] * 4, 8, 16),
        (step_of(AllReduce, "-, - | max(x y)", "-, -", "x y"), ALL, [24] * 4, 16, 48),
        # A shard of three over two ranks: one of them reduces the second and third element.
        (step_of(AllReduce, "- | sum(y)", "-", "y", (3,)), PAIRS, [3, 3, 3, 3], 3, 6),
        (step_of(Exchange, "x, -", "-, y"), ALL, [4] * 4, 8, 8),
    ],
    ids=str,
)
def test_moved_elements_of_steps(
    step: Step,
    groups: tuple[tuple[int, ...], ...],
    received: list[int],
    live_shard: int,
    extra: int,
) -> None:
    assert step.groups == groups
    assert step.received_elements.tolist() == received
    assert step.sent_elements.sum() == sum(received) == step.moved_elements
    assert step.live_shard == live_shard
    assert (step.extra_elements, step.extra_bytes(2)) == (extra, 2 * extra)
    step.verify()
    check(Program(step.shape, step.source, step.target, (step,)), live_shard)


def test_a_permute_sends_every_shard_once() -> None:
    mesh = reshard.DeviceMesh.of(x=2, y=2, z=2)
    step = step_of(Permute, "x y, -", "y z, -", mesh=mesh)
    senders = [sender for sender, _ in step.pairs]  # type: ignore[attr-defined]
    assert sorted(senders) == list(range(8))
    parts = {rank: rank // 2 for rank in range(8)}
    wanted = {rank: rank % 4 for rank in range(8)}
    for sender, receiver in step.pairs:  # type: ignore[attr-defined]
        assert parts[sender] == wanted[receiver]
        # Who has what it needs keeps it.
        assert (sender == receiver) == (parts[receiver] == wanted[receiver])
    assert int(step.sent_elements.max()) == int(step.received_elements.max()) == 4


@pytest.mark.parametrize(
    ("step", "message"),
    [
        # 3 3 3 1 gathered to 5 5: row 5 is in the other group.
        (step_of(AllGather, "x y", "x", "y", (10,)), r"group \[2, 3\], .* only 4 of the 5 "),
        (step_of(AllToAll, "x y, -", "x, y", "y", (10, 4)), "all-to-all.* only 8 of the 10 "),
        (step_of(Slice, "x", "x y", "y", (10,)), r"group \[1\], .* only 2 of the 3 "),
        (step_of(Slice, "x, -", "y, -", "y"), "only 0 of the 8 "),
        # The group along y has the same rows everywhere.
        (step_of(JointAllToAll, "x, y", "y, x", "y", (4, 6)), "only 0 of the 6 "),
        (step_of(AllGather, "x, -", "-, -", "y"), "`x, -` to `-, -` is not legal"),
        (step_of(Permute, "x, -", "-, -"), "no shard is left for rank 0"),
    ],
    ids=str,
)
def test_an_illegal_step_raises(step: Step, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        step.verify()
    held = reshard.plan(reshard.Layout.replicated(step.shape, 4), step.source_layout).run(
        {rank: np.arange(np.prod(step.shape)).reshape(step.shape) for rank in range(4)}
    )
    with pytest.raises(PlanError):
        step.run(held)


def test_steps_must_continue_one_another() -> None:
    first = step_of(AllGather, "x, y", "x, -", "y")
    other = step_of(Slice, "-, x", "y, x", "y")
    sides = reshard.spec(MESH, "x, y"), reshard.spec(MESH, "y, x")
    with pytest.raises(PlanError, match="step 1 begins at `-, x`, but the program is at `x, -`"):
        Program((4, 4), *sides, (first, other))
    with pytest.raises(PlanError, match="the steps end at `x, -`, not at `y, x`"):
        Program((4, 4), *sides, (first,))
    with pytest.raises(PlanError, match="step 0 begins at `-, x`, but the program is at `x, y`"):
        Program((4, 4), *sides, (other,))


def test_torch_tensors_and_mismatches() -> None:
    program = find_program(reshard.spec(MESH, "x, y"), reshard.spec(MESH, "y, -"), (6, 4))
    assert [step.name for step in program.steps] == ["permute", "all-gather"]
    dense = np.arange(24, dtype=np.float32).reshape(6, 4)
    layout = reshard.Layout.replicated((6, 4), 4)
    source = reshard.spec(MESH, "x, y").layout((6, 4))
    held = reshard.plan(layout, source).run(dict.fromkeys(range(4), dense))
    tensors = {rank: torch.from_numpy(array) for rank, array in held.items()}
    found = program.run(tensors)
    for rank, array in program.run(held).items():
        assert torch.equal(found[rank], torch.from_numpy(array))
        assert np.array_equal(array, dense[3 * (rank % 2) : 3 * (rank % 2) + 3])
    with pytest.raises(ShardError, match="no array for"):
        program.run({0: held[0]})
    with pytest.raises(ShardError, match="shape"):
        program.run({**held, 1: dense})
    gather = find_program(reshard.spec(MESH, "x, -"), reshard.spec(MESH, "-, -"), (6, 4))
    with pytest.raises(ShardError, match=r"no array for rank 2; `x, -` holds data on ranks"):
        gather.run({0: held[0], 1: held[1]})


def test_nothing_to_do_is_a_copy() -> None:
    spec = reshard.spec(LINE, "x")
    program = find_program(spec, spec, (8,))
    assert program.steps == () and program.moved_elements == 0 and program.live_shard == 2
    held = {rank: np.arange(2) + 2 * rank for rank in range(4)}
    found = program.run(held)
    assert all(np.array_equal(found[rank], held[rank]) for rank in range(4))
    assert not any(np.shares_memory(found[rank], held[rank]) for rank in range(4))
    assert repr(program) == "<Program of [8]: nothing to do>"


def test_memory_beyond_both_ends() -> None:
    mesh = reshard.DeviceMesh.of(x=2, y=2, z=2, w=4)
    sides = reshard.spec(mesh, "y z w, -"), reshard.spec(mesh, "y, x w")
    program = find_program(*sides, (16, 8))
    assert [step.name for step in program.steps] == ["slice", "all-to-all", "all-gather"]
    # After the slice 4 elements, after the all-to-all 4: both are between, with what it packs.
    packed = program.steps[1].extra_elements
    gathered = program.steps[2].extra_elements
    assert program.extra_bytes(4) == 4 * max(4, 4 + 4 + packed, 4 + gathered)


def test_a_program_is_a_table() -> None:
    mesh = reshard.DeviceMesh.of(x=2, y=2, z=2)
    program = find_program(reshard.spec(mesh, "-, - | sum(x)"), reshard.spec(mesh, "y, -"), (8, 4))
    lines = str(program).splitlines()
    assert len(lines) == len(program.steps) + 3
    assert lines[0].split() == ["[8,", "4]", "step", "after", "moves", "live", "shard"]
    for line, step in zip(lines[2:-1], program.steps, strict=True):
        assert str(step) in line and str(step.target) in line
        assert line.split()[-2] == str(step.moved_elements)
    assert lines[-1].startswith(f"{program.moved_elements} elements move, at least ")


def test_a_table_on_a_topology_has_times() -> None:
    mesh = reshard.DeviceMesh.of(x=2, y=2, z=2)
    sides = reshard.spec(mesh, "-, - | sum(x)"), reshard.spec(mesh, "y, -")
    program = find_program(*sides, (8, 4))
    topology = load_preset("h100-8").topology()
    lines = program.table(topology, "float32").splitlines()
    estimate = program.estimate("float32", topology)
    plain = str(program).splitlines()
    assert lines[0].split()[-1] == "time" and lines[1].split()[-1] == "-"
    for line, without, part in zip(lines[2:-2], plain[2:-1], estimate.parts, strict=True):
        assert line.startswith(without)
        assert line.removeprefix(without).strip() == duration_text(part.seconds_s)
    assert lines[-2:] == [plain[-1], f"All steps take {duration_text(estimate.seconds_s)}."]


@pytest.mark.parametrize("stepwise", [False, True])
def test_ranks_without_elements_need_no_array(stepwise: bool) -> None:
    program = find_program(reshard.spec(LINE, "x, -"), reshard.spec(LINE, "-, x"), (2, 8))
    rows = {rank: np.arange(8.0)[None] + 8 * rank for rank in range(2)}
    found = program.run(rows, stepwise=stepwise)
    assert {rank: part[:, 0].tolist() for rank, part in found.items()} == {
        rank: [2.0 * rank, 2.0 * rank + 8] for rank in range(4)
    }
    with pytest.raises(ShardError, match=r"no array for rank 1; `x, -` holds data on ranks \[0, 1"):
        program.run({0: rows[0]}, stepwise=stepwise)
