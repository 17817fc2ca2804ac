"""Fused parameters of checkpoints, bound to the bytes of their members, and members to theirs.

Nothing is copied: a tensor is bound to byte ranges in the files of other tensors::

    file          | q q k v | q q k v |  = linear_qkv, read in place
    q_proj          0:2       4:6           two boxes of rows, each with its own address
    k_proj              2         6

1. A stored tensor is a set of boxes of elements, each taken from one shard (`spans.source_tiles`),
   with its offset in a file and its strides there.
2. A member has the boxes inside its intervals. A member of a stack has those at its index, without
   that dimension; for a transposed one the last two dimensions are swapped, with their strides.
3. A fused parameter has the boxes of its members, by the inverse steps. So shards may be split
   anywhere, also inside a group or a head.
4. Members whose indices alternate (gate and up of gpt-oss) are boxes with twice the stride; two
   such boxes that interleave are merged into one box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from reshard.binding import Binding, FileRange, View
from reshard.checkpoint.blocks.spans import is_dense, source_tiles
from reshard.checkpoint.contents import StoredTensor
from reshard.errors import RecipeError
from reshard.layout import Box, Layout
from reshard.recipes.naming import Fusion

MAX_BOXES = 100_000


class StoredBox(NamedTuple):
    """A box of a tensor on the rank `slot`, with its first byte `place` and its `strides` there."""

    slot: int
    box: Box
    place: FileRange
    strides: tuple[int, ...]

    def moved(
        self, box: Box, offset_bytes: int = 0, strides: tuple[int, ...] | None = None
    ) -> StoredBox:
        """Return the elements `offset_bytes` further on, as `box`."""
        place = FileRange(self.place.path, self.place.start_bytes + offset_bytes)
        return StoredBox(self.slot, box, place, self.strides if strides is None else strides)


class _Share(NamedTuple):
    """The indices of a member in a fused dimension: `size` from `start` on, in each of `groups`.

    A group has `period` indices; the member has those of all groups, in order.
    """

    start: int
    size: int
    groups: int
    period: int

    @property
    def alternates(self) -> bool:
        """Whether the member has single indices at equal distances."""
        return self.size == 1 and self.groups > 1

    @property
    def length(self) -> int:
        """The length of the member."""
        return self.size * self.groups


def split_into_members(tensor: StoredTensor, fusion: Fusion) -> Iterator[StoredTensor]:
    """Yield the members of a fused parameter, and for a stack those of each index.

    Raises:
        RecipeError: a shape that cannot be divided among members; more than `MAX_BOXES` boxes.
    """
    try:
        whole = fusion.shape_of_members(tensor.shape)
    except RecipeError as error:
        raise RecipeError(f"{tensor.name!r} has {error}") from None
    at, itemsize_bytes = fusion.dimension, tensor.dtype.itemsize_bytes
    shares = _find_shares(tensor.name, fusion, whole[at])
    boxes = list(list_stored_boxes(tensor))
    for number, of_number in enumerate(_unstack(boxes, itemsize_bytes, fusion)):
        own = [swap_last_dimensions(part) for part in of_number] if fusion.transposed else of_number
        for member, share in zip(fusion.members, shares, strict=True):
            shape = (*whole[:at], share.length, *whole[at + 1 :])
            moved = (p for part in own for p in _take_share(part, itemsize_bytes, at, share))
            yield bind_boxes(member.replace("{}", str(number)), tensor, shape, moved)


def fuse_members(name: str, fusion: Fusion, members: Sequence[StoredTensor]) -> StoredTensor:
    """Return the fused parameter of members, given in the order of `fusion.tensors`.

    Raises:
        RecipeError: members that do not fit together, or more than `MAX_BOXES` boxes.
    """
    at, first = fusion.dimension, members[0]
    together = len(fusion.members)
    # 1. Members must agree in type, and in every dimension but the fused one.
    for number, member in enumerate(members):
        alike = members[number % together]
        is_alike = member.dtype is first.dtype and _drop_dimension(
            member.shape, at
        ) == _drop_dimension(first.shape, at)
        if not is_alike or at >= len(member.shape) or member.shape != alike.shape:
            raise RecipeError(
                f"{name!r} cannot be fused of {first.name!r}, {first.dtype.name} "
                f"{list(first.shape)}, and {member.name!r}, {member.dtype.name} "
                f"{list(member.shape)}"
            )
    # 2. Their lengths must be in the proportion of the fusion's shares.
    lengths = [member.shape[at] for member in members[:together]]
    shares = _find_shares(name, fusion, sum(lengths))
    if [share.length for share in shares] != lengths:
        named = zip(members[:together], lengths, strict=True)
        raise RecipeError(
            f"{name!r} is fused of {', '.join(f'{n} of {member.name!r}' for member, n in named)} "
            f"along dimension {at}, which are not in the proportion of "
            f"{':'.join(map(str, fusion.shares))}; correct config.json"
        )
    whole = (*first.shape[:at], sum(lengths), *first.shape[at + 1 :])
    if fusion.transposed and len(whole) < 2:
        raise RecipeError(f"{name!r} would be {first.name!r} {list(first.shape)} transposed")

    # 3. Each member's boxes move to its indices of the fused dimension; no byte moves.
    def move_all() -> Iterator[StoredBox]:
        for number in range(len(members) // together):
            of_number = members[number * together : (number + 1) * together]
            for part in _put_shares(of_number, at, shares):
                swapped = swap_last_dimensions(part) if fusion.transposed else part
                yield _stack(swapped, number) if fusion.stacked else swapped

    return bind_boxes(name, first, fusion.shape_with(whole), move_all())


def slice_rows(tensor: StoredTensor, rows: int) -> StoredTensor:
    """Return the first `rows` of a tensor, bound to the same bytes.

    Raises:
        RecipeError: more than `MAX_BOXES` boxes.
    """

    def clip() -> Iterator[StoredBox]:
        for part in list_stored_boxes(tensor):
            low, high = part.box.start[0], min(part.box.stop[0], rows)
            if low < rows:
                yield part.moved(_replace(part.box, 0, low, high))

    return bind_boxes(tensor.name, tensor, (rows, *tensor.shape[1:]), clip())


def deinterleave_rows(tensor: StoredTensor, heads: int) -> StoredTensor:
    """Return a tensor with the rows of each head in two halves instead of in pairs.

    Rotary embeddings rotate pairs of a head's rows. Some programs store the rows of a pair next to
    each other, others store the first rows of all pairs before the second rows::

        stored    0 1 | 2 3 | 4 5        returned    0 2 4 | 1 3 5

    Args:
        tensor: with `heads` equal blocks of rows, bound to files.
        heads: the number of heads.

    Raises:
        RecipeError: rows that are not so many heads of pairs, or more than `MAX_BOXES` boxes.
    """
    rows = tensor.shape[0] if tensor.shape else 0
    length, rest = divmod(rows, heads)
    if rest or length % 2 or not rows:
        raise RecipeError(
            f"{tensor.name!r} has shape {list(tensor.shape)}, whose rows are not {heads} heads of "
            "pairs; correct the number of heads in config.json"
        )
    half, itemsize_bytes = length // 2, tensor.dtype.itemsize_bytes

    def move() -> Iterator[StoredBox]:
        for part in list_stored_boxes(tensor):
            low, high, stride = part.box.start[0], part.box.stop[0], part.strides[0]
            strides = (2 * stride, *part.strides[1:])
            for head in range(low // length, -(-high // length)):
                for parity in range(2):
                    # The rows first, first + 2, first + 4 ... of the head that are in the box.
                    first = head * length + parity
                    begin = max(0, -(-(low - first) // 2))
                    end = min(half, -(-(high - first) // 2))
                    if begin < end:
                        to = head * length + parity * half
                        box = _replace(part.box, 0, to + begin, to + end)
                        offset_bytes = (first + 2 * begin - low) * stride * itemsize_bytes
                        yield part.moved(box, offset_bytes, strides)

    return bind_boxes(tensor.name, tensor, tensor.shape, move())


def _drop_dimension(shape: tuple[int, ...], dimension: int) -> tuple[int, ...]:
    return (*shape[:dimension], *shape[dimension + 1 :])


def _find_shares(name: str, fusion: Fusion, length: int) -> tuple[_Share, ...]:
    """Return each member's indices along the dimension, such as q, k and v of every group."""
    try:
        sizes = fusion.shares_of_group(length)
    except RecipeError as error:
        raise RecipeError(f"the fused parameter {name!r}: {error}") from None
    groups = fusion.groups if isinstance(fusion.groups, int) else 1
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(
        _Share(start, n, groups, sum(sizes)) for start, n in zip(starts, sizes, strict=False)
    )


