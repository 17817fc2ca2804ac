"""Reused memory: results written into operands that are not read again.

    r5 = multiply(r4, r1)               r5 = multiply(r4, r1, out=r4)
    free r4

New memory of a megabyte comes from the system page by page, which takes longer than a sum of as
many numbers. So a function that works element by element writes into an operand

1. which is not read after it, and has the same shape, element type and sharding as the result;
2. which an operator made that never returns a view, so that nobody outside the program has its
   memory;
3. which none but such operators read, so that nothing inside is a view of it;
4. and which is large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.programs.steps.step_order import Action, ProgramStep
from reshard.spmd.tracing.memory import held_bytes

LEAST_BYTES = 1 << 16
"""Of a shard: below it an allocator has memory at hand."""


def find_reused(
    order: Sequence[Action], steps: Sequence[ProgramStep], kinds: Mapping[int, ArrayType]
) -> dict[int, int]:
    """Into which register's memory actions may write their results.

    Args:
        order: what is done of the steps.
        steps: all of them.
        kinds: types of what is in registers.

    Returns:
        registers by the place of the action in the order.
    """
    # Several results of one operator may be views of one array.
    own = (one for one in steps if not one.may_view and one.is_single)
    fresh = {register for one in own for register in one.makes}
    for one in steps:
        if one.may_view:
            fresh.difference_update(one.reads)
    found = {}
    for place, action in enumerate(order):
        step = steps[action.step]
        if action.kind != "run" or step.write_into is None:
            continue
        (made,) = step.makes
        for register in step.reads:
            is_last = register in fresh and register in action.frees
            if is_last and kinds[register] is kinds[made] and _is_large(kinds[made]):
                found[place] = register
                break
    return found


def _is_large(kind: ArrayType) -> bool:
    ranks = (0,) if kind.spec is None else kind.spec.mesh.devices
    return kind.ndim > 0 and max(held_bytes([kind], ranks)) >= LEAST_BYTES
