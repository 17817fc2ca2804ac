"""The formulas against numbers by hand, against simulated schedules, and in what they must obey."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.cost import FORMULAS, LIBRARIES, fastest_formula
from reshard.errors import UsageError
from reshard.topology import Link

# One millisecond a message, one megabyte a second.
LINK = Link(1e6, latency_s=1e-3)
NAMES = [(kind, name) for kind, formulas in FORMULAS.items() for name in formulas]
links = st.builds(
    Link,
    st.floats(1e6, 1e12, allow_nan=False),
    latency_s=st.floats(0, 1e-2, allow_nan=False),
)


@pytest.mark.parametrize(
    ("kind", "name", "milliseconds"),
    [
        # 8 ranks, 8000 bytes: an eighth of them takes one millisecond, all of them eight.
        ("all-gather", "ring", 7 * 1 + 7),
        ("all-gather", "doubling", 3 + 7),
        ("reduce-scatter", "ring", 7 + 7),
        ("reduce-scatter", "halving", 3 + 7),
        ("all-reduce", "ring", 14 + 14),
        ("all-reduce", "tree", 6 + 16),
        ("all-reduce", "halving-doubling", 6 + 14),
        ("all-to-all", "pairwise", 7 + 7),
        ("all-to-all", "bruck", 3 + 12),
        ("permute", "direct", 1 + 8),
    ],
)
def test_formulas_of_eight_ranks_match_values_computed_by_hand(
    kind: str, name: str, milliseconds: int
) -> None:
    seconds = FORMULAS[kind][name].seconds(8, 8000, LINK)
    assert seconds == pytest.approx(milliseconds / 1e3, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "name", "milliseconds"),
    [
        # 5 ranks, 5000 bytes: three doublings reach 5.
        ("all-gather", "ring", 4 + 4),
        ("all-gather", "doubling", 3 + 4),
        ("all-reduce", "halving-doubling", 6 + 8),
        ("all-reduce", "tree", 6 + 10),
        ("all-to-all", "pairwise", 4 + 4),
        ("all-to-all", "bruck", 3 + 7.5),
    ],
)
def test_formulas_of_five_ranks_match_values_computed_by_hand(
    kind: str, name: str, milliseconds: float
) -> None:
    seconds = FORMULAS[kind][name].seconds(5, 5000, LINK)
    assert seconds == pytest.approx(milliseconds / 1e3, rel=1e-12)


def test_every_formula_has_a_value_computed_by_hand() -> None:
    assert len(NAMES) == 10


def ring_all_gather(group: int) -> tuple[int, int]:
    """Rounds, and blocks that the busiest rank sends, of the schedule itself."""
    held = [{rank} for rank in range(group)]
    rounds = sent = 0
    while any(len(blocks) < group for blocks in held):
        passed = [(rank - rounds) % group for rank in range(group)]
        assert all(block in held[rank] for rank, block in enumerate(passed))
        for rank, block in enumerate(passed):
            held[(rank + 1) % group].add(block)
        rounds, sent = rounds + 1, sent + 1
    return rounds, sent


def bruck_all_gather(group: int) -> tuple[int, int]:
    """Each round, every rank gets what one twice as far away has, as far as it lacks it."""
    count, rounds, sent = 1, 0, 0
    while count < group:
        more = min(count, group - count)
        count, rounds, sent = count + more, rounds + 1, sent + more
    return rounds, sent


def bruck_all_to_all(group: int) -> tuple[int, int]:
    """In round `k` a rank passes on all blocks whose distance has the bit `k`."""
    rounds = [bit for bit in range(32) if 1 << bit < group]
    return len(rounds), max(
        (sum(distance >> bit & 1 for distance in range(group)) for bit in rounds), default=0
    )


@pytest.mark.parametrize("group", range(1, 20))
def test_formulas_count_the_messages_of_schedules(group: int) -> None:
    for kind in ("all-gather", "reduce-scatter"):
        for formula, schedule in zip(
            FORMULAS[kind].values(), (ring_all_gather, bruck_all_gather), strict=True
        ):
            rounds, blocks = schedule(group)
            assert formula.rounds(group) == rounds
            assert formula.parts(group) == blocks
    rounds, most = bruck_all_to_all(group)
    bruck = FORMULAS["all-to-all"]["bruck"]
    assert bruck.rounds(group) == rounds
    # At most half of the blocks a round, and just that where `p` is a power of two.
    assert bruck.parts(group) >= Fraction(rounds * most)
    if group & (group - 1) == 0:
        assert bruck.parts(group) == Fraction(rounds * most)


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_a_rank_by_itself_takes_no_time(kind: str, name: str) -> None:
    assert FORMULAS[kind][name].seconds(1, 1 << 30, LINK) == 0


@given(st.sampled_from(NAMES), st.integers(1, 600), st.integers(0, 1 << 40), links)
def test_more_bytes_and_more_ranks_never_take_less(
    named: tuple[str, str], group: int, size_bytes: int, link: Link
) -> None:
    formula = FORMULAS[named[0]][named[1]]
    seconds = formula.seconds(group, size_bytes, link)
    slack = 1 + 1e-12
    assert seconds <= formula.seconds(group, size_bytes + 4096, link) * slack
    assert seconds <= formula.seconds(group + 1, size_bytes, link) * slack
    assert math.isclose(
        seconds, formula.latency_s(group, link) + formula.transfer_s(group, size_bytes, link)
    )


@given(
    st.sampled_from(sorted(FORMULAS)),
    st.sampled_from(sorted(LIBRARIES)),
    st.integers(1, 600),
    st.integers(0, 1 << 40),
    links,
)
def test_the_fastest_of_a_library_is_taken(
    kind: str, library: str, group: int, size_bytes: int, link: Link
) -> None:
    taken = fastest_formula(kind, group, size_bytes, link, library)
    assert taken.name in LIBRARIES[library][kind]
    seconds = taken.seconds(group, size_bytes, link)
    for name in LIBRARIES[library][kind]:
        assert seconds <= FORMULAS[kind][name].seconds(group, size_bytes, link)
    assert fastest_formula(kind, group, size_bytes, link).seconds(group, size_bytes, link) <= (
        seconds
    )


def test_small_ones_wait_for_messages_and_large_ones_for_bytes() -> None:
    def name(kind: str, size_bytes: int, library: str = "any") -> str:
        return fastest_formula(kind, 64, size_bytes, Link(50e9, 1e-5), library).name

    assert name("all-to-all", 1_000) == "bruck"
    assert name("all-to-all", 1_000_000_000) == "pairwise"
    assert name("all-reduce", 1_000, "nccl") == "tree"
    assert name("all-reduce", 10_000_000_000, "nccl") == "ring"
    assert name("all-reduce", 1_000, "gloo") == "ring"


def test_libraries_have_every_kind_and_known_algorithms_only() -> None:
    for algorithms in LIBRARIES.values():
        assert algorithms.keys() == FORMULAS.keys()
        for kind, names in algorithms.items():
            assert names and set(names) <= set(FORMULAS[kind])


@pytest.mark.parametrize(
    ("kind", "group", "size_bytes", "library", "message"),
    [
        ("gather", 2, 1, "any", "unknown kind of collective 'gather'"),
        ("permute", 2, 1, "mpi", "unknown library 'mpi'"),
        ("permute", 0, 1, "any", "a group of 0 ranks"),
        ("permute", 2, -1, "any", "a permute of -1 bytes"),
        ("permute", 2, math.nan, "any", "a permute of nan bytes"),
        ("permute", 2, math.inf, "any", "a permute of inf bytes"),
    ],
)
def test_invalid_values_are_refused(
    kind: str, group: int, size_bytes: float, library: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        fastest_formula(kind, group, size_bytes, LINK, library)
