"""The layout of a rank, traced from the loader that fills it.

A loader is run once with tensors that have shapes and no values, and what it does with them is
followed (`following`). It takes no memory and no device, so models of any size are traced at once.
A loader that asks for values is run again with values that name their place (`index_values`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from reshard.binding import View
from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError, RunError, UsageError
from reshard.layout import Box
from reshard.recipes.engine_layouts import (
    Computed,
    Constant,
    ParameterLayout,
    RankLayout,
    SourcePiece,
)
from reshard.torch.loaders.following import FollowedOperators, ValuesNeeded
from reshard.torch.loaders.index_values import MOST_BYTES, trace_values
from reshard.torch.loaders.origins import Filled, Taken
from reshard.torch.loaders.region_map import RegionMap, TensorRegion, cut_away
from reshard.torch.loaders.targets import LoaderTargets

# How a loader takes what it loads: pairs of a name and a tensor, or all by name.
FORMS = ("pairs", "dict")


def trace_loading(
    load_weights: Callable[[Any], Any],
    sources: Mapping[str, Any],
    targets: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    rank: int = 0,
    form: str | None = None,
    values: bool | None = None,
    most_bytes: int = MOST_BYTES,
) -> RankLayout:
    """Trace a weight loader: the layout of every parameter of a rank.

    The loader runs unmodified. Copies are followed through views, slices, transposes, `cat`,
    `stack`, `clone`, casts, padding, known indices and in-place writes, of which the last one
    counts. Computed values are reported with their operations and sources, and never taken for a
    copy.

    Args:
        load_weights: the loader: `model.load_weights`, `model.load_state_dict`, or a function of
            your own.
        sources: what it loads, by name: tensors (only their types and shapes are used, so `meta`
            tensors suffice), pairs of a dtype and a shape, or anything with a `dtype` and a
            `shape`.
        targets: what it fills: a module, preferably on `meta`, or a dict of tensors.
        rank: the number of this rank, for the result.
        form: how the loader takes the sources: `"pairs"`, an iterator of names and tensors, or
            `"dict"`; by default pairs, and a dict for `load_state_dict`.
        values: whether to run it with element values: None does if it reads some. True takes the
            memory of all sources and targets in float32, and runs it four times.
        most_bytes: the maximum memory for values.

    Returns:
        A layout for every parameter and persistent buffer by its name; the sources that it does not
        read; which parameters share memory; and whether values were needed.

    Raises:
        RunError: the loader raised, or reads values where that is not permitted or takes too much
            memory.
        UsageError: arguments of other kinds.

    >>> import torch
    >>> model = torch.nn.Linear(4, 2, bias=False, device="meta")
    >>> def load(weights):
    ...     with torch.no_grad():
    ...         model.weight.copy_(dict(weights)["w"][2:])
    >>> traced = trace_loading(load, {"w": ("float32", (4, 4)), "unused": ("float32", (1,))}, model)
    >>> print(traced["weight"])
    weight float32 [2, 4]
      [0:2, 0:4] w from 8, strides 4, 1
    >>> traced.unread, traced.method
    (('unused',), 'followed')
    """
    if not callable(load_weights):
        raise UsageError(
            f"load_weights {load_weights!r}; give a function, such as model.load_weights"
        )
    if form is None:
        is_state_dict = getattr(load_weights, "__name__", "") == "load_state_dict"
        form = "dict" if is_state_dict else "pairs"
    if form not in FORMS:
        raise UsageError(f"form {form!r}; it is one of {', '.join(FORMS)}")
    kinds = _list_kinds(sources)
    holder = LoaderTargets(targets)

    def run(tensors: dict[str, torch.Tensor]) -> None:
        load_weights(dict(tensors) if form == "dict" else iter(tensors.items()))

    failure: Exception | None = None
    if values is not True:
        try:
            maps, followed, tied = _follow(run, kinds, holder)
            return _lay_out(rank, kinds, holder, maps, followed, tied, None)
        except Exception as error:
            # Whether values would have helped is known when there are some.
            failure = error
            if values is False:
                raise _explain(error, "without values") from error
    try:
        maps, followed = trace_values(run, kinds, holder, most_bytes)
    except Exception as error:
        if failure is not None and not isinstance(failure, ValuesNeeded):
            # What it raised at first is what a user of the loader sees.
            raise RunError(
                f"load_weights raised {type(failure).__name__}: {_shorten(failure)}; give the "
                f"sources and targets that it loads (with values too: {_shorten(error)})"
            ) from failure
        raise _explain(error, "with values") from error
    reason = "as asked" if failure is None else f"it asked for values: {_shorten(failure)}"
    return _lay_out(rank, kinds, holder, maps, followed, find_tied(holder.named()), reason)


def _explain(error: Exception, how: str) -> ReshardError:
    if isinstance(error, ReshardError):
        return error
    return RunError(
        f"load_weights, run {how}, raised {type(error).__name__}: {_shorten(error)}; give the "
        "sources and targets that it loads"
    )


def _shorten(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return text if len(text) <= 200 else f"{text[:197]}..."


def _list_kinds(sources: Any) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The type and shape of every source."""
    if not isinstance(sources, Mapping) or not sources:
        raise UsageError(
            f"sources {str(sources)[:80]!r}; give a dict of tensors, or of dtypes and shapes"
        )
    kinds = {}
    for name, source in sources.items():
        try:
            kind, shape = (
                source
                if isinstance(source, tuple) and len(source) == 2
                else (source.dtype, source.shape)
            )
            sizes = tuple(int(size) for size in shape)
        except (AttributeError, TypeError, ValueError):
            raise UsageError(
                f"the source {name!r} is {source!r:.80}; give a tensor, or its dtype and shape"
            ) from None
        torch_type = getattr(torch, as_dtype(kind).name, None)
        if not isinstance(torch_type, torch.dtype):
            raise UsageError(f"the source {name!r} is of {kind}, which PyTorch does not have")
        kinds[name] = (torch_type, sizes)
    return kinds