def list_stored_boxes(tensor: StoredTensor) -> Iterator[StoredBox]:
    """Yield the boxes that a tensor consists of, each element in one of them."""
    for tile in source_tiles(tensor.assembly).tiles:
        place = tensor.file_range(tile.slot, tile.number, tile.offset)
        view = tensor.view(tile.slot, tile.number) or View.row_major(tile.local_shape)
        dimensions = [
            list(zip(*(column.tolist() for column in columns), strict=True))
            for columns in zip(tile.start, tile.length, tile.local, strict=True)
        ]
        for pieces in itertools.product(*dimensions):
            offset = view.offset + sum(
                local * stride for (_, _, local), stride in zip(pieces, view.strides, strict=True)
            )
            start_bytes = place.start_bytes + offset * tensor.dtype.itemsize_bytes
            start = tuple(begin for begin, _, _ in pieces)
            stop = tuple(begin + length for begin, length, _ in pieces)
            here = FileRange(place.path, start_bytes)
            yield StoredBox(tile.slot, Box(start, stop), here, view.strides)


def _unstack(boxes: list[StoredBox], itemsize_bytes: int, fusion: Fusion) -> list[list[StoredBox]]:
    """Return the boxes of each index of a stack, without its dimension, or all boxes if there is no
    stack.
    """
    if not isinstance(fusion.stacked, int) or not fusion.stacked:
        return [boxes]
    return split_stack(boxes, itemsize_bytes, fusion.stacked)


