"""Orders of steps: what is read is there, movements keep their order, and few are under way."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from reshard.spmd.programs.steps.step_order import (
    Action,
    ProgramStep,
    blocking_order,
    overlapped_order,
)


def step(
    reads: Sequence[int], makes: Sequence[int], travel: str = "here", grows: bool = False
) -> ProgramStep:
    return ProgramStep(lambda values: None, reads, makes, travel, grows=grows)


def written(order: Sequence[Action]) -> str:
    return " ".join(f"{one.kind}{one.step}" for one in order)


def draw_steps(seed: int) -> tuple[list[ProgramStep], set[int]]:
    """Programs of up to 30 steps on inputs 0 and 1, and the registers that they return."""
    choose = random.Random(seed)
    steps, count = [], 2
    for _ in range(choose.randint(1, 30)):
        travel = choose.choice(["here", "here", "here", "messages", "messages", "together"])
        reads = [choose.randrange(count) for _ in range(1 if travel == "messages" else 2)]
        steps.append(step(reads, [count], travel, choose.random() < 0.5))
        count += 1
    return steps, {choose.randrange(count) for _ in range(2)}


@pytest.mark.parametrize("ahead", [0, 1, 2, 3, 9])
def test_random_programs(ahead: int) -> None:
    for seed in range(300):
        steps, kept = draw_steps(seed)
        order = overlapped_order(steps, kept, ahead)
        there, pending, moved, done = {0, 1}, [], [], []
        for one in order:
            reads, makes = steps[one.step].reads, set(steps[one.step].makes)
            if one.kind == "begin":
                assert steps[one.step].travel == "messages"
                assert there.issuperset(reads)
                pending.append(one.step)
                moved.append(one.step)
            elif one.kind == "wait":
                pending.remove(one.step)
                # Its source is still there.
                assert there.issuperset(reads)
                there |= makes
                done.append(one.step)
            else:
                assert there.issuperset(reads)
                # Nothing else moves meanwhile, and ranks wait for nobody who is behind.
                if steps[one.step].travel != "here":
                    assert not pending
                if steps[one.step].travel == "messages":
                    moved.append(one.step)
                there |= makes
                done.append(one.step)
            for grows in (False, True):
                assert sum(steps[number].grows is grows for number in pending) <= ahead
            assert there.issuperset(one.frees)
            there -= set(one.frees)
        assert not pending
        assert sorted(done) == list(range(len(steps)))
        assert sorted(moved) == [n for n, one in enumerate(steps) if one.travel == "messages"]
        # Nothing passes what ranks do together.
        behind = [
            sum(steps[other].travel == "together" for other in range(number)) for number in moved
        ]
        assert behind == sorted(behind)
        # Only what is returned, or was given and is never read, is left.
        read = {register for one in steps for register in one.reads}
        assert there == kept & there | {0, 1} - read - kept | kept
        if not ahead:
            assert order == blocking_order(steps, kept)


def test_weights_are_fetched_before_they_are_read() -> None:
    steps = []
    for layer in range(3):
        steps += [
            step([layer], [10 + layer], "messages", True),
            step([20 + layer, 10 + layer], [21 + layer]),
        ]
    assert (
        written(overlapped_order(steps, {23}, 1)) == "run0 begin2 run1 wait2 begin4 run3 wait4 run5"
    )
    assert (
        written(overlapped_order(steps, {23}, 2))
        == "begin0 begin2 wait0 begin4 run1 wait2 run3 wait4 run5"
    )


def test_gradients_are_reduced_while_others_are_found() -> None:
    # All of them are moved at the end.
    steps = [step([0], [10]), step([10], [11]), step([11], [12])]
    steps += [step([10 + layer], [20 + layer], "messages") for layer in range(3)]
    found = written(overlapped_order(steps, {20, 21, 22}, 2))
    assert found == "run0 begin3 run1 begin4 run2 wait3 begin5 wait4 wait5"
    frees = {one.step: one.frees for one in overlapped_order(steps, {20, 21, 22}, 2)}
    assert frees[3] == (10,)


def test_nothing_begins_before_what_ranks_do_together() -> None:
    steps = [
        step([0], [1], "messages"),
        step([0], [2], "together"),
        step([0], [3], "messages"),
        step([2], [4]),
        step([1, 3, 4], [5]),
    ]
    assert written(overlapped_order(steps, {5}, 4)) == "run0 run1 begin2 run3 wait2 run4"
