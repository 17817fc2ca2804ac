"""In which round does each message go, so that no rank sends two at once, nor receives two?

A rank is two nodes, one that sends and one that receives, and a message is an edge between
them. Rounds are then a colouring of the edges of a bipartite multigraph, in which edges that
share a node differ. König (1916): as many colours suffice as the largest degree, which is the
most messages that any rank sends, or receives. No schedule has fewer. ::

    a scatter of 3          a two-way ring of 4

    0 --1--> 1              0 --1--> 1 --1--> 2 --1--> 3 --1--> 0
    0 --2--> 2              0 <--2-- 1 <--2-- 2 <--2-- 3 <--2-- 0
    0 --3--> 3              (the number on an arrow is its round)

The colours are found by Euler splitting (Gabow 1976; Gabow and Kariv 1982), of all parts of the
graph at the same time, as columns:

1. *Split*: at each node, pair its edges. Every edge now has at most one partner at either end, so
   the edges form rings, and every second edge of a ring goes to the other half. Each node keeps
   half of its edges in each half, rounded up or down.
2. A graph of degree at most `2**k` is split `k` times: the halves taken are the colour's digits.
3. Another degree `d` is split once, into halves of degree `c = ceil(d / 2)`. The first half is
   coloured in the same way; as many of its colours are then given to the second half as fill
   its degree up to a power of two, and step 2 colours that.
4. Where `2 * c` is `d + 1`, one colour is too many. The one of the fewest edges is dissolved:
   each of its edges takes a colour that is free at its sender, after the colours on the path
   from its receiver that alternates between that one and one free there were swapped.

Only integers decide, in an order that every rank shares.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reshard.errors import PlanError
from reshard.runs import IntArray

BoolArray = NDArray[np.bool_]


def fewest_rounds(sender: ArrayLike, receiver: ArrayLike) -> int:
    """The largest degree: the most messages that any rank sends, or that any receives.

    Args:
        sender, receiver: the ranks of each message, both of shape `(messages,)`.

    Raises:
        PlanError: columns that are not ranks, or of different lengths.

    >>> fewest_rounds([0, 0, 1], [1, 2, 2])
    2
    """
    return _largest_degree(*_checked(sender, receiver))


def message_rounds(
    sender: ArrayLike, receiver: ArrayLike, size_bytes: ArrayLike | None = None
) -> IntArray:
    """The round of each message: shape `(messages,)`, numbers from 0.

    In each round every rank sends at most one message and receives at most one; there are as
    few rounds as `fewest_rounds` says. Source: Gabow and Kariv, "Algorithms for edge coloring
    bipartite graphs and multigraphs", 1982.

    Args:
        sender, receiver: the ranks of each message, both of shape `(messages,)`.
        size_bytes: of each message. When given, the larger ones between the same two ranks go
            first, so that large messages share rounds.

    Raises:
        PlanError: columns that are not ranks, or of different lengths.

    >>> ring = list(range(8))
    >>> following, before = ring[1:] + ring[:1], ring[-1:] + ring[:-1]
    >>> rounds = message_rounds(ring + ring, following + before)
    >>> int(rounds.max()) + 1
    2
    >>> message_rounds([0, 0, 0], [1, 2, 3]).tolist()
    [0, 1, 2]
    """
    sends, receives = _checked(sender, receiver)
    degree = _largest_degree(sends, receives)
    if degree == 0:
        return np.zeros(0, dtype=np.int64)
    left, right = _shared_nodes(sends, degree), _shared_nodes(receives, degree)
    colour = _coloured(left, right, degree)
    sizes = None if size_bytes is None else np.asarray(size_bytes, dtype=np.int64)
    if sizes is not None and sizes.shape != sends.shape:
        raise PlanError(f"{sizes.size} sizes for {len(sends)} messages; give one for each")
    return _larger_first(sends, receives, _in_order(colour), sizes)


def _checked(sender: ArrayLike, receiver: ArrayLike) -> tuple[IntArray, IntArray]:
    columns = []
    for name, ranks in (("senders", sender), ("receivers", receiver)):
        column = np.asarray(ranks)
        if column.size == 0:
            column = column.astype(np.int64)
        if column.ndim != 1 or column.dtype.kind not in "iu":
            raise PlanError(f"{name} {column!r}: expected a column of rank numbers")
        columns.append(column.astype(np.int64))
        if len(column) and columns[-1].min() < 0:
            raise PlanError(f"{name} have the rank {columns[-1].min()}; ranks count from 0")
    if len(columns[0]) != len(columns[1]):
        raise PlanError(
            f"{len(columns[0])} senders for {len(columns[1])} receivers; a message has one of each"
        )
    return columns[0], columns[1]


def _largest_degree(left: IntArray, right: IntArray) -> int:
    return max(int(_degrees(column).max(initial=0)) for column in (left, right))


def _degrees(nodes: IntArray) -> IntArray:
    """How often each node occurs, the nodes that do in rising order."""
    return np.unique(nodes, return_counts=True)[1]


def _shared_nodes(ranks: IntArray, degree: int) -> IntArray:
    """The node of each message: ranks that have few messages share one, up to `degree` together.

    What differs at a shared node differs at each of its ranks, and no more than twice
    `messages / degree` nodes are left, so tables of node and colour stay small.
    """
    _, number, counts = np.unique(ranks, return_inverse=True, return_counts=True)
    node_of, node, filled = [], 0, 0
    for count in counts.tolist():
        if filled + count > degree:
            node, filled = node + 1, 0
        filled += count
        node_of.append(node)
    return np.array(node_of, dtype=np.int64)[number.reshape(-1)]


def _coloured(left: IntArray, right: IntArray, degree: int) -> IntArray:
    """A colour below `degree` for every edge of a graph of that degree at most."""
    if degree & (degree - 1) == 0:
        return _coloured_by_halving(left, right, degree)
    second = _split(left, right, np.zeros(len(left), dtype=np.int64))
    half = (degree + 1) // 2
    power = 1 << (half - 1).bit_length()
    first = np.flatnonzero(~second)
    colour = np.full(len(left), -1, dtype=np.int64)
    colour[first] = _coloured(left[first], right[first], half)
    # The colours from `keep` on go over to the second half, and are found anew there.
    keep = 2 * half - power
    moved = np.flatnonzero(second | (colour >= keep))
    colour[moved] = keep + _coloured_by_halving(left[moved], right[moved], power)
    if 2 * half > degree:
        _dissolve_a_colour(left, right, colour, 2 * half)
    return colour


def _coloured_by_halving(left: IntArray, right: IntArray, degree: int) -> IntArray:
    """The same where `degree` is a power of two."""
    colour = np.zeros(len(left), dtype=np.int64)
    for _ in range(degree.bit_length() - 1):
        colour = 2 * colour + _split(left, right, colour)
    return colour


def _split(left: IntArray, right: IntArray, group: IntArray) -> BoolArray:
    """Which edges go to the second half of their group.

    Of the edges that a node has in a group, half go there, rounded up or down.
    """
    by_left = _partners(left, group)
    by_right = _partners(right, group)
    # Two steps along a ring lead to an edge of the same half. An edge of one half and its partner
    # are on the two orbits of the ring, which are told apart by their smallest edge.
    jump = by_left[by_right]
    smallest = np.minimum(np.arange(len(jump), dtype=jump.dtype), jump)
    while True:
        # The smallest of a stretch, then of one twice as long, until nothing is new.
        jump = jump[jump]
        found = np.minimum(smallest, smallest[jump])
        if np.array_equal(found, smallest):
            break
        smallest = found
    halves: BoolArray = smallest > smallest[by_left]
    return halves[: len(left)]


def _partners(node: IntArray, group: IntArray) -> NDArray[np.int32]:
    """Pairs of edges that must go to different halves: the partner of each.

    The edges of a node within a group are paired with each other. One of an odd number is left
    over; those are paired among themselves, which does no harm. If there is an odd number of
    edges, one more is made up.
    """
    count = len(node)
    key = group * (int(node.max(initial=0)) + 1) + node
    order = np.argsort(key, kind="stable").astype(np.int32)
    key = key[order]
    ends = np.append(np.flatnonzero(key[1:] != key[:-1]), count - 1)
    lengths = np.diff(ends, prepend=-1)
    over = np.zeros(count, dtype=bool)
    over[ends[lengths % 2 == 1]] = True
    paired = np.concatenate((order[~over], order[over], np.arange(count, count + count % 2)))
    partner = np.empty(len(paired), dtype=np.int32)
    partner[paired[0::2]] = paired[1::2]
    partner[paired[1::2]] = paired[0::2]
    return partner


def _dissolve_a_colour(left: IntArray, right: IntArray, colour: IntArray, colours: int) -> None:
    """Bring edges of `colours` colours down to one less, where no node has that many edges."""
    fewest = int(np.bincount(colour, minlength=colours).argmin())
    rest = np.flatnonzero(colour == fewest)
    colour[colour == colours - 1] = fewest
    colour[rest] = -1
    nodes = int(left.max()) + 1
    ends = np.stack((left, right + nodes))
    edge_at = np.full((int(ends.max()) + 1, colours - 1), -1, dtype=np.int64)
    coloured = np.flatnonzero(colour >= 0)
    for end in ends:
        edge_at[end[coloured], colour[coloured]] = coloured
    for edge in rest.tolist():
        sender, receiver = int(ends[0, edge]), int(ends[1, edge])
        free_at_sender, free_at_receiver = edge_at[sender] < 0, edge_at[receiver] < 0
        both = free_at_sender & free_at_receiver
        if both.any():
            chosen = int(both.argmax())
        else:
            chosen = int(free_at_sender.argmax())
            _swap_along(edge_at, ends, colour, receiver, chosen, int(free_at_receiver.argmax()))
        colour[edge] = chosen
        edge_at[sender, chosen] = edge_at[receiver, chosen] = edge


def _swap_along(
    edge_at: IntArray, ends: IntArray, colour: IntArray, node: int, taken: int, free: int
) -> None:
    """Make `taken` free at `node`: swap the two colours along the path that begins there.

    The path cannot come back to the sender of the edge in question: it reaches senders by edges
    of the colour `taken`, which is free there.
    """
    path: list[int] = []
    following, other = taken, free
    while (edge := int(edge_at[node, following])) >= 0:
        path.append(edge)
        node = int(ends[0, edge] + ends[1, edge]) - node
        following, other = other, following
    for edge in path:
        edge_at[ends[:, edge], colour[edge]] = -1
    for edge in path:
        swapped = free if colour[edge] == taken else taken
        colour[edge] = swapped
        edge_at[ends[:, edge], swapped] = edge


def _in_order(colour: IntArray) -> IntArray:
    """The same colours numbered in the order in which they first occur."""
    _, first, number = np.unique(colour, return_index=True, return_inverse=True)
    place = np.empty(len(first), dtype=np.int64)
    place[np.argsort(first, kind="stable")] = np.arange(len(first))
    return place[number.reshape(-1)]


def _larger_first(
    sender: IntArray, receiver: IntArray, rounds: IntArray, sizes: IntArray | None
) -> IntArray:
    """Messages between the same two ranks trade rounds: in their order, or the larger first."""
    position = np.arange(len(sender))
    by_size = np.lexsort((position, position if sizes is None else -sizes, receiver, sender))
    by_round = np.lexsort((rounds, receiver, sender))
    traded = np.empty_like(rounds)
    traded[by_size] = rounds[by_round]
    return traded
