"""Sets of ranks in few characters.

Three or more in a row become a range, four or more at equal distances their first two and
their last: `0-3,8`, `0,4..28`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def rank_text(ranks: Iterable[int]) -> str:
    """The ranks in rising order, regular stretches shortened.

    >>> rank_text([0, 4]), rank_text([3, 2, 1, 0, 8]), rank_text(range(0, 32, 4))
    ('0,4', '0-3,8', '0,4..28')
    """
    rest = sorted(set(ranks))
    words = []
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 0
        # The longest stretch with the distance of the first two.
        length = min(len(rest), 2)
        while length < len(rest) and rest[length] - rest[length - 1] == step:
            length += 1
        if step == 1 and length >= 3:
            words.append(f"{rest[0]}-{rest[length - 1]}")
        elif length >= 4:
            words.append(f"{rest[0]},{rest[1]}..{rest[length - 1]}")
        else:
            # Too short to be worth a range: the first rank alone, the next may begin a stretch.
            length = 1
            words.append(str(rest[0]))
        rest = rest[length:]
    return ",".join(words)


def short_rank_text(ranks: Sequence[int], most_letters: int) -> str:
    """The ranks, in rising order; where that is too long, the first and last and how many.

    >>> short_rank_text([0, 1, 2], 9), short_rank_text([0, 2, 5, 6, 9], 8)
    ('0-2', '0..9 (5 ranks)')
    """
    text = rank_text(ranks)
    if len(text) <= most_letters:
        return text
    return f"{ranks[0]}..{ranks[-1]} ({len(ranks):,} ranks)"


def ranks_text(ranks: Sequence[int], most_letters: int = 40) -> str:
    """The ranks behind the word, for a sentence.

    >>> ranks_text([3]), ranks_text([0, 2])
    ('rank 3', 'ranks 0,2')
    """
    return f"rank{'' if len(ranks) == 1 else 's'} {short_rank_text(ranks, most_letters)}"
