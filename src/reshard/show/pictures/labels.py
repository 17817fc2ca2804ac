"""Labels of boxes: who holds what is in them.

::

    0,4      ranks 0 and 4 hold the same elements
    0 (1)    rank 0 owns them, rank 1 has a halo copy
    0+4      ranks 0 and 4 hold contributions to them
    0/1      ranks 0 and 1 hold different parts of the dimensions that are not drawn
    -        nobody holds them
    0/8/…/56 the same of eight ranks, the first two and the last of them written
    8 ranks  too many to write down

With the ranks the elements come from: `0 ← 2,3`; where these are too many, `0 ← 7 ranks` or
`0 ← …`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from reshard.show.pictures.regions import Holdings, RankHolding
from reshard.text import count_text, display_width, rank_text, shortened

SlotLabel = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Labels:
    """Writes the holders of a box: by number, or by a text of the caller's for each rank.

    >>> held = frozenset(RankHolding(0, 0, False, slot) for slot in (0, 4))
    >>> Labels().lines(held, (), 20), Labels("device {}\\nof 8".format).lines(held, (), 20)
    (['0,4'], ['device 0', 'of 8', 'device 4', 'of 8'])
    """

    slot_label: SlotLabel | None = None
    ascii: bool = False

    def lines(self, holdings: Holdings, senders: Sequence[int], width: int) -> list[str]:
        """The lines of a label, none wider than `width` columns."""
        if not holdings:
            return ["-"]
        mark = "..." if self.ascii else "…"
        if self.slot_label is not None:
            # Ranks with the same text share it: a dict keeps each once, in order.
            texts = dict.fromkeys(self.slot_label(h.slot) for h in sorted(holdings, key=_by_slot))
            joined = ",".join(texts)
            if "\n" not in joined and display_width(joined) <= width:
                return [joined]
            lines = itertools.chain.from_iterable(text.split("\n") for text in texts)
            return [shortened(line, width, mark) for line in lines]
        count = count_text(len({h.slot for h in holdings}), "rank")
        written = (*shorter_texts(holders_text(holdings), mark), count)
        text = next((text for text in written if display_width(text) <= width), count)
        if senders:
            arrow = "<-" if self.ascii else "←"
            many = count_text(len(senders), "rank")
            # The senders in full, else their number, else that there are some.
            for origin in (rank_text(senders), many, mark):
                if display_width(f"{text} {arrow} {origin}") <= width:
                    return [f"{text} {arrow} {origin}"]
        return [shortened(text, width, mark)]


def shorter_texts(text: str, mark: str) -> Iterator[str]:
    """A text of `holders_text`, and shorter ones with the first and the last of its parts.

    >>> list(shorter_texts("0/8/16/24/32", "…"))
    ['0/8/16/24/32', '0/8/…/32', '0/…/32']
    """
    yield text
    sign = "/" if "/" in text else "+"
    first, *middle, last = text.split(sign) if sign in text else (text, text)
    if len(middle) > 1:
        yield sign.join((first, middle[0], mark, last))
        yield sign.join((first, mark, last))


def _by_slot(holding: RankHolding) -> int:
    return holding.slot


def holders_text(holdings: Iterable[RankHolding]) -> str:
    """The holders of a box in full, see the module's docstring.

    >>> holders_text([RankHolding(0, c, False, 4 * c + i) for c in (0, 1) for i in (0, 1)])
    '0,1+4,5'
    >>> holders_text([RankHolding(part, 0, False, slot) for part, slot in [(0, 0), (1, 0), (2, 1)]])
    '0/1'
    """
    everything = sorted(holdings)
    parts_of_slot: dict[int, list[int]] = {}
    for holding in everything:
        parts_of_slot.setdefault(holding.slot, []).append(holding.hidden_part)
    # A rank may hold several of the parts that are not drawn; it is written once, with them all.
    by_parts: dict[tuple[int, ...], set[RankHolding]] = {}
    for holding in everything:
        key = tuple(parts_of_slot[holding.slot])
        by_parts.setdefault(key, set()).add(holding._replace(hidden_part=0))
    parts = []
    for of_part in by_parts.values():
        contributions = []
        for _, of_one in itertools.groupby(sorted(of_part), lambda h: h.contribution):
            alike = list(of_one)
            owners = [h.slot for h in alike if not h.is_halo]
            halos = [h.slot for h in alike if h.is_halo]
            words = [rank_text(owners)] if owners else []
            words += [f"({rank_text(halos)})"] if halos else []
            contributions.append(" ".join(words))
        parts.append("+".join(contributions))
    return "/".join(parts)
