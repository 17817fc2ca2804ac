"""Fused parameters bound to the bytes of their members, and members bound to fused parameters.

No bytes are copied: a tensor is bound to byte ranges in the files of other tensors::

    file          | q q k v | q q k v |  = linear_qkv, read in place
    q_proj          0:2       4:6           two boxes of rows, each with its own address
    k_proj              2         6

1. A stored tensor is a list of regions of files (`geometry.regions`), each with the rank that
   stores it. Offsets and strides are in bytes.
2. A member has the regions inside its intervals. A member of a stack has the regions at its index,
   without that dimension; for a transposed member the last two dimensions are swapped.
3. A fused parameter has the regions of its members, by the inverse steps. Shards may therefore be
   split anywhere, also inside a group or a head.
4. Members whose indices alternate (gate and up of gpt-oss) are regions with twice the stride; two
   such regions that interleave are merged into a single region.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from reshard.binding import View
from reshard.checkpoint.blocks.spans import source_tiles
from reshard.checkpoint.contents import StoredTensor
from reshard.errors import RecipeError
from reshard.geometry.regions import Region, bind_regions
from reshard.recipes.naming import Fusion

# Each of these ranges is a request or a call of the system for a few bytes.
MAX_BOXES = 100_000

# A part of a tensor that the rank `slot` stores: (slot, region of a file in bytes).
StoredRegion = tuple[int, Region]


class _Share(NamedTuple):
    """The indices of a member in a fused dimension: `size` from `start` on, in each of `groups`.

    A group has `period` indices; the member consists of its indices in all groups, in order.
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

    def take_from(self, region: Region, dimension: int) -> Iterator[Region]:
        """Yield the parts of a fused parameter's region that belong to the member."""
        if self.alternates:
            taken = region.step(dimension, self.start, self.period, self.groups)
            if taken is not None:
                yield taken
            return
        low, high = region.start[dimension], region.stop[dimension]
        first = max(0, (low - self.start - self.size) // self.period)
        for group in range(first, self.groups):
            start = self.start + group * self.period
            if start >= high:
                return
            taken = region.step(dimension, start, 1, self.size, at=group * self.size)
            if taken is not None:
                yield taken

    def put_into(self, region: Region, dimension: int) -> Iterator[Region]:
        """Yield the parts of a member's region at their indices of the fused dimension."""
        low, high = region.start[dimension], region.stop[dimension]
        # The size of a member without elements is 0.
        for group in range(low // max(self.size, 1), self.groups):
            start = group * self.size
            if start >= high:
                return
            at = self.start + group * self.period
            part = region.step(dimension, start, 1, self.size, at=at)
            if part is not None:
                yield part


def split_into_members(tensor: StoredTensor, fusion: Fusion) -> Iterator[StoredTensor]:
    """Yield the members of a fused parameter; for a stack, the members of each index.

    Raises:
        RecipeError: a shape that cannot be divided among members; more than `MAX_BOXES` regions.
    """
    try:
        whole = fusion.shape_of_members(tensor.shape)
    except RecipeError as error:
        raise RecipeError(f"{tensor.name!r} has {error}") from None
    at = fusion.dimension
    shares = _find_shares(tensor.name, fusion, whole[at])
    parts = list(list_stored_regions(tensor))
    stacked = fusion.stacked if isinstance(fusion.stacked, int) else 0
    for number, of_number in enumerate(split_stack(parts, stacked) if stacked else [parts]):
        own = list(swap_last_dimensions(of_number)) if fusion.transposed else of_number
        for member, share in zip(fusion.members, shares, strict=True):
            shape = (*whole[:at], share.length, *whole[at + 1 :])
            moved = ((slot, taken) for slot, region in own for taken in share.take_from(region, at))
            yield bind_stored_regions(member.replace("{}", str(number)), tensor, shape, moved)


def fuse_members(name: str, fusion: Fusion, members: Sequence[StoredTensor]) -> StoredTensor:
    """Return the fused parameter of members, given in the order of `fusion.tensors`.

    Raises:
        RecipeError: members that do not fit together, or more than `MAX_BOXES` regions.
    """
    at, first = fusion.dimension, members[0]
    together = len(fusion.members)
    # 1. Members must agree in type, and in every dimension except the fused dimension.
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

    # 3. Each member's regions move to its indices of the fused dimension; no byte moves.
    def move_all() -> Iterator[StoredRegion]:
        for number in range(len(members) // together):
            of_number = members[number * together : (number + 1) * together]
            parts = _put_shares(of_number, at, shares)
            for slot, region in swap_last_dimensions(parts) if fusion.transposed else parts:
                yield slot, region.insert(0, number) if fusion.stacked else region

    return bind_stored_regions(name, first, fusion.shape_with(whole), move_all())


def slice_rows(tensor: StoredTensor, rows: int) -> StoredTensor:
    """Return the first `rows` of a tensor, bound to the same bytes.

    Raises:
        RecipeError: more than `MAX_BOXES` regions.
    """
    clipped = (
        (slot, region.narrow(0, region.start[0], min(region.stop[0], rows)))
        for slot, region in list_stored_regions(tensor)
        if region.start[0] < rows
    )
    return bind_stored_regions(tensor.name, tensor, (rows, *tensor.shape[1:]), clipped)


def deinterleave_rows(tensor: StoredTensor, heads: int) -> StoredTensor:
    """Return a tensor with the rows of each head in two halves instead of in pairs.

    Rotary embeddings rotate pairs of a head's rows. Some programs store the rows of a pair next to
    each other, others store the first rows of all pairs before the second rows::

        stored    0 1 | 2 3 | 4 5        returned    0 2 4 | 1 3 5

    Args:
        tensor: a tensor with `heads` equal blocks of rows, bound to files.
        heads: the number of heads.

    Raises:
        RecipeError: rows that `heads` does not divide into heads of whole pairs, or more than
            `MAX_BOXES` regions.
    """
    rows = tensor.shape[0] if tensor.shape else 0
    length, rest = divmod(rows, heads)
    if rest or length % 2 or not rows:
        raise RecipeError(
            f"{tensor.name!r} has shape {list(tensor.shape)}, whose rows are not {heads} heads of "
            "pairs; correct the number of heads in config.json"
        )
    half = length // 2

    def move() -> Iterator[StoredRegion]:
        for slot, region in list_stored_regions(tensor):
            for head in range(region.start[0] // length, -(-region.stop[0] // length)):
                for parity in range(2):
                    first = head * length
                    rows = region.step(0, first + parity, 2, half, at=first + parity * half)
                    if rows is not None:
                        yield slot, rows

    return bind_stored_regions(tensor.name, tensor, tensor.shape, move())


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
        # `accumulate` returns the total too.
        _Share(start, n, groups, sum(sizes))
        for start, n in zip(starts, sizes, strict=False)
    )


def list_stored_regions(tensor: StoredTensor) -> Iterator[StoredRegion]:
    """Yield the regions of a tensor; each element is in exactly one region."""
    itemsize_bytes = tensor.dtype.itemsize_bytes
    for tile in source_tiles(tensor.assembly).tiles:
        place = tensor.file_range(tile.slot, tile.number, tile.offset)
        view = tensor.view(tile.slot, tile.number) or View.row_major(tile.local_shape)
        first = place.start_bytes + view.offset * itemsize_bytes
        in_bytes = View(first, tuple(stride * itemsize_bytes for stride in view.strides))
        for region in tile.regions(in_bytes, place.path):
            yield tile.slot, region


def split_stack(parts: Iterable[StoredRegion], count: int) -> list[list[StoredRegion]]:
    """Return the parts of each of `count` indices of the first dimension, without it."""
    by_number: list[list[StoredRegion]] = [[] for _ in range(count)]
    for slot, region in parts:
        for number in range(region.start[0], region.stop[0]):
            by_number[number].append((slot, region.drop(0, number)))
    return by_number


def swap_last_dimensions(parts: Iterable[StoredRegion]) -> Iterator[StoredRegion]:
    """Yield parts with their last two dimensions swapped."""
    for slot, region in parts:
        *leading, row, column = range(len(region.start))
        yield slot, region.permute((*leading, column, row))


def _put_shares(
    members: Sequence[StoredTensor], at: int, shares: Sequence[_Share]
) -> Iterator[StoredRegion]:
    """Yield the parts of members at their indices of the fused dimension."""
    parts = [list(list_stored_regions(member)) for member in members]
    if all(share.alternates for share in shares) and len(shares) > 1:
        yield from _alternate(parts, at)
        return
    for own, share in zip(parts, shares, strict=True):
        for slot, region in own:
            for part in share.put_into(region, at):
                yield slot, part


def _alternate(parts: Sequence[Sequence[StoredRegion]], at: int) -> Iterator[StoredRegion]:
    """Yield the parts of members whose indices alternate.

    Regions of all members that interleave in one file are merged; otherwise each index is a region.
    """
    period = len(parts)
    alike: dict[StoredRegion, dict[int, Region]] = {}
    for number, own in enumerate(parts):
        for slot, region in own:
            # Regions that interleave differ only in their offsets.
            key = (slot, region._replace(offset=0))
            alike.setdefault(key, {})[number] = region
    for (slot, _), of_members in alike.items():
        region = next(iter(of_members.values()))
        low, high = region.start[at], region.stop[at]
        offsets = [member.offset for _, member in sorted(of_members.items())]
        step, rest = divmod(region.strides[at], period)
        if not rest and offsets == [offsets[0] + n * step for n in range(period)]:
            start = (*region.start[:at], low * period, *region.start[at + 1 :])
            stop = (*region.stop[:at], high * period, *region.stop[at + 1 :])
            strides = (*region.strides[:at], step, *region.strides[at + 1 :])
            yield slot, Region(start, stop, region.container, offsets[0], strides)
            continue
        for number, alone in of_members.items():
            for index in range(low, high):
                place = index * period + number
                yield slot, alone.narrow(at, index, index + 1).shift(at, place - index)


def bind_stored_regions(
    name: str, like: StoredTensor, shape: tuple[int, ...], parts: Iterable[StoredRegion]
) -> StoredTensor:
    """Return a tensor that consists of parts, with the type and the ranks of `like`."""
    itemsize_bytes = like.dtype.itemsize_bytes
    # The list is limited: interleaved members may have as many regions as elements.
    listed = list(itertools.islice(parts, MAX_BOXES + 1))
    if len(listed) > MAX_BOXES:
        raise RecipeError(
            f"{name!r} would consist of more than {MAX_BOXES} ranges of files; convert the "
            "source to whole tensors first (--to full), and change names then"
        )
    if not listed:
        # An empty tensor needs an address too: it gets the address of a shard of `like`.
        slot = like.stored_slots[0]
        place = like.file_range(slot)
        listed.append((slot, Region.dense(shape, place.path, place.start_bytes, itemsize_bytes)))
    slots = max(like.layout.slots, max(slot for slot, _ in listed) + 1)
    return StoredTensor(name, like.dtype, bind_regions(shape, listed, slots, itemsize_bytes))
