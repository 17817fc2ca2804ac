"""Cost formulas of collectives in a group of `p` ranks, by algorithm.

A message of `n` bytes takes `alpha + n / beta` seconds: a latency, and the bytes over the
bandwidth (Hockney 1994). A rank sends a single message at a time, and receives another in parallel.
The cost of an algorithm is then given by two numbers: its rounds, and the share of `n` that passes
the busiest link.

::

    seconds = rounds * alpha + share * n / beta

    kind            algorithm         rounds             share of n
    --------------  ----------------  -----------------  --------------
    all-gather      ring              p - 1              (p - 1) / p
                    doubling          ceil(log2 p)       (p - 1) / p
    reduce-scatter  ring              p - 1              (p - 1) / p
                    halving           ceil(log2 p)       (p - 1) / p
    all-reduce      ring              2 (p - 1)          2 (p - 1) / p
                    tree              2 ceil(log2 p)     2
                    halving-doubling  2 ceil(log2 p)     2 (p - 1) / p
    all-to-all      pairwise          p - 1              (p - 1) / p
                    bruck             ceil(log2 p)       ceil(log2 p) / 2
    permute         direct            1                  1

`n` is the number of bytes of a rank after an all-gather, before a reduce-scatter, before and after
an all-reduce, before an all-to-all (including its own share), and of the shard of a permute.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005 (ring, doubling, halving, pairwise); Rabenseifner, "Optimization of Collective
Reduction Operations", 2004 (halving-doubling); Bruck et al., "Efficient Algorithms for
All-to-All Communications in Multiport Message-Passing Systems", 1997, which needs no power of
two in doubling either, and, run backwards, in halving (Träff 2023); Sanders, Speck and Träff,
"Two-Tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan", 2009 (tree, in many
small messages); Chan et al., "Collective communication: theory, practice, and experience", 2007.

Reductions and packing take no time here, and links do not contend. If these were measured, the
`Overhead` of a topology has effective links for each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from reshard._records import Record
from reshard.errors import UsageError
from reshard.topology import Link


def _count_doublings(group: int) -> int:
    """Return `ceil(log2(group))`, exactly."""
    return (group - 1).bit_length()


class Formula(Record):
    """An algorithm of a kind of collective, as the two numbers of its cost.

    Args:
        name: of the algorithm.
        rounds: number of consecutive messages of a rank, as a function of the group size.
        parts: their total in `p`-ths of `n`, as a function of the group size.

    >>> ring = FORMULAS["all-gather"]["ring"]
    >>> ring.rounds(8), ring.busiest_bytes(8, 800)
    (7, 700.0)
    >>> ring.seconds(8, 800, Link(1e6, latency_s=1e-4))
    0.0014
    """

    name: str
    rounds: Callable[[int], int]
    parts: Callable[[int], int | Fraction]

    def busiest_bytes(self, group: int, size_bytes: float | Fraction) -> float:
        """Return the bytes that the busiest rank of the group sends, or receives."""
        return float(self.parts(group) * size_bytes / group)

    def latency_s(self, group: int, link: Link) -> float:
        """Return the seconds that do not depend on the size."""
        return self.rounds(group) * link.latency_s

    def transfer_s(self, group: int, size_bytes: float | Fraction, link: Link) -> float:
        """Return the seconds of the busiest rank's bytes."""
        return self.busiest_bytes(group, size_bytes) / link.bandwidth_bytes_per_s

    def seconds(self, group: int, size_bytes: float | Fraction, link: Link) -> float:
        """Return the total seconds."""
        return self.latency_s(group, link) + self.transfer_s(group, size_bytes, link)


def _by_name(*formulas: Formula) -> dict[str, Formula]:
    return {formula.name: formula for formula in formulas}


