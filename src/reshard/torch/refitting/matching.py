"""Matching of two models: which source tensor fills which target tensor, and all mismatches.

1. Names: every target needs a source, with its own name or a tied name; every source is used,
   unless unused sources are allowed. A fused tensor stands for its members, unless the other side
   fuses the same members (`members`).
2. Shapes and types: equal shapes, and equal element types if casts are not allowed. Parameters of
   Megatron are read together (`reshard.megatron.tensor_pairs`).
3. Sent elements: elements have the narrower of both types, so the sender casts to a narrower type.
   A transform runs at the source if its result is smaller and each of the source's ranks can
   compute it from its own part; otherwise it runs at the target.

All mismatches are collected, so that users see them at once and before any tensor moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from reshard.megatron.names import find_source_name, resolve_tie
from reshard.megatron.tensor_pairs import reconcile
from reshard.sharding import DimSpec, ShardingSpec
from reshard.torch.exchange.changes import can_be_compared
from reshard.torch.models.model_manifest import ModelTensor, shift_ranks
from reshard.torch.refitting.members import (
    CommonRange,
    IndexRange,
    Member,
    common_ranges,
    fused_members,
    members_of,
    repeated_members,
    repeated_tensors,
)

if TYPE_CHECKING:
    from reshard.torch.refitting.options import CastOption
    from reshard.torch.refitting.transforms import BlockQuantized, Transform

Where = Literal["", "source", "target"]


class Match(NamedTuple):
    """A tensor or a piece to move: from `source_name` of the source to `target_name`.

    Attributes:
        name: of the moved tensor or piece, unique in a refit.
        source_name, target_name: of the tensors.
        source, target: layouts of the moved tensor or piece.
        dtype: of the elements as they are sent.
        source_range, target_range: the ranges of a piece in its tensors; None for a whole tensor.
        made_at: the side on which a transform creates the target: "source", from the source's parts
            before sending, or "target", from the received elements. Empty without a transform.
        made_of: the tensor that the transform is for.
        why: the reason for `made_at`.
        specs: the shardings of the layouts, if both are known.
    """

    name: str
    source_name: str
    target_name: str
    source: Layout
    target: Layout
    dtype: str
    source_range: IndexRange | None = None
    target_range: IndexRange | None = None
    made_at: Where = ""
    made_of: str = ""
    why: str = ""
    specs: tuple[ShardingSpec, ShardingSpec] | None = None

    @property
    def can_be_compared(self) -> bool:
        """Whether sent elements can be compared with those that the previous run sent."""
        # The memory of a transform's input is overwritten by other tensors before the next run.
        stays, dtype = self.made_at != "target", getattr(torch, self.dtype)
        return stays and can_be_compared(self.source, self.target, dtype)

    def source_view(self, locals_of: Mapping[str, torch.Tensor], rank: int) -> torch.Tensor | None:
        """Return a rank's part in the source, whose local tensors are given by name."""
        local = locals_of.get(self.source_name)
        return local if self.source_range is None else self.source_range.of(local, rank)

    def target_view(self, locals_of: Mapping[str, torch.Tensor], rank: int) -> torch.Tensor | None:
        """Return a rank's part in the target, whose local tensors are given by name."""
        local = locals_of.get(self.target_name)
        return local if self.target_range is None else self.target_range.of(local, rank)


def match_tensors(
    source: Mapping[str, ModelTensor],
    target: Mapping[str, ModelTensor],
    ties: Mapping[str, str],
    cast: CastOption,
    strict: bool,
    transforms: Mapping[str, Transform],
    one_tensor: Mapping[str, str] = MappingProxyType({}),
    quantized: BlockQuantized | None = None,
) -> tuple[list[Match], list[str]]:
    """Return the tensors to move, in the order of the target, and all mismatches.

    Args:
        source, target: both models.
        ties: names that refer to the same tensor as another name.
        cast: whether types may differ, for all or by name; or the type of targets that differ.
        strict: whether an unused source is a problem.
        transforms: by the names of the targets that they create.
        one_tensor: names of sources that share the memory of another source, with the name of that
            source. It suffices that a single name is used.
        quantized: the transform for float8 targets with scales, if the source has neither.
    """
    matcher = _Matcher(source, target, ties, cast, dict(transforms), quantized)
    matcher.run()
    if strict:
        matcher.problems += [f"{name}: in the source only" for name in matcher.unused(one_tensor)]
    return matcher.matches, matcher.problems


