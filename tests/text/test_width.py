"""Texts are cut to the columns that they may have, in the middle or at their end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reshard.text.width import cut_in_the_middle, display_width, shortened

LETTERS = st.text(st.sampled_from("abc.層e\u0301"), max_size=30)


@given(LETTERS, st.integers(1, 30))
def test_no_text_is_wider_than_it_may_be(text: str, width: int) -> None:
    for cut in (cut_in_the_middle(text, width), shortened(text, width)):
        assert display_width(cut) <= width
        assert (cut == text) == (display_width(text) <= width)


@given(LETTERS, st.integers(3, 30))
def test_what_is_cut_in_the_middle_keeps_both_ends(text: str, width: int) -> None:
    begin, mark, end = cut_in_the_middle(text, width).partition("…")
    assert text.startswith(begin)
    assert text.endswith(end)
    # Neither end has a column more than the other but for an odd one, and a wide letter.
    if mark:
        assert abs(display_width(begin) - display_width(end)) <= 2
