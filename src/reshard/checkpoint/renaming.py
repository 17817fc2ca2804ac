"""Names of other programs: a checkpoint by other names, with parameters fused or apart.

Programs call the tensors of one model differently, and keep some of them in one parameter. Nothing
is copied for that: a tensor by another name is bound to the same bytes of the same files::

    file          | q q k v | q q k v |  = linear_qkv, read as it lies
    q_proj          0:2       4:6           two boxes of rows, each with its own address
    k_proj              2         6

1. A stored tensor is boxes of elements, each taken from one shard (`tiles.source_tiles`), with
   the place in a file where it begins and its strides there.
2. A part of a fused parameter has the boxes inside of its stretches; a fused parameter has those
   of its members. So cuts may be anywhere, also inside a group or a head.
3. What is renamed only keeps its digest. A fused parameter has other blocks than its members:
   there is no digest to compare, and a note says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from reshard.binding import Binding, FileRange, View
from reshard.checkpoint.blocks.strided_spans import is_dense
from reshard.checkpoint.blocks.tiles import source_tiles
from reshard.checkpoint.contents import Checkpoint, StoredTensor
from reshard.errors import RecipeError, UsageError
from reshard.layout import Box, Layout
from reshard.recipes.fusion import Fusion, MemberSlice
from reshard.recipes.name_patterns import ForeignName, Meaning, find_by_pattern, find_foreign_name
from reshard.recipes.recipe import Recipe

MOST_BOXES = 100_000

# A convention of a recipe, or a table of names.
Names = str | Mapping[str, Meaning]


@dataclass(frozen=True)
class NameTable:
    """A table from names to a recipe's names; `text` identifies it in journals."""

    text: str
    table: Mapping[str, Meaning]


def names_of(
    argument: str,
    names: Names | None,
    recipe: Recipe | None,
    config: Mapping[str, object] | None,
) -> NameTable | None:
    """The table of `names`, which were given as `argument`; None if `names` is None.

    Raises:
        UsageError: a convention without a recipe, or what is no table.
        RecipeError: a convention unknown to the recipe, or whose numbers the config does not give.
    """
    if names is None:
        return None
    if isinstance(names, str):
        if recipe is None:
            raise UsageError(
                f"{argument} {names!r} are those of a recipe; name one as well, or `auto`"
            )
        table, text = recipe.naming(names, config), f"{names} of {recipe.name}"
    elif isinstance(names, Mapping) and all(
        isinstance(key, str) and isinstance(entry, str | Fusion) for key, entry in names.items()
    ):
        table, text = dict(names), "a table"
    else:
        raise UsageError(
            f"{argument} {names!r}; give a convention of the recipe, such as 'megatron', or a "
            "table of names and Fusions"
        )
    found = hashlib.blake2b(repr(list(table.items())).encode(), digest_size=8).hexdigest()
    return NameTable(f"{text} ({found})", table)


class _StoredBox(NamedTuple):
    """A box of a tensor, of the rank `slot`, that begins at `place` and has `strides` there."""

    slot: int
    box: Box
    place: FileRange
    strides: tuple[int, ...]


def in_recipe_names(checkpoint: Checkpoint, table: Mapping[str, Meaning]) -> Checkpoint:
    """The checkpoint in a recipe's names, every fused parameter as its members.

    Args:
        checkpoint: in the names of a convention.
        table: what these are in the recipe's (`Recipe.naming`). What it does not say stays.

    Raises:
        RecipeError: names of which the table says nothing, two tensors of one name, or a fused
            parameter that its members cannot share.
    """
    new = _Tensors(checkpoint)
    for name, tensor in checkpoint.tensors.items():
        # An exact name, or a pattern such as that of every layer.
        meaning = table[name] if name in table else find_by_pattern(name, table)
        if isinstance(meaning, str):
            new.add(dataclasses.replace(tensor, name=meaning), name)
            continue
        for member in _split_into_members(tensor, meaning):
            new.add(member, name)
    new.expect_change(table)
    return new.checkpoint()


def in_names_of(
    checkpoint: Checkpoint, table: Mapping[str, Meaning]
) -> tuple[Checkpoint, dict[str, str], dict[str, Fusion]]:
    """The checkpoint in the names of a convention.

    Args:
        checkpoint: in a recipe's names.
        table: what the convention's names are in the recipe's; of several names for one tensor
            the first counts. What it does not say stays.

    Returns:
        The checkpoint; for each of its names the recipe's, that of the first member where it is
        fused; and the fusions, by name.

    Raises:
        RecipeError: names of which the table says nothing, two tensors of one name, members that
            are missing or do not fit together.
    """
    new = _Tensors(checkpoint)
    fused: dict[str, Fusion] = {}
    for name, tensor in checkpoint.tensors.items():
        theirs = find_foreign_name(name, table) or ForeignName(name)
        if theirs.fusion is None:
            new.add(dataclasses.replace(tensor, name=theirs.name), name)
        elif fused.setdefault(theirs.name, theirs.fusion) != theirs.fusion:
            raise RecipeError(
                f"{theirs.name!r} would be fused of {list(fused[theirs.name].members)} and of "
                f"{list(theirs.fusion.members)}; correct the table of names"
            )
        elif theirs.name not in new.made_of:
            members = [_find_member(checkpoint, theirs.name, one) for one in theirs.fusion.members]
            new.add(_fuse_members(theirs.name, theirs.fusion, members), *theirs.fusion.members)
    new.expect_change(table)
    return new.checkpoint(), {name: made[0] for name, made in new.made_of.items()}, fused


