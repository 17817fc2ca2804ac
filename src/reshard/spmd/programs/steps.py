"""Steps of a program: their order, where reshards start and are waited for, and reused memory.

In the blocking order each step ends before the next begins. In the overlapped order, a reshard
starts as soon as its source is computed, and is waited for where its result is first read::

    blocking      kernel a | move x | kernel b | move y | kernel c(x, y)
    overlapped    kernel a | kernel b | kernel c(x, y)
                           | move x | move y |

1. A reshard that does not enlarge its value, such as the reduce-scatter of a gradient, starts when
   its source is computed: the source can be freed the sooner.
2. A reshard that enlarges its value, such as the all-gather of a weight, occupies memory from its
   start. It starts when the result of an earlier reshard, as many before as may be in flight, is
   read.
3. At most so many of both kinds are in flight. They run in sequence, in the order in which they
   start, which is the same on every rank.
4. A step that ranks execute together (a loop, a check) waits for all reshards in flight, and no
   later reshard starts before it.
5. A reshard that would be waited for immediately is an ordinary step.

An elementwise step writes its result into an operand that is not read again::

    r5 = multiply(r4, r1)               r5 = multiply(r4, r1, out=r4)
    free r4

New memory of a megabyte comes from the system page by page, which takes longer than a sum of as
many numbers. The operand must

1. have the same shape, element type and sharding as the result, and not be read later;
2. be the result of an operator that never returns a view, so that no caller has its memory;
3. be read by such operators only, so that no other value is a view of it;
4. be large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.local_work import Function
from reshard.spmd.shards.runner import Transport
from reshard.spmd.shards.shard_copies import Movement
from reshard.spmd.tracing.estimates import held_bytes

Registers = list[Any]
Run = Callable[[Registers], None]


@dataclass(frozen=True, slots=True, eq=False)
class ProgramStep:
    """One call of a program: the registers that it reads and makes, and what it does.

    Args:
        run: executes it on registers.
        reads, makes: the registers.
        transport: "here" if this rank executes it alone.
        operation: the place of the operation that it belongs to.
        move: for a reshard, the function of shards.
        moved: for a reshard, the type before and the sharding after it.
        grows: whether the result of a reshard is larger than its source, on the fullest ranks.
        name: for an operator, its name.
        functions: for an operator, the kernel of each local rank; else None.
        is_single: whether kernels return a single result, not a tuple.
        may_view: whether its results may share memory with its operands or other arrays.
        write_into: returns a function that writes the result into a register's memory; None if
            that is not possible.
    """

    run: Run
    reads: Sequence[int]
    makes: Sequence[int]
    transport: Transport = "here"
    operation: int = 0
    move: Movement | None = None
    moved: tuple[ArrayType, ShardingSpec] | None = None
    grows: bool = False
    name: str = ""
    functions: Sequence[Function] | None = None
    is_single: bool = True
    may_view: bool = True
    write_into: Callable[[int], Run] | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """The execution, start or completion of a step, and the registers that are freed after it."""

    kind: Literal["run", "begin", "wait"]
    step: int
    frees: tuple[int, ...] = ()


def overlapped_order(
    steps: Sequence[ProgramStep], kept: Iterable[int], ahead: int
) -> tuple[Action, ...]:
    """Return the order of all steps, with at most `ahead` reshards of each kind in flight.

    With 0, it is the blocking order. Registers in `kept` are never freed.

    >>> def step(reads, makes, transport="here"):
    ...     return ProgramStep(lambda values: None, reads, makes, transport)
    >>> steps = [step([0], [1]), step([1], [2], "messages"), step([1], [3]), step([2, 3], [4])]
    >>> [(act.kind, act.step, act.frees) for act in overlapped_order(steps, {4}, 1)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('run', 0, (0,)), ('begin', 1, ()), ('run', 2, ()), ('wait', 1, (1,)), ('run', 3, (2, 3))]
    """
    if not ahead:
        return _with_frees([Action("run", number) for number in range(len(steps))], steps, kept)
    maker = {register: number for number, step in enumerate(steps) for register in step.makes}
    begins = _find_begins(steps, maker, ahead)
    actions: list[Action] = []
    pending: list[int] = []

    def wait(number: int) -> None:
        if number in pending:
            pending.remove(number)
            actions.append(Action("wait", number))

    for place, step in enumerate(steps):
        for number in begins.get(place, ()):
            for register in steps[number].reads:
                wait(maker.get(register, -1))
            alike = [other for other in pending if steps[other].grows is steps[number].grows]
            if len(alike) >= ahead:
                wait(alike[0])
            pending.append(number)
            actions.append(Action("begin", number))
        if step.transport == "messages":
            continue
        made_by = [maker.get(register, -1) for register in step.reads]
        for number in list(pending) if step.transport == "together" else made_by:
            wait(number)
        actions.append(Action("run", place))
    for number in list(pending):
        wait(number)
    return _with_frees(_join(actions), steps, kept)


def _find_begins(
    steps: Sequence[ProgramStep], maker: dict[int, int], ahead: int
) -> dict[int, list[int]]:
    """Return the reshards that start before each step, by the numbers of steps."""
    readers: dict[int, int] = {}
    for number, step in enumerate(steps):
        for register in step.reads:
            readers.setdefault(register, number)
    begins: dict[int, list[int]] = {}
    earliest = 0
    # Of those that grow.
    read_at: list[int] = []
    for number, step in enumerate(steps):
        if step.transport == "together":
            earliest = number + 1
        if step.transport != "messages":
            continue
        made_at = [maker.get(register, -1) for register in step.reads]
        at = max(earliest, *(place + 1 for place in made_at))
        if step.grows:
            if len(read_at) >= ahead:
                at = max(at, read_at[-ahead])
            read_at.append(min(readers.get(register, len(steps)) for register in step.makes))
        # The result of another movement is there when that was waited for: nothing is won.
        if any(place >= 0 and steps[place].transport == "messages" for place in made_at):
            at = number
        begins.setdefault(min(at, number), []).append(number)
    return begins


def _join(actions: Sequence[Action]) -> list[Action]:
    """Turn reshards that are waited for immediately into steps, after all that are in flight."""
    joined: list[Action] = []
    pending: list[int] = []
    number = 0
    while number < len(actions):
        action = actions[number]
        if action.kind == "begin":
            if number + 1 < len(actions) and actions[number + 1] == Action("wait", action.step):
                joined += [Action("wait", step) for step in pending]
                joined.append(Action("run", action.step))
                pending.clear()
                number += 2
                continue
            pending.append(action.step)
        elif action.kind == "wait":
            if action.step not in pending:
                number += 1
                continue
            pending.remove(action.step)
        joined.append(action)
        number += 1
    return joined


def _with_frees(
    actions: Sequence[Action], steps: Sequence[ProgramStep], kept: Iterable[int]
) -> tuple[Action, ...]:
    seen = set(kept)
    reversed_actions = []
    for action in reversed(actions):
        step = steps[action.step]
        # A movement reads its source until it has been waited for.
        used = () if action.kind == "begin" else (*step.reads, *step.makes)
        frees = tuple(dict.fromkeys(register for register in used if register not in seen))
        seen.update(frees)
        reversed_actions.append(Action(action.kind, action.step, frees))
    return tuple(reversed_actions[::-1])


MIN_REUSED_BYTES = 1 << 16
"""The minimum size of a shard for reuse: allocators keep smaller pieces at hand."""


def find_reused(
    order: Sequence[Action], steps: Sequence[ProgramStep], kinds: Mapping[int, ArrayType]
) -> dict[int, int]:
    """Find the operands whose memory actions may write their results to.

    Args:
        order: the actions.
        steps: all steps.
        kinds: the types of the registers' values.

    Returns:
        The register of each such operand, by the place of the action in the order.
    """
    # Several results of an operator may be views of the same array.
    fresh_steps = (step for step in steps if not step.may_view and step.is_single)
    fresh = {register for step in fresh_steps for register in step.makes}
    for step in steps:
        if step.may_view:
            fresh.difference_update(step.reads)
    reused = {}
    for place, action in enumerate(order):
        step = steps[action.step]
        if action.kind != "run" or step.write_into is None:
            continue
        (result,) = step.makes
        for register in step.reads:
            is_last = register in fresh and register in action.frees
            # Equal types are the same object.
            if is_last and kinds[register] is kinds[result] and _is_large(kinds[result]):
                reused[place] = register
                break
    return reused


def _is_large(kind: ArrayType) -> bool:
    ranks = (0,) if kind.spec is None else kind.spec.mesh.devices
    return kind.ndim > 0 and max(held_bytes([kind], ranks)) >= MIN_REUSED_BYTES
