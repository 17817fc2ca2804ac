"""Which tensor of the source fills which of the target, and what does not fit?

1. names: every target needs a source, by its own name or one it is tied to; every source serves
   a target, unless those that serve none may be left;
2. what both sides are: one shape, and one element type where no cast is allowed. Parameters of
   Megatron are read together (`notation.megatron_refit`);
3. what travels: elements of the narrower of both types, so that a cast to a narrower one is at
   the sender. Where a transform makes the target, its travelling tensor.

All that does not fit is collected, so that people see it at once and before anything moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError
from reshard.layout import Layout
from reshard.notation.megatron_refit import reconcile
from reshard.torch.naming import serving_name, tied_root
from reshard.torch.rosters import Held, moved_by

if TYPE_CHECKING:
    from reshard.torch.transforms import Transform

Cast = bool | str | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Match:
    """One tensor to move: from `source_name` of the source to `name` of the target.

    `dtype` is that of the elements that travel. Where `is_transformed`, they do not arrive in the
    target, but where its transform takes them from.
    """

    name: str
    source_name: str
    source: Layout
    target: Layout
    dtype: str
    is_transformed: bool = False


def match(
    source: Mapping[str, Held],
    target: Mapping[str, Held],
    ties: Mapping[str, str],
    cast: Cast,
    strict: bool,
    transforms: Mapping[str, Transform],
) -> tuple[list[Match], list[str]]:
    """The tensors to move, in the order of the target, and what does not fit.

    Args:
        source, target: both models.
        ties: names that mean the same tensor as another name.
        cast: whether types may differ; or the type that targets have where they do, for all or
            by name.
        strict: whether a source that serves no target is a problem.
        transforms: what makes a target of other elements, by its name.
    """
    problems: list[str] = []
    matches: list[Match] = []
    made = {made for name, of in transforms.items() for made in of.outputs(name) if made != name}
    for name, wanted in target.items():
        if name in made:
            continue
        served_by = serving_name(name, source, ties)
        if served_by is None:
            problems.append(f"{name}: not in the source")
            continue
        try:
            found = _match(name, served_by, source[served_by], wanted, cast, transforms.get(name))
        except ReshardError as error:
            problems.append(f"{name}: {error}")
            continue
        if isinstance(found, str):
            problems.append(f"{name}: {found}")
        else:
            matches.append(found)
    used = {tied_root(name, ties) for name in target}
    unused = [name for name in source if tied_root(name, ties) not in used]
    if strict:
        problems += [f"{name}: in the source only" for name in unused]
    return matches, problems


def _match(
    name: str, served_by: str, held: Held, wanted: Held, cast: Cast, transform: Transform | None
) -> Match | str:
    source, target = held.layout, wanted.layout
    if transform is not None:
        if source.shape != target.shape:
            return _other_shapes(source, target)
        travels = transform.sent_dtype(held.dtype)
        return Match(name, served_by, source, target, travels, is_transformed=True)
    if held.parameter is not None and wanted.parameter is not None:
        # Whether types may differ is asked below, of all kinds of models alike.
        differs = held.dtype != wanted.dtype
        pair = reconcile(held.parameter, wanted.parameter, cast=wanted.dtype if differs else None)
        source = moved_by(pair.source.layout(pair.shape), held.first_rank)
        target = moved_by(pair.target.layout(pair.shape), wanted.first_rank)
    elif source.shape != target.shape:
        return _other_shapes(source, target)
    if held.dtype == wanted.dtype:
        return Match(name, served_by, source, target, held.dtype)
    allowed = cast.get(name, False) if isinstance(cast, Mapping) else cast
    if allowed is False:
        return f"the source is {held.dtype}, the target {wanted.dtype}; to convert, say cast=True"
    if allowed is not True and as_dtype(allowed).name != wanted.dtype:
        return f"cast to {allowed}, but the target is {wanted.dtype}"
    if source.contributions > 1 or target.contributions > 1:
        return f"partial, and {held.dtype} to {wanted.dtype}; combine it before it is cast"
    return Match(name, served_by, source, target, _narrower(held.dtype, wanted.dtype))


def _other_shapes(source: Layout, target: Layout) -> str:
    return f"shape {list(target.shape)}, the source's {list(source.shape)}"


def _narrower(source: str, target: str) -> str:
    """The type of the elements that travel; of two equally wide ones the target's."""
    widths = [as_dtype(dtype).itemsize_bytes for dtype in (source, target)]
    return source if widths[0] < widths[1] else target