def _find_member(checkpoint: Checkpoint, fused: str, name: str) -> StoredTensor:
    if name not in checkpoint.tensors:
        raise RecipeError(
            f"{fused!r} is fused of tensors of which {checkpoint.folder} has no {name!r}; complete "
            "the checkpoint, or keep those names"
        )
    return checkpoint.tensors[name]


class _Tensors:
    """The tensors of a checkpoint by other names, and those that each is made of."""

    def __init__(self, old: Checkpoint) -> None:
        self.old = old
        self.tensors: dict[str, StoredTensor] = {}
        self.made_of: dict[str, tuple[str, ...]] = {}

    def add(self, tensor: StoredTensor, *made_of: str) -> None:
        """Add a tensor. Raises RecipeError if its name is taken."""
        if tensor.name in self.made_of:
            raise RecipeError(
                f"{self.made_of[tensor.name][0]!r} and {made_of[0]!r} in {self.old.folder} would "
                f"both be {tensor.name!r}; correct the table of names"
            )
        self.tensors[tensor.name] = tensor
        self.made_of[tensor.name] = made_of

    @property
    def unchanged(self) -> list[str]:
        """The names of the tensors that did not change."""
        return [name for name, tensor in self.old.tensors.items() if self._is_kept(name, tensor)]

    def _is_kept(self, name: str, tensor: StoredTensor) -> bool:
        return name in self.tensors and self.tensors[name].binding is tensor.binding

    def expect_change(self, table: Mapping[str, Meaning]) -> None:
        """Raise RecipeError if a table applies to none of the tensors, though there are some."""
        if table and self.tensors and len(self.unchanged) == len(self.old):
            raise RecipeError(
                f"no name in {self.old.folder}, such as {next(iter(self.tensors))!r}, is one that "
                f"the table of names knows, such as {next(iter(table))!r}; is the checkpoint in "
                "other names than was said?"
            )

    def checkpoint(self) -> Checkpoint:
        """The old checkpoint with these tensors."""
        old, changed = self.old, set[str]()
        lost = []
        for name, made_of in self.made_of.items():
            if self.tensors[name].binding is old.tensors[made_of[0]].binding:
                continue
            if self.tensors[name].binding.views:
                changed.update(made_of)
            if any(old.tensors[one].digest for one in made_of):
                lost.append(name)
        notes = old.notes
        if lost:
            notes += (
                f"{len(lost)} tensors (first: {lost[0]}) are fused in the files, or will be, and "
                f"have other blocks there: they are not compared with the digests of {old.folder}. "
                "`reshard inspect --digest` compares them",
            )
        if self.unchanged:
            notes += (
                f"{len(self.unchanged)} tensors keep their names (first: {self.unchanged[0]})",
            )
        # With strides, what lies between is read along, and may be read again.
        checksums = (
            dataclasses.replace(one, is_read_once=one.is_read_once and one.tensor not in changed)
            for one in old.checksums
        )
        kept = {name for name in self.tensors if self.made_of[name] == (name,)} | {*old.items}
        paths = {name: path for name, path in old.paths.items() if name in kept}
        return dataclasses.replace(
            old, tensors=self.tensors, checksums=tuple(checksums), paths=paths, notes=notes
        )


def _split_into_members(tensor: StoredTensor, fusion: Fusion) -> Iterator[StoredTensor]:
    """The members of a fused parameter."""
    at = fusion.dimension
    if at >= len(tensor.shape):
        raise RecipeError(
            f"{tensor.name!r} has shape {list(tensor.shape)}, and is fused along dimension {at}"
        )
    # Where along the dimension each member's rows lie, such as q, k and v of every group in turn.
    stretches = _find_stretches(tensor.name, fusion, tensor.shape[at])
    boxes, itemsize_bytes = list(_list_stored_boxes(tensor)), tensor.dtype.itemsize_bytes
    for member in fusion.members:
        own = [stretch for stretch in stretches if stretch.member == member]
        shape = list(tensor.shape)
        shape[at] = sum(stretch.stop - stretch.start for stretch in own)
        moved = [
            piece
            for one in own
            for box in boxes
            for piece in _move_box(
                box, itemsize_bytes, at, one.start, one.stop, one.member_start - one.start
            )
        ]
        yield _bind_boxes(member, tensor, tuple(shape), moved)


