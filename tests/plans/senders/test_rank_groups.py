"""Groups of ranks that belong to the same sets, against the definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.plans.senders.rank_groups import group_ranks

RANKS = 9


@given(st.lists(st.sets(st.integers(0, RANKS - 1)), max_size=6))
def test_alike_ranks_are_a_group_and_sets_are_unions(sets: list[set[int]]) -> None:
    begin = np.cumsum([0, *(len(members) for members in sets)])
    rank = np.array([r for members in sets for r in sorted(members)], dtype=np.int64)
    found = group_ranks(begin, rank, RANKS)
    roles = [tuple(r in members for members in sets) for r in range(RANKS)]
    for a in range(RANKS):
        for b in range(RANKS):
            assert (found.group[a] == found.group[b]) == (roles[a] == roles[b])
    groups = [
        found.member[found.member_begin[g] : found.member_begin[g + 1]].tolist()
        for g in range(len(found.size))
    ]
    assert sorted(r for group in groups for r in group) == list(range(RANKS))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        assert [found.number[r] for r in group] == list(range(len(group)))
    for number, members in enumerate(sets):
        mine = found.set_group[found.set_begin[number] : found.set_begin[number + 1]]
        assert {r for g in mine for r in groups[g]} == members
        assert sum(len(groups[g]) for g in mine) == len(members)
