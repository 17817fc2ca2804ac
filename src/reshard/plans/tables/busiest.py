"""The busiest ranks, and how uneven the loads are, in one line."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from reshard.runs import IntArray
from reshard.text import ranks_text

_MOST_LETTERS = 32


def busiest_text(loads: IntArray, ranks: Iterable[int]) -> str:
    """The ranks of the largest load, and how many times the mean of `ranks` that is.

    Args:
        loads: of each rank, shape `(ranks,)`.
        ranks: those that could have one.

    >>> busiest_text(np.array([4, 6, 6, 0, 0]), range(4))
    'ranks 1,2: 1.50 times the mean'
    """
    able = [rank for rank in ranks if rank < len(loads)]
    total = int(loads[able].sum()) if able else 0
    if not total:
        return ""
    most = int(loads.max())
    who = np.flatnonzero(loads == most).tolist()
    return f"{ranks_text(who, _MOST_LETTERS)}: {most * len(able) / total:.2f} times the mean"