@dataclass
class _Matcher:
    source: Mapping[str, ModelTensor]
    target: Mapping[str, ModelTensor]
    ties: Mapping[str, str]
    cast: CastOption
    transforms: dict[str, Transform]
    quantized: BlockQuantized | None = None
    matches: list[Match] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    # Matches by the ids of both tensors: tensors that differ only in name are the same object.
    _known: dict[tuple[int, int], Match] = field(default_factory=dict)

    def run(self) -> None:
        self._add_quantized()
        transforms = self.transforms.items()
        # Further outputs of a transform are filled together with the tensor it is named for.
        further_outputs = {
            output
            for name, transform in transforms
            for output in transform.outputs(name)
            if output != name
        }
        for side, model in (("source", self.source), ("target", self.target)):
            repeated = repeated_members(model, self.ties)
            self.problems += [f"{problem} (in the {side})" for problem in repeated]
        self.problems += map("{} (in the source)".format, repeated_tensors(self.source, self.ties))
        if self.problems:
            return
        try:
            if any(tensor.fusion is not None for tensor in self.source.values()):
                # Computed here, so that an error is reported once, not for every tensor.
                self.members  # noqa: B018
        except ReshardError as error:
            self.problems.append(f"the source: {error}")
            return
        # Tensors that differ only in name use the match of the first.
        # A table may cast tensors of a kind to different types.
        cached = {} if isinstance(self.cast, Mapping) else self._known
        for name, target_tensor in self.target.items():
            like = cached.get((id(self.source.get(name)), id(target_tensor)))
            if name in further_outputs:
                continue
            if like is not None and name not in self.transforms:
                self.matches.append(Match(name, name, name, *like[3:]))
                continue
            served_by = find_source_name(name, self.source, self.ties)
            try:
                # Tensors fused alike on both sides move whole; others move member by member.
                if served_by is not None and _are_alike(self.source[served_by], target_tensor):
                    self.matches += self._match_whole(name, served_by, target_tensor)
                else:
                    self.matches += self._match_members(name, target_tensor)
            except _Misfit as misfit:
                self.problems += misfit.problems
            except ReshardError as error:
                self.problems.append(f"{name}: {error}")

    def _add_quantized(self) -> None:
        """Add transforms for float8 targets with scales that no other tensor fills."""
        if self.quantized is None:
            return
        for name, target_tensor in self.target.items():
            scales = self.target.get(f"{name}{self.quantized.suffix}")
            if (
                not self.quantized.makes(target_tensor.dtype)
                or scales is None
                or name in self.transforms
            ):
                continue
            # If the source has scales, it is already quantized.
            has_scales = find_source_name(name + self.quantized.suffix, self.source, self.ties)
            if has_scales is None and scales.fusion is None:
                self.transforms[name] = self.quantized

    @cached_property
    def members(self) -> dict[str, Member]:
        """The source's tensors, with fused tensors as their members."""
        return members_of(self.source)

    def unused(self, one_tensor: Mapping[str, str]) -> Iterator[str]:
        """Yield the source's tensors and members that fill no target."""
        used = set(self.target)
        for tensor in self.target.values():
            if tensor.fusion is not None:
                used.update(tensor.fusion.members)
        if self.ties:
            used = {resolve_tie(name, self.ties) for name in used}
        one_used = {one_tensor.get(name, name) for name in used if name in self.source}
        for name, tensor in self.source.items():
            # Most tensors are used, under their own names.
            if name in used or resolve_tie(name, self.ties) in used:
                continue
            if one_tensor.get(name, name) in one_used:
                continue
            for member in _list_members(name, tensor):
                if resolve_tie(member, self.ties) not in used:
                    yield member if member == name else f"{member}, which {name} has"

    def _match_whole(self, name: str, served_by: str, target_tensor: ModelTensor) -> list[Match]:
        """Return the match of a whole tensor."""
        tensor, transform = self.source[served_by], self.transforms.get(name)
        source, target = tensor.layout, target_tensor.layout
        held, needed = tensor.parameter, target_tensor.parameter
        if transform is None and held is not None and needed is not None:
            # `_choose_dtype` checks whether types may differ, for all kinds of models.
            differs = tensor.dtype != target_tensor.dtype
            pair = reconcile(held, needed, cast=target_tensor.dtype if differs else None)
            source = shift_ranks(pair.source.layout(pair.shape), tensor.first_rank)
            target = shift_ranks(pair.target.layout(pair.shape), target_tensor.first_rank)
        elif source.shape != target.shape:
            raise _Misfit(f"{name}: {_compare_shapes(source.shape, target.shape)}")
        if transform is not None:
            return self._match_transformed(
                name, Member(served_by, tensor), Member(name, target_tensor), transform
            )
        travels = self._choose_dtype(name, tensor, target_tensor)
        specs = _find_specs(tensor, target_tensor)
        match = Match(name, served_by, name, source, target, travels, specs=specs)
        self._known[id(tensor), id(target_tensor)] = match
        return [match]

    def _match_members(self, name: str, target_tensor: ModelTensor) -> list[Match]:
        """Return the matches of all pieces of a tensor that one side fuses."""
        matches: list[Match] = []
        problems: list[str] = []
        members = self.members
        parts = fused_members(name, target_tensor) or {name: Member(name, target_tensor)}
        for member_name, part in parts.items():
            suffix = "" if member_name == name else f" (a member of {name})"
            served_by = find_source_name(member_name, members, self.ties)
            if served_by is None:
                problems.append(f"{member_name}: not in the source{suffix}")
                continue
            member = members[served_by]
            if member.shape != part.shape:
                text = _compare_shapes(member.shape, part.shape)
                problems.append(f"{member_name}: {text}{suffix}")
                continue
            matches += self._match_ranges(member_name, name, target_tensor, member, part)
        if problems:
            raise _Misfit(*problems)
        return matches

    def _match_ranges(
        self, member_name: str, name: str, target_tensor: ModelTensor, member: Member, part: Member
    ) -> list[Match]:
        """Return the matches of all pieces of a member."""
        transform = self.transforms.get(name)
        if transform is not None:
            return self._match_transformed(name, member, part, transform, label=member_name)
        travels = self._choose_dtype(name, member.tensor, target_tensor)
        return [
            Match(
                f"{member_name}[{piece.start}:{piece.stop}]",
                member.name,
                name,
                _select_layout(member.tensor, piece.source),
                _select_layout(target_tensor, piece.target),
                travels,
                piece.source,
                piece.target,
            )
            for piece in common_ranges(member, part)
        ]

    def _match_transformed(
        self, name: str, member: Member, part: Member, transform: Transform, label: str = ""
    ) -> list[Match]:
        """Return the matches of a transformed tensor, whose transform runs at the source or target.

        `label` is the member's name, where the target may have several.
        """
        label = label or name
        pieces = list(common_ranges(member, part))
        travels = transform.sent_dtype(member.tensor.dtype)
        # 1. The bytes to send if the target's ranks run the transform.
        wide = [
            Match(
                label if piece.is_whole else f"{label}[{piece.start}:{piece.stop}]",
                member.name,
                name,
                _select_layout(member.tensor, piece.source),
                _select_layout(part.tensor, piece.target),
                travels,
                piece.source,
                piece.target,
                "target",
                name,
            )
            for piece in pieces
        ]
        # 2. The bytes to send if the source's ranks run it.
        at_source = self._match_made_at_source(name, member, part, transform, pieces)
        if not isinstance(at_source, str):
            # Running it at the source costs nothing, unless replicas increase the bytes to send.
            bytes_made, bytes_wide = (
                sum(map(_count_moved_bytes, matches)) for matches in (at_source, wide)
            )
            if bytes_made < bytes_wide:
                return at_source
            at_source = f"{bytes_made} bytes would travel, {bytes_wide} otherwise"
        return [match._replace(why=at_source) for match in wide]

    def _match_made_at_source(
        self,
        name: str,
        member: Member,
        part: Member,
        transform: Transform,
        pieces: list[CommonRange],
    ) -> list[Match] | str:
        """Return the matches of each piece's outputs at the source; or why it is not possible."""
        if part.dimension is not None:
            return f"the target {part.name} is fused"
        matches = []
        outputs = [output for output in transform.outputs(name) if output in self.target]
        for piece in pieces:
            ranges: dict[str, IndexRange | None] = dict.fromkeys(outputs)
            for output in outputs:
                if piece.target is None:
                    continue
                dimension, layout = piece.target.dimension, self.target[output].layout
                ends = transform.stretch(
                    name, output, part.shape, dimension, piece.start, piece.stop
                )
                if ends is None or dimension >= layout.ndim or ends[1] > layout.shape[dimension]:
                    return f"a rank of {member.name} has a part of what is made together"
                ranges[output] = IndexRange(layout, dimension, *ends)
            layouts = {
                output: _select_layout(self.target[output], ranges[output]) for output in outputs
            }
            source = _select_layout(member.tensor, piece.source)
            at_source = transform.at_source(
                name,
                source,
                {output: (self.target[output].dtype, layout) for output, layout in layouts.items()},
            )
            if isinstance(at_source, str):
                return at_source
            matches += [
                Match(
                    output if piece.is_whole else f"{output}[of {piece.start}:{piece.stop}]",
                    member.name,
                    output,
                    layout,
                    layouts[output],
                    self.target[output].dtype,
                    piece.source,
                    ranges[output],
                    "source",
                    name,
                    "fewer bytes travel",
                )
                for output, layout in at_source.items()
            ]
        return matches

    def _choose_dtype(self, name: str, tensor: ModelTensor, target_tensor: ModelTensor) -> str:
        """Return the type of the sent elements. Raises if the types may not differ."""
        if tensor.dtype == target_tensor.dtype:
            return tensor.dtype
        cast = self.cast
        allowed = cast.get(name, False) if isinstance(cast, Mapping) else cast
        quantized = self.quantized
        are_quantized = (
            []
            if quantized is None
            else [*map(quantized.makes, (tensor.dtype, target_tensor.dtype))]
        )
        if quantized is not None and are_quantized == [False, True]:
            scales = f"{name}{quantized.suffix}"
            has = "and so has the source" if scales in self.target else "which the target has not"
            raise _Misfit(
                f"{name}: the source is {tensor.dtype}, the target {target_tensor.dtype}; to be "
                f"quantised it needs scales {scales!r}, {has}"
            )
        if allowed is False:
            raise _Misfit(
                f"{name}: the source is {tensor.dtype}, the target {target_tensor.dtype}; to "
                "convert, say cast=True"
            )
        if allowed is not True and as_dtype(allowed).name != target_tensor.dtype:
            raise _Misfit(f"{name}: cast to {allowed}, but the target is {target_tensor.dtype}")
        if tensor.dtype.startswith("complex") and not target_tensor.dtype.startswith("complex"):
            raise _Misfit(
                f"{name}: the source is {tensor.dtype}, the target {target_tensor.dtype}; "
                "imaginary parts would be lost: give a complex target, or the tensor's .real"
            )
        # Rounded contributions would add up to other values than the rounded sum.
        if tensor.layout.contributions > 1 or target_tensor.layout.contributions > 1:
            raise _Misfit(
                f"{name}: partial, and {tensor.dtype} to {target_tensor.dtype}; combine it "
                "before it is cast"
            )
        # The narrower, or the target's if both are equally wide.
        widths = [as_dtype(side.dtype).itemsize_bytes for side in (tensor, target_tensor)]
        return tensor.dtype if widths[0] < widths[1] else target_tensor.dtype