# By kind, then by algorithm. The first of a kind moves the fewest bytes.
FORMULAS: dict[str, dict[str, Formula]] = {
    "all-gather": _by_name(
        Formula("ring", lambda p: p - 1, lambda p: p - 1),
        Formula("doubling", _count_doublings, lambda p: p - 1),
    ),
    "reduce-scatter": _by_name(
        Formula("ring", lambda p: p - 1, lambda p: p - 1),
        Formula("halving", _count_doublings, lambda p: p - 1),
    ),
    "all-reduce": _by_name(
        Formula("ring", lambda p: 2 * (p - 1), lambda p: 2 * (p - 1)),
        # A tree sends the whole up and down; a single rank sends nothing.
        Formula("tree", lambda p: 2 * _count_doublings(p), lambda p: 2 * p if p > 1 else 0),
        Formula("halving-doubling", lambda p: 2 * _count_doublings(p), lambda p: 2 * (p - 1)),
    ),
    "all-to-all": _by_name(
        Formula("pairwise", lambda p: p - 1, lambda p: p - 1),
        Formula("bruck", _count_doublings, lambda p: Fraction(_count_doublings(p) * p, 2)),
    ),
    "permute": _by_name(Formula("direct", lambda p: min(p - 1, 1), lambda p: p if p > 1 else 0)),
}

# The algorithms of each library. NCCL: the algorithms of NCCL_ALGO for any network. Gloo: its
# ring all-gather and its default, ring all-reduce, half of which represents a reduce-scatter. XLA:
# rings along the axes of a torus. All three send an all-to-all as a message per pair of ranks.
LIBRARIES: dict[str, dict[str, tuple[str, ...]]] = {
    "any": {kind: tuple(formulas) for kind, formulas in FORMULAS.items()},
    "nccl": {
        "all-gather": ("ring",),
        "reduce-scatter": ("ring",),
        "all-reduce": ("ring", "tree"),
        "all-to-all": ("pairwise",),
        "permute": ("direct",),
    },
    "gloo": {
        "all-gather": ("ring",),
        "reduce-scatter": ("ring",),
        "all-reduce": ("ring",),
        "all-to-all": ("pairwise",),
        "permute": ("direct",),
    },
    "xla": {
        "all-gather": ("ring",),
        "reduce-scatter": ("ring",),
        "all-reduce": ("ring",),
        "all-to-all": ("pairwise",),
        "permute": ("direct",),
    },
}


def check_library(library: str) -> None:
    """Raise UsageError for a library that is not a key of `LIBRARIES`."""
    if library not in LIBRARIES:
        raise UsageError(f"unknown library {library!r}; it is one of {', '.join(LIBRARIES)}")


def check_kind(kind: str) -> None:
    """Raise UsageError for a kind of collective that is not a key of `FORMULAS`."""
    if kind not in FORMULAS:
        raise UsageError(f"unknown kind of collective {kind!r}; it is one of {', '.join(FORMULAS)}")


def fastest_formula(
    kind: str, group: int, size_bytes: float | Fraction, link: Link, library: str = "any"
) -> Formula:
    """Return the fastest algorithm of a library; among equals, the first.

    Args:
        kind: a key of `FORMULAS`.
        group: number of ranks.
        size_bytes: `n` of the formulas.
        link: between any two ranks of the group.
        library: a key of `LIBRARIES`; "any" has all algorithms.

    Raises:
        UsageError: an unknown kind or library, no ranks, or a negative size.

    >>> link = Link(1e9, latency_s=1e-5)
    >>> [fastest_formula("all-to-all", 8, n, link).name for n in (1_000, 10_000_000)]
    ['bruck', 'pairwise']
    """
    check_library(library)
    check_kind(kind)
    if group < 1:
        raise UsageError(f"a {kind} in a group of {group} ranks; 1 or more were expected")
    if not 0 <= size_bytes < float("inf"):
        raise UsageError(f"a {kind} of {size_bytes} bytes; 0 or more were expected")
    # `min` returns the first of equals, and libraries list the algorithm of fewest bytes first.
    formulas = (FORMULAS[kind][name] for name in LIBRARIES[library][kind])
    return min(formulas, key=lambda formula: formula.seconds(group, size_bytes, link))