def _fuse_members(name: str, fusion: Fusion, members: list[StoredTensor]) -> StoredTensor:
    """The fused parameter of members."""
    at, first = fusion.dimension, members[0]
    # 1. Members must agree in type, and in every dimension but the fused one.
    lengths = {}
    for one in members:
        is_alike = one.dtype is first.dtype and _drop_dimension(one.shape, at) == _drop_dimension(
            first.shape, at
        )
        if not is_alike or at >= len(one.shape):
            raise RecipeError(
                f"{name!r} cannot be fused of {first.name!r}, {first.dtype.name} "
                f"{list(first.shape)}, and {one.name!r}, {one.dtype.name} {list(one.shape)}"
            )
        lengths[one.name] = one.shape[at]
    # 2. Their lengths must be in the proportion of the fusion's shares.
    stretches = _find_stretches(name, fusion, sum(lengths.values()))
    for one in members:
        end = max(s.member_start + s.stop - s.start for s in stretches if s.member == one.name)
        if end != one.shape[at]:
            raise RecipeError(
                f"{name!r} is fused of {', '.join(f'{n} of {k!r}' for k, n in lengths.items())} "
                f"along dimension {at}, which are not in the proportion of "
                f"{':'.join(map(str, fusion.shares))}; correct config.json"
            )
    # 3. Each member's boxes move to its stretches of the fused dimension; no byte moves.
    shape = (*first.shape[:at], sum(lengths.values()), *first.shape[at + 1 :])
    moved: list[_StoredBox] = []
    for one in members:
        boxes = list(_list_stored_boxes(one))
        for stretch in stretches:
            if stretch.member == one.name:
                begin, size = stretch.member_start, stretch.stop - stretch.start
                ahead = stretch.start - begin
                for box in boxes:
                    moved += _move_box(
                        box, one.dtype.itemsize_bytes, at, begin, begin + size, ahead
                    )
    return _bind_boxes(name, first, shape, moved)


def _drop_dimension(shape: tuple[int, ...], dimension: int) -> tuple[int, ...]:
    return (*shape[:dimension], *shape[dimension + 1 :])


def _find_stretches(name: str, fusion: Fusion, length: int) -> tuple[MemberSlice, ...]:
    try:
        return fusion.member_slices(length)
    except RecipeError as error:
        raise RecipeError(f"the fused parameter {name!r}: {error}") from None


def _list_stored_boxes(tensor: StoredTensor) -> Iterator[_StoredBox]:
    """The boxes that a tensor is put together from, each element in one of them."""
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
            yield _StoredBox(tile.slot, Box(start, stop), here, view.strides)


def _move_box(
    lying: _StoredBox, itemsize_bytes: int, dimension: int, start: int, stop: int, ahead: int
) -> Iterator[_StoredBox]:
    """The part of a box at `start:stop` of a dimension, moved `ahead` indices along it."""
    box, place = lying.box, lying.place
    low, high = max(start, box.start[dimension]), min(stop, box.stop[dimension])
    if low < high:
        begin, end = list(box.start), list(box.stop)
        begin[dimension], end[dimension] = low + ahead, high + ahead
        further = (low - box.start[dimension]) * lying.strides[dimension] * itemsize_bytes
        here = FileRange(place.path, place.start_bytes + further)
        yield lying._replace(box=Box(tuple(begin), tuple(end)), place=here)


def _bind_boxes(
    name: str, like: StoredTensor, shape: tuple[int, ...], moved: Iterable[_StoredBox]
) -> StoredTensor:
    """A tensor of boxes, of the type and the ranks of another."""
    boxes: list[tuple[int, Box]] = []
    addresses: dict[int, list[FileRange]] = {}
    views: dict[int, list[View]] = {}
    strided: set[int] = set()
    for slot, box, place, strides in moved:
        view = View(0, strides)
        if is_dense(view, box.shape):
            view = View.row_major(box.shape)
        else:
            strided.add(slot)
        boxes.append((slot, box))
        addresses.setdefault(slot, []).append(place)
        views.setdefault(slot, []).append(view)
    # An empty tensor needs an address all the same: that of a shard it came from.
    if not boxes:
        # No elements: it lies nowhere, and must be somewhere.
        slot = like.stored_slots[0]
        boxes.append((slot, Box((0,) * len(shape), shape)))
        addresses[slot] = [like.file_range(slot)]
    if len(boxes) > MOST_BOXES:
        raise RecipeError(
            f"{name!r} would lie in {len(boxes)} pieces of files, more than {MOST_BOXES}; make the "
            "source whole first (--to full), and change names then"
        )
    layout = Layout.from_boxes(shape, boxes, max(like.layout.slots, max(addresses) + 1))
    binding = Binding(
        layout,
        {slot: tuple(places) for slot, places in addresses.items()},
        {slot: tuple(views[slot]) for slot in strided},
    )
    return StoredTensor(name, like.dtype, binding)