class _Misfit(Exception):
    """Problems of a tensor that cannot be matched."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems


def _are_alike(tensor: ModelTensor, target_tensor: ModelTensor) -> bool:
    """Return whether two tensors of a name can move whole: not if they fuse other members."""
    return (
        tensor.fusion is None
        or target_tensor.fusion is None
        or tensor.fusion == target_tensor.fusion
    )


def _list_members(name: str, tensor: ModelTensor) -> tuple[str, ...]:
    return (name,) if tensor.fusion is None else tensor.fusion.members


def _find_specs(
    tensor: ModelTensor, target_tensor: ModelTensor
) -> tuple[ShardingSpec, ShardingSpec] | None:
    """Return both shardings. A plain tensor on all ranks of a mesh is replicated over it."""
    if tensor.spec is not None and target_tensor.spec is not None:
        return tensor.spec, target_tensor.spec
    spec = tensor.spec or target_tensor.spec
    if spec is None:
        return None
    # A sharding over the mesh of the other side, with no dimension sharded.
    everywhere = ShardingSpec(spec.mesh, [DimSpec() for _ in tensor.layout.shape])
    plain = target_tensor if tensor.spec is not None else tensor
    # Layouts are interned.
    if everywhere.layout(tensor.layout.shape) is not plain.layout:
        return None
    return (tensor.spec or everywhere), (target_tensor.spec or everywhere)


def _select_layout(tensor: ModelTensor, index_range: IndexRange | None) -> Layout:
    return tensor.layout if index_range is None else index_range.layout


def _count_moved_bytes(match: Match) -> int:
    elements = LayoutChange(match.source, match.target).moved_elements
    return elements * as_dtype(match.dtype).itemsize_bytes


def _compare_shapes(source: tuple[int, ...], target: tuple[int, ...]) -> str:
    return f"shape {list(target)}, the source's {list(source)}"