def _follow(
    run: Callable[[dict[str, torch.Tensor]], None],
    kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    holder: LoaderTargets,
) -> tuple[dict[str, RegionMap], FollowedOperators, tuple[tuple[str, ...], ...]]:
    """Run a loader without values."""
    tensors = {
        name: torch.empty(shape, dtype=kind, device="meta") for name, (kind, shape) in kinds.items()
    }
    followed = FollowedOperators(tensors)
    with holder.kept():
        for tensor in holder.named().values():
            followed.register_target(tensor, tensor.dtype)
        with followed:
            run(tensors)
        named = holder.named()
        maps = {name: followed.read(tensor) for name, tensor in named.items()}
        tied = find_tied(named)
        followed.target_types = {name: tensor.dtype for name, tensor in named.items()}
    return maps, followed, tied


def find_tied(named: Mapping[str, torch.Tensor]) -> tuple[tuple[str, ...], ...]:
    """The names of tensors that are the same memory."""
    groups: dict[object, list[str]] = {}
    for name, tensor in named.items():
        if tensor.numel():
            view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            groups.setdefault((tensor.untyped_storage()._cdata, view), []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _lay_out(
    rank: int,
    kinds: Mapping[str, Any],
    holder: LoaderTargets,
    maps: Mapping[str, RegionMap],
    followed: FollowedOperators,
    tied: tuple[tuple[str, ...], ...],
    reason: str | None,
) -> RankLayout:
    names = list(kinds)
    types = followed.target_types
    parameters = {
        name: _lay_out_parameter(name, found, types[name], names) for name, found in maps.items()
    }
    read = {source for one in parameters.values() for source in one.sources}
    notes = []
    if reason is not None:
        notes.append(f"traced by values of elements, {reason}")
    if followed.values_of:
        notes.append(f"the loader looks at the values of {', '.join(followed.values_of)}")
    if followed.written_sources:
        notes.append(f"the loader writes to its sources {', '.join(followed.written_sources)}")
    return RankLayout(
        rank,
        parameters,
        tuple(name for name in names if name not in read),
        tied,
        "followed" if reason is None else "values",
        tuple(notes),
    )


def _lay_out_parameter(
    name: str, found: RegionMap, dtype: torch.dtype, names: list[str]
) -> ParameterLayout:
    pieces, computed, constants = [], [], []
    found = found.coalesced()
    for region in found.regions:
        box, origin = Box(region.start, region.stop), region.origin
        if isinstance(origin, Filled):
            constants.append(Constant(box, origin.value))
            continue
        if not isinstance(origin, Taken):
            sources = tuple(names[number] for number in origin.sources)
            computed.append(Computed(box, origin.operations, sources))
            continue
        # Along a single index there are no steps.
        strides = (s if n > 1 else 0 for n, s in zip(region.sizes, origin.strides, strict=True))
        view = View(origin.offset, tuple(strides))
        if origin.is_copied:
            pieces.append(SourcePiece(box, names[origin.source], view, origin.steps))
        else:
            computed.append(Computed(box, origin.steps, (names[origin.source],), view))
    return ParameterLayout.of(
        name, found.shape, dtype, pieces, computed, constants, _list_unfilled(found)
    )


def _list_unfilled(found: RegionMap) -> list[Box]:
    """The boxes that no region has."""
    size = math.prod(found.shape)
    if sum(math.prod(region.sizes) for region in found.regions) == size:
        return []
    left = [TensorRegion((0,) * len(found.shape), found.shape, Filled(0.0))]
    for region in found.regions:
        left = [part for one in left for part in cut_away(one, region.start, region.stop)]
    whole = RegionMap(found.shape, tuple(left)).coalesced()
    return [Box(region.start, region.stop) for region in whole.regions]
