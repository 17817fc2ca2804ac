"""Contributions of partial layouts: which of the source each one of the target adds up.

A tensor that is not partial is one contribution. The answer keeps data where it is: each
source contribution goes to the target contribution that most of its holders carry
themselves, and where that says nothing, to the first. A target contribution that gets none
is the reduction's identity; so a replicated tensor made partial keeps one copy.

A mean has no identity. Contributions of a mean are added up and scaled, and a replicated
tensor becomes a copy in every contribution.
"""

from __future__ import annotations

import numpy as np

from reshard.layout import Layout


def contribution_sources(source: Layout, target: Layout) -> tuple[tuple[int, ...], ...]:
    """For each target contribution, the source contributions it combines, in order.

    >>> full = Layout.replicated((4,), 2)
    >>> partial = Layout((4,), full.tables, 2, [0, 1], [[0], [0]], [0, 1], 2, "sum")
    >>> contribution_sources(full, partial), contribution_sources(partial, full)
    (((0,), ()), ((0, 1),))
    """
    if target.contributions == 1:
        return (tuple(range(source.contributions)),)
    if target.reduction == "mean" and source.reduction != "mean":
        return (tuple(range(source.contributions)),) * target.contributions
    goes_to = np.zeros(source.contributions, dtype=np.int64)
    # Under another reduction the source is reduced in full, and the first gets it.
    if source.reduction in (None, target.reduction):
        votes = np.zeros((source.contributions, target.contributions), dtype=np.int64)
        carried = {
            int(slot): int(contribution)
            for slot, contribution in zip(target.cell_slot, target.cell_contribution, strict=True)
        }
        for slot, contribution in zip(source.cell_slot, source.cell_contribution, strict=True):
            if int(slot) in carried:
                votes[int(contribution), carried[int(slot)]] += 1
        # Of equal numbers argmax takes the first, and so where there are no votes.
        goes_to = votes.argmax(axis=1)
    return tuple(
        tuple(np.flatnonzero(goes_to == contribution).tolist())
        for contribution in range(target.contributions)
    )


def mean_scale(source: Layout, target: Layout) -> tuple[int, int]:
    """The fraction `(numerator, denominator)` that added-up contributions are scaled by."""
    if source.reduction == "mean":
        if target.reduction == "mean":
            return (target.contributions, source.contributions)
        return (1, source.contributions)
    return (1, 1)