def split_stack(
    boxes: Iterable[StoredBox], itemsize_bytes: int, count: int
) -> list[list[StoredBox]]:
    """Return the boxes of each of `count` indices of the first dimension, without it."""
    by_number: list[list[StoredBox]] = [[] for _ in range(count)]
    for part in boxes:
        box, first = Box(part.box.start[1:], part.box.stop[1:]), part.box.start[0]
        for number in range(first, part.box.stop[0]):
            offset_bytes = (number - first) * part.strides[0] * itemsize_bytes
            by_number[number].append(part.moved(box, offset_bytes, part.strides[1:]))
    return by_number


def _stack(part: StoredBox, number: int) -> StoredBox:
    """Return a box as index `number` of a stack."""
    box = Box((number, *part.box.start), (number + 1, *part.box.stop))
    return part.moved(box, strides=(math.prod(part.box.shape), *part.strides))


def swap_last_dimensions(part: StoredBox) -> StoredBox:
    """Return a box with its last two dimensions swapped."""
    box = Box(_swap_last(part.box.start), _swap_last(part.box.stop))
    return part.moved(box, strides=_swap_last(part.strides))


def _swap_last(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return (*numbers[:-2], numbers[-1], numbers[-2])


def _take_share(
    part: StoredBox, itemsize_bytes: int, at: int, share: _Share
) -> Iterator[StoredBox]:
    """Yield the parts of a fused parameter's box that belong to a member."""
    low, high, stride = part.box.start[at], part.box.stop[at], part.strides[at]
    if share.alternates:
        # The member's indices at or after `low` and before `high`.
        begin = max(0, -(-(low - share.start) // share.period))
        end = min(share.groups, -(-(high - share.start) // share.period))
        if begin < end:
            further = (share.start + begin * share.period - low) * stride * itemsize_bytes
            strides = (*part.strides[:at], stride * share.period, *part.strides[at + 1 :])
            yield part.moved(_replace(part.box, at, begin, end), further, strides)
        return
    first = max(0, (low - share.start - share.size) // share.period)
    for group in range(first, share.groups):
        start = share.start + group * share.period
        begin, end = max(low, start), min(high, start + share.size)
        if start >= high:
            return
        if begin < end:
            ahead = group * share.size - start
            box = _replace(part.box, at, begin + ahead, end + ahead)
            yield part.moved(box, (begin - low) * stride * itemsize_bytes)


def _put_shares(
    members: Sequence[StoredTensor], at: int, shares: Sequence[_Share]
) -> Iterator[StoredBox]:
    """Yield the boxes of members at their indices of the fused dimension."""
    itemsize_bytes = members[0].dtype.itemsize_bytes
    boxes = [list(list_stored_boxes(member)) for member in members]
    if all(share.alternates for share in shares) and len(shares) > 1:
        yield from _alternate(boxes, itemsize_bytes, at)
        return
    for own, share in zip(boxes, shares, strict=True):
        for part in own:
            low, high, stride = part.box.start[at], part.box.stop[at], part.strides[at]
            for group in range(low // max(share.size, 1), share.groups):
                start = group * share.size
                begin, end = max(low, start), min(high, start + share.size)
                if start >= high:
                    break
                if begin < end:
                    ahead = share.start + group * share.period - start
                    box = _replace(part.box, at, begin + ahead, end + ahead)
                    yield part.moved(box, (begin - low) * stride * itemsize_bytes)


def _alternate(
    boxes: Sequence[Sequence[StoredBox]], itemsize_bytes: int, at: int
) -> Iterator[StoredBox]:
    """Yield the boxes of members whose indices alternate.

    Boxes of all members that interleave in one file are merged; otherwise each index is a box.
    """
    period = len(boxes)
    alike: dict[tuple[object, ...], dict[int, StoredBox]] = {}
    for number, own in enumerate(boxes):
        for part in own:
            key = (part.slot, part.place.path, part.box, part.strides)
            alike.setdefault(key, {})[number] = part
    for of_members in alike.values():
        part = next(iter(of_members.values()))
        low, high, stride = part.box.start[at], part.box.stop[at], part.strides[at]
        starts = [m.place.start_bytes for _, m in sorted(of_members.items())]
        step, rest = divmod(stride, period)
        expected = [starts[0] + n * step * itemsize_bytes for n in range(period)]
        if not rest and starts == expected:
            strides = (*part.strides[:at], step, *part.strides[at + 1 :])
            yield of_members[0].moved(
                _replace(part.box, at, low * period, high * period), 0, strides
            )
            continue
        for number, alone in of_members.items():
            for index in range(low, high):
                place = index * period + number
                further = (index - low) * stride * itemsize_bytes
                yield alone.moved(_replace(alone.box, at, place, place + 1), further)


def _replace(box: Box, dimension: int, start: int, stop: int) -> Box:
    """Return a box with other indices of one dimension."""
    return Box(
        (*box.start[:dimension], start, *box.start[dimension + 1 :]),
        (*box.stop[:dimension], stop, *box.stop[dimension + 1 :]),
    )


def bind_boxes(
    name: str, like: StoredTensor, shape: tuple[int, ...], parts: Iterable[StoredBox]
) -> StoredTensor:
    """Return a tensor that consists of boxes, with the type and the ranks of `like`."""
    boxes = []
    for part in parts:
        boxes.append(part)
        if len(boxes) > MAX_BOXES:
            raise RecipeError(
                f"{name!r} would consist of more than {MAX_BOXES} ranges of files; convert the "
                "source to whole tensors first (--to full), and change names then"
            )
    if not boxes:
        # An empty tensor needs an address too: that of a shard it came from.
        slot, strides = like.stored_slots[0], View.row_major(shape).strides
        whole = Box((0,) * len(shape), shape)
        boxes.append(StoredBox(slot, whole, like.file_range(slot), strides))
    slots = max(like.layout.slots, max(part.slot for part in boxes) + 1)
    return StoredTensor(name, like.dtype, bind_stored_boxes(shape, boxes, slots))


def bind_stored_boxes(shape: tuple[int, ...], boxes: Sequence[StoredBox], slots: int) -> Binding:
    """Return the binding of boxes over `slots` ranks: their layout, addresses and strides."""
    addresses: dict[int, list[FileRange]] = {}
    views: dict[int, list[View]] = {}
    strided: set[int] = set()
    for slot, box, place, strides in boxes:
        view = View(0, strides)
        if is_dense(view, box.shape):
            view = View.row_major(box.shape)
        else:
            strided.add(slot)
        addresses.setdefault(slot, []).append(place)
        views.setdefault(slot, []).append(view)
    return Binding(
        Layout.from_boxes(shape, [(part.slot, part.box) for part in boxes], slots),
        {slot: tuple(places) for slot, places in addresses.items()},
        {slot: tuple(views[slot]) for slot in strided},
    )
