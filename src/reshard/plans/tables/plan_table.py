"""What does a plan move, how little could that be, and who is busiest?"""

from __future__ import annotations

import numpy as np

from reshard.plans.plan import Plan
from reshard.plans.schedule.rounds import fewest_rounds
from reshard.plans.tables.busiest import busiest_text
from reshard.runs import IntArray
from reshard.text.quantities import bytes_text, count_text, table


def plan_table(plan: Plan) -> str:
    """The text that `print(plan)` shows: bytes only where the plan has a dtype.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(x=2, y=3)
    >>> source, target = (reshard.spec(mesh, text).layout((6, 6)) for text in ("x, y", "y, x"))
    >>> print(plan_table(reshard.plan(source, target, dtype="float32")))
    Plan of float32 [6, 6] from 6 to 6 ranks
    <BLANKLINE>
                      bytes  elements
    ----------------  -----  --------  ------------------------------
    moved             104 B        26
    least possible    104 B        26
    stays in place     40 B        10
    busiest sender     24 B         6  ranks 2,3: 1.38 times the mean
    busiest receiver   24 B         6  ranks 2,3: 1.38 times the mean
    <BLANKLINE>
    12 transfers in 12 messages, which take 3 rounds
    """
    sent, received = plan.sent_elements, plan.received_elements
    lines = [
        ("moved", plan.moved_elements, ""),
        ("least possible", plan.lower_bound_elements, ""),
        ("stays in place", plan.change.staying_elements, ""),
        ("busiest sender", int(sent.max(initial=0)), busiest_text(sent, plan.source.holders)),
        (
            "busiest receiver",
            int(received.max(initial=0)),
            busiest_text(received, plan.target.holders),
        ),
    ]
    if plan.dtype is None:
        rows = [(name, f"{elements:,}", who) for name, elements, who in lines]
        body = table(rows, ("", "elements", ""), "lrl")
    else:
        width = plan.dtype.itemsize_bytes
        rows_with_bytes = [
            (name, bytes_text(elements * width), f"{elements:,}", who)
            for name, elements, who in lines
        ]
        body = table(rows_with_bytes, ("", "bytes", "elements", ""), "lrrl")
    of = "" if plan.dtype is None else f"{plan.dtype.name} "
    moving = plan.transfers.moving
    return "\n".join(
        [
            f"Plan of {of}{list(plan.source.shape)} from {len(plan.source.holders)} to "
            f"{count_text(len(plan.target.holders), 'rank')}",
            "",
            body,
            "",
            messages_text(len(moving), moving.source_slot, moving.target_slot),
        ]
    )


def messages_text(transfers: int, sender: IntArray, receiver: IntArray) -> str:
    """How many transfers there are, in how many messages, and in how many rounds those can go.

    What one rank sends to another is one message; in a round, a rank sends one and receives one.

    >>> messages_text(5, np.array([0, 0, 1]), np.array([1, 1, 0]))
    '5 transfers in 2 messages, which take 1 round'
    """
    if not len(sender):
        return "no transfers"
    span = int(receiver.max()) + 1
    pairs = np.unique(sender * span + receiver)
    rounds = fewest_rounds(pairs // span, pairs % span)
    return (
        f"{count_text(transfers, 'transfer')} in {count_text(len(pairs), 'message')}, which take "
        f"{count_text(rounds, 'round')}"
    )
