"""Pairs of parameters: a tensor in two models, and its sharding in each.

Each side describes a parameter by the attributes on its ranks (`MegatronParameter`). The
descriptions may differ: a cut marked on a single side, block sizes given on a single side, a mark
on a parameter that every rank holds whole. `reconcile` combines both:

1. the element types agree, or a cast is requested;
2. the first of these readings that gives both sides equal lengths along the cut is taken. No two
   of them can give different tensors::

       both are cut          2 ranks x 8 = 4 ranks x 4      an unmarked side is cut as the other
       as they are marked    2 ranks x 8 = 16 on each       a side is cut, the other holds copies
       neither is cut        8 on each = 8 on each          marked, but every rank holds all

3. outside the cut, and in their blocks, both sides must agree; blocks of either hold for both;
4. each side's local shapes must be those that its cut gives.

Inconsistencies that Megatron's refit accepts silently, and would copy wrongly, are errors. Sources:
the rules that Megatron-core's `resharding` planner applies to parameter attributes; that an
unmarked side of unequal copies is cut as the other follows from its failure otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from reshard.dtypes import dtype as as_dtype
from reshard.errors import LayoutError, RuleError, SpecError
from reshard.megatron.names import find_source_name, resolve_tie
from reshard.megatron.parameters import MegatronParameter, Shape
from reshard.sharding import ShardingSpec


class TensorPair(NamedTuple):
    """A tensor, as both sides describe it."""

    shape: Shape
    source: ShardingSpec
    target: ShardingSpec


def reconcile(
    source: MegatronParameter, target: MegatronParameter, *, cast: str | None = None
) -> TensorPair:
    """Return the shape of a tensor and its sharding on both sides.

    Args:
        source, target: the description of each side.
        cast: the target's element type, if it differs from the source's. This only allows the
            difference: elements are converted when the plan is run.

    Raises:
        SpecError: different element types without a cast, an expert on a single side, shapes
            that no reading makes equal.
        RuleError: blocks that differ or do not give the local shapes.

    >>> from reshard.megatron.ranks import MegatronRanks
    >>> both = [
    ...     MegatronParameter(MegatronRanks(tp=2), (48, 64), True, partition_sizes=(32, 16)),
    ...     MegatronParameter(MegatronRanks(), (96, 64)),
    ... ]
    >>> print(*reconcile(*both), sep="\\n")
    (96, 64)
    tp@blocks[64,32], -
    tp@blocks[64,32], -
    """
    return _reconcile(source, target, cast)


# A model has thousands of parameters and few descriptions of them.
@lru_cache(maxsize=4096)
def _reconcile(
    source: MegatronParameter, target: MegatronParameter, cast: str | None
) -> TensorPair:
    _check_types(source, target, cast)
    if source.is_expert != target.is_expert:
        raise SpecError(
            f"the source has is_expert={source.is_expert}, the target {target.is_expert}; a "
            "parameter belongs to an expert on both sides or on neither"
        )
    source, target = _choose_reading(source, target)
    _check_outside(source, target)
    source, target = _share_blocks(source, target)
    return TensorPair(source.global_shape, source.spec(), target.spec())


def _check_types(source: MegatronParameter, target: MegatronParameter, cast: str | None) -> None:
    cast_type = None if cast is None else as_dtype(cast).name
    if source.dtype is None or target.dtype is None:
        if cast_type is not None:
            raise SpecError(f"cast={cast!r} of a parameter whose dtype is not given on both sides")
        return
    if source.dtype != target.dtype and cast_type is None:
        raise SpecError(
            f"the source is {source.dtype}, the target {target.dtype}; to convert, say "
            f"cast={target.dtype!r}"
        )
    if cast_type is not None and cast_type != target.dtype:
        raise SpecError(f"cast={cast!r}, but the target is {target.dtype}; cast to that")


def _choose_reading(
    source: MegatronParameter, target: MegatronParameter
) -> tuple[MegatronParameter, MegatronParameter]:
    """Return both sides with the marks that give them equal lengths along the cut."""
    if source.ndim != target.ndim:
        raise SpecError(
            f"the source has {source.ndim} dimensions, {list(source.local_shapes[0])}, the target "
            f"{target.ndim}, {list(target.local_shapes[0])}"
        )
    # Lengths are compared along the dimension of each side that is marked.
    cut = [side.partition_dim for side in (target, source) if side.tensor_model_parallel]
    if not cut:
        return source, target
    both = _mark_as(source, target), _mark_as(target, source)
    readings = {"both cut": both}
    if both != (source, target):
        readings["as marked"] = source, target
    readings["neither cut"] = _unmark(source), _unmark(target)
    tried = {}
    # In the order of the module's docstring; a dict keeps it.
    for name, (left, right) in readings.items():
        if left is None or right is None:
            continue
        lengths = [(left.global_shape[dim], right.global_shape[dim]) for dim in cut]
        if all(a == b for a, b in lengths):
            return left, right
        a, b = next((a, b) for a, b in lengths if a != b)
        tried[name] = f"{name}: {a} and {b}"
    raise SpecError(
        f"no reading gives both sides one length along dimension {cut[0]} ("
        f"{'; '.join(tried.values())}): the source has {list(source.local_shapes[0])} on each of "
        f"{source.parts} tensor-parallel ranks, the target {list(target.local_shapes[0])} on each "
        f"of {target.parts}. Check tensor_model_parallel and partition_dim, or say true_length or "
        "heads where ranks pad or share"
    )


def _mark_as(side: MegatronParameter, other: MegatronParameter) -> MegatronParameter | None:
    """Return the side sharded as the other if it has no mark, or None if that is impossible."""
    if side.tensor_model_parallel:
        return side
    marked = replace(side, tensor_model_parallel=True, partition_dim=other.partition_dim)
    # A side with its own description is sharded by it.
    own = (side.partition_stride, side.partition_sizes, side.heads, side.true_length)
    if own != (1, None, None, None):
        return marked
    if other.true_length is None:
        return replace(marked, partition_stride=other.partition_stride, heads=other.heads)
    # Without its own length without padding, a side is as long as the tensor or as the other is
    # with its padding; and its last rank has a part: copies must not pass for padded parts.
    lengths, padded = marked.local_lengths, sum(other.local_lengths)
    fits = sum(lengths) in (other.true_length, padded) and sum(lengths[:-1]) < other.true_length
    return replace(marked, true_length=other.true_length) if fits else None


def _unmark(side: MegatronParameter) -> MegatronParameter | None:
    """Return the side as copies, or None if its ranks cannot hold the same or describe how they
    differ.
    """
    described = (side.heads, side.true_length)
    if side.tensor_model_parallel and (
        len(set(side.local_shapes)) > 1 or described != (None, None)
    ):
        return None
    return replace(side, tensor_model_parallel=False)


def _check_outside(source: MegatronParameter, target: MegatronParameter) -> None:
    for dim, (a, b) in enumerate(zip(source.global_shape, target.global_shape, strict=True)):
        if a != b:
            raise SpecError(
                f"dimension {dim}, outside the cut, has {a} indices on the source and {b} on the "
                "target; both must be of one tensor"
            )


def _share_blocks(
    source: MegatronParameter, target: MegatronParameter
) -> tuple[MegatronParameter, MegatronParameter]:
    """Return both sides with block sizes, if either has them."""
    if not (source.tensor_model_parallel and target.tensor_model_parallel):
        return source, target
    if source.partition_sizes is None and target.partition_sizes is None:
        return source, target
    # Blocks along a dimension do not constrain the sharding of another.
    if source.partition_dim != target.partition_dim:
        return source, target
    blocks = [side.blocks for side in (source, target)]
    if blocks[0] is None:
        return _cut_in_blocks(source, blocks[1] or ()), target
    if blocks[1] is None:
        return source, _cut_in_blocks(target, blocks[0])
    if blocks[0] != blocks[1]:
        raise RuleError(
            f"the source is made of {len(blocks[0])} blocks {list(blocks[0])} over its ranks, the "
            f"target of {len(blocks[1])}, {list(blocks[1])}; partition_sizes of both sides must "
            "describe the same blocks"
        )
    return source, target


def _cut_in_blocks(side: MegatronParameter, blocks: tuple[int, ...]) -> MegatronParameter:
    """Return the side with the pieces of `blocks` that its ranks have."""
    ragged = [block for block in blocks if block % side.parts]
    if ragged or side.heads is not None or side.true_length is not None:
        raise RuleError(
            f"blocks {list(blocks)} of the other side cannot be cut over {side.parts} ranks of "
            f"local lengths {list(side.local_lengths)}; give this side's partition_sizes, one list "
            "for each rank where they differ"
        )
    return replace(side, partition_sizes=tuple(block // side.parts for block in blocks))


def reconcile_all(
    source: Mapping[str, MegatronParameter] | Iterable[tuple[str, MegatronParameter]],
    target: Mapping[str, MegatronParameter] | Iterable[tuple[str, MegatronParameter]],
    *,
    cast: Mapping[str, str] | str | None = None,
    ties: Mapping[str, str] | None = None,
) -> dict[str, TensorPair]:
    """Pair every tensor of the target with its tensor of the source, by global name.

    Args:
        source, target: the descriptions of each side's parameters, by global name.
        cast: the element type to cast to; for all that differ, or by name.
        ties: names that mean the same tensor as another name: `{"output_layer.weight":
            "embedding.word_embeddings.weight"}`. Whichever name the source has serves both; if it
            has both, each target name is served by its own.

    Raises:
        SpecError: a name twice, a target without a source, a source that serves no target, or
            an error of `reconcile`, with the name.

    >>> from reshard.megatron.ranks import MegatronRanks
    >>> whole = MegatronParameter(MegatronRanks(), (8, 4))
    >>> found = reconcile_all({"word": whole}, {"word": whole, "out": whole}, ties={"out": "word"})
    >>> list(found)
    ['word', 'out']
    """
    sources, targets = _index_by_name(source, "source"), _index_by_name(target, "target")
    tied_names = dict(ties or {})
    serves = {name: find_source_name(name, sources, tied_names, SpecError) for name in targets}
    missing = [name for name, served_by in serves.items() if served_by is None]
    if missing:
        raise SpecError(
            f"the source has no {missing[0]!r}, which the target needs"
            f"{f' (nor {len(missing) - 1} others)' if missing[1:] else ''}; give the parameter, or "
            "declare the name it is tied to in ties"
        )
    # A source is used if a target has any of the names tied to it.
    used = {resolve_tie(name, tied_names, SpecError) for name in targets}
    unused = [name for name in sources if resolve_tie(name, tied_names, SpecError) not in used]
    if unused:
        raise SpecError(
            f"the target has no {unused[0]!r}, which the source has"
            f"{f' (nor {len(unused) - 1} others)' if unused[1:] else ''}; leave it out of the "
            "source, or declare the name it is tied to in ties"
        )
    pairs = {}
    for name, served_by in serves.items():
        to, source_parameter = targets[name], sources[served_by or name]
        if isinstance(cast, str):
            # Parameters of equal types keep theirs, whatever the others are cast to.
            chosen = cast if source_parameter.dtype != to.dtype else None
        else:
            chosen = (cast or {}).get(name)
        try:
            pairs[name] = reconcile(source_parameter, to, cast=chosen)
        except LayoutError as error:
            raise type(error)(f"parameter {name!r}: {error}") from error
    return pairs


def _index_by_name(
    parameters: Mapping[str, MegatronParameter] | Iterable[tuple[str, MegatronParameter]], side: str
) -> dict[str, MegatronParameter]:
    pairs = parameters.items() if isinstance(parameters, Mapping) else parameters
    by_name: dict[str, MegatronParameter] = {}
    for name, parameter in pairs:
        if name in by_name:
            raise SpecError(
                f"the {side} has {name!r} twice; names must be those of the whole model, not a "
                "rank's own"
            )
        by_name[name] = parameter
    return by_name
