from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from reshard.text.rank_sets import rank_text

RANKS = st.one_of(
    st.sets(st.integers(0, 40)),
    st.builds(
        lambda start, count, step, more: set(range(start, start + count * step, step)) | more,
        st.integers(0, 9),
        st.integers(0, 9),
        st.integers(1, 9),
        st.sets(st.integers(0, 99), max_size=4),
    ),
)


@given(RANKS)
def test_rank_text_says_exactly_the_ranks(ranks: set[int]) -> None:
    said: list[int] = []
    for word in re.findall(r"\d+,\d+\.\.\d+|\d+-\d+|\d+", rank_text(ranks)):
        numbers = [int(number) for number in re.findall(r"\d+", word)]
        if ".." in word:
            said += range(numbers[0], numbers[2] + 1, numbers[1] - numbers[0])
        elif "-" in word:
            said += range(numbers[0], numbers[1] + 1)
        else:
            said += numbers
    assert said == sorted(ranks)


def test_regular_ranks_are_short() -> None:
    assert rank_text(range(512)) == "0-511"
    assert rank_text(range(3, 512, 8)) == "3,11..507"
    assert rank_text([0, 1, 2, 4, 8, 12, 16]) == "0-2,4,8..16"
    assert rank_text([]) == ""
