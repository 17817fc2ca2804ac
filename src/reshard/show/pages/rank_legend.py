"""The legend of a page: which colour is which rank."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.show.svg import element

_MOST_SEPARATE = 16


def rank_legend(colours: Mapping[int, str]) -> str:
    """A patch of colour for each rank, or for some of very many.

    >>> rank_legend({3: "#0072b2"}).count("<li>")
    1
    """
    ranks = sorted(colours)
    if len(ranks) > _MOST_SEPARATE:
        last, steps = len(ranks) - 1, _MOST_SEPARATE - 1
        ranks = [ranks[last * step // steps] for step in range(_MOST_SEPARATE)]
    items = [
        element("li", element("span", "", style=f"background:{colours[rank]}"), f"{rank}")
        for rank in ranks
    ]
    return element("div", element("p", "rank"), element("ul", *items), class_="legend")
