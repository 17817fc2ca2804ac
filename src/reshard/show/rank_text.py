"""How is a set of ranks written in few characters?

Three or more in a row become a range, four or more at equal distances their first two and
their last: `0-3,8`, `0,4..28`.
"""

from __future__ import annotations

from collections.abc import Iterable


def rank_text(ranks: Iterable[int]) -> str:
    """The ranks in rising order, regular stretches shortened.

    >>> rank_text([0, 4]), rank_text([3, 2, 1, 0, 8]), rank_text(range(0, 32, 4))
    ('0,4', '0-3,8', '0,4..28')
    """
    rest = sorted(set(ranks))
    words = []
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 0
        length = min(len(rest), 2)
        while length < len(rest) and rest[length] - rest[length - 1] == step:
            length += 1
        if step == 1 and length >= 3:
            words.append(f"{rest[0]}-{rest[length - 1]}")
        elif length >= 4:
            words.append(f"{rest[0]},{rest[1]}..{rest[length - 1]}")
        else:
            length = 1
            words.append(str(rest[0]))
        rest = rest[length:]
    return ",".join(words)
