"""Trace the layout of a rank from its weight loader.

The loader runs once with tensors that have shapes and no values, while a dispatch mode records its
operators (`tracing_mode`). This takes no memory and no device, so models of any size are traced at
once. A loader that reads values runs again with values that encode their position (`index_values`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from reshard.binding import View
from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError, RunError, UsageError
from reshard.geometry.regions import Region, coalesce
from reshard.layout import Box
from reshard.recipes.engine_layouts import (
    Computed,
    Constant,
    ParameterLayout,
    RankLayout,
    SourcePiece,
)
from reshard.torch.loaders.index_values import MAX_BYTES, trace_values
from reshard.torch.loaders.region_map import (
    CopyOf,
    FilledWith,
    RegionMap,
)
from reshard.torch.loaders.targets import LoaderTargets
from reshard.torch.loaders.tracing_mode import TracingMode, ValuesNeeded

# How a loader takes the sources: pairs of a name and a tensor, or a dict.
FORMS = ("pairs", "dict")


def trace_loading(
    load_weights: Callable[[Any], Any],
    sources: Mapping[str, Any],
    targets: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    rank: int = 0,
    form: str | None = None,
    values: bool | None = None,
    max_bytes: int = MAX_BYTES,
    most_bytes: int | None = None,
) -> RankLayout:
    """Trace a weight loader and return the layout of every parameter of a rank.

    The loader runs unmodified. Copies are traced through views, slices, transposes, `cat`,
    `stack`, `clone`, casts, padding, known indices and in-place writes; the last write counts.
    Computed values are reported with their operations and sources, and never taken for a copy.

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
        values: whether to run it with element values; by default only if it reads some. True takes
            the memory of all sources and targets in float32, and runs it four times.
        max_bytes: the maximum memory for values.
        most_bytes: deprecated, now `max_bytes`.

    Returns:
        A layout for every parameter and persistent buffer by name, the sources that the loader does
        not read, the parameters that share memory, and whether values were needed.

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
    if most_bytes is not None:
        message = "most_bytes of trace_loading is now max_bytes"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        max_bytes = most_bytes
    if not callable(load_weights):
        raise UsageError(
            f"load_weights {load_weights!r}; give a function, such as model.load_weights"
        )
    if form is None:
        is_state_dict = getattr(load_weights, "__name__", "") == "load_state_dict"
        form = "dict" if is_state_dict else "pairs"
    if form not in FORMS:
        raise UsageError(f"form {form!r}; it is one of {', '.join(FORMS)}")
    specs = _list_kinds(sources)
    target_set = LoaderTargets(targets)

    def run(tensors: dict[str, torch.Tensor]) -> None:
        load_weights(dict(tensors) if form == "dict" else iter(tensors.items()))

    failure: Exception | None = None
    if values is not True:
        try:
            maps, mode, tied = _follow(run, specs, target_set)
            return _lay_out(rank, specs, target_set, maps, mode, tied, None)
        except Exception as error:
            # Whether values help is known after the second attempt.
            failure = error
            if values is False:
                raise _explain(error, "without values") from error
    try:
        maps, mode = trace_values(run, specs, target_set, max_bytes)
    except Exception as error:
        if failure is not None and not isinstance(failure, ValuesNeeded):
            # Report the first error, which a user of the loader would see.
            raise RunError(
                f"load_weights raised {type(failure).__name__}: {_shorten(failure)}; give the "
                f"sources and targets that it loads (with values too: {_shorten(error)})"
            ) from failure
        raise _explain(error, "with values") from error
    reason = "as asked" if failure is None else f"it asked for values: {_shorten(failure)}"
    return _lay_out(
        rank, specs, target_set, maps, mode, find_shared_memory(target_set.named()), reason
    )


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
    """Return the dtype and shape of every source."""
    if not isinstance(sources, Mapping) or not sources:
        raise UsageError(
            f"sources {str(sources)[:80]!r}; give a dict of tensors, or of dtypes and shapes"
        )
    specs = {}
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
            raise UsageError(f"the source {name!r} is of {kind}, which PyTorch does not support")
        specs[name] = (torch_type, sizes)
    return specs


def _follow(
    run: Callable[[dict[str, torch.Tensor]], None],
    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    target_set: LoaderTargets,
) -> tuple[dict[str, RegionMap], TracingMode, tuple[tuple[str, ...], ...]]:
    """Run a loader without values."""
    tensors = {
        name: torch.empty(shape, dtype=kind, device="meta") for name, (kind, shape) in specs.items()
    }
    mode = TracingMode(tensors)
    with target_set.kept():
        for tensor in target_set.named().values():
            mode.register_target(tensor, tensor.dtype)
        with mode:
            run(tensors)
        named = target_set.named()
        maps = {name: mode.read(tensor) for name, tensor in named.items()}
        tied = find_shared_memory(named)
        mode.target_types = {name: tensor.dtype for name, tensor in named.items()}
    return maps, mode, tied


def find_shared_memory(named: Mapping[str, torch.Tensor]) -> tuple[tuple[str, ...], ...]:
    """Return groups of names whose tensors are the same memory."""
    groups: dict[object, list[str]] = {}
    for name, tensor in named.items():
        if tensor.numel():
            view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            groups.setdefault((tensor.untyped_storage()._cdata, view), []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _lay_out(
    rank: int,
    specs: Mapping[str, Any],
    target_set: LoaderTargets,
    maps: Mapping[str, RegionMap],
    mode: TracingMode,
    tied: tuple[tuple[str, ...], ...],
    reason: str | None,
) -> RankLayout:
    names = list(specs)
    types = mode.target_types
    parameters = {
        name: _lay_out_parameter(name, region_map, types[name], names)
        for name, region_map in maps.items()
    }
    read = {source for parameter in parameters.values() for source in parameter.sources}
    notes = []
    if reason is not None:
        notes.append(f"traced by values of elements, {reason}")
    if mode.values_of:
        notes.append(f"the loader looks at the values of {', '.join(mode.values_of)}")
    if mode.written_sources:
        notes.append(f"the loader writes to its sources {', '.join(mode.written_sources)}")
    return RankLayout(
        rank,
        parameters,
        tuple(name for name in names if name not in read),
        tied,
        "followed" if reason is None else "values",
        tuple(notes),
    )


def _lay_out_parameter(
    name: str, region_map: RegionMap, dtype: torch.dtype, names: list[str]
) -> ParameterLayout:
    pieces, computed, constants = [], [], []
    region_map = region_map.coalesce()
    for region in region_map.regions:
        box, origin = region.box, region.container
        if isinstance(origin, FilledWith):
            constants.append(Constant(box, origin.value))
            continue
        if not isinstance(origin, CopyOf):
            sources = tuple(names[number] for number in origin.sources)
            computed.append(Computed(box, origin.operations, sources))
            continue
        # A single index has no stride.
        strides = (s if n > 1 else 0 for n, s in zip(region.shape, region.strides, strict=True))
        view = View(region.offset, tuple(strides))
        if origin.is_copied:
            pieces.append(SourcePiece(box, names[origin.source], view, origin.steps))
        else:
            computed.append(Computed(box, origin.steps, (names[origin.source],), view))
    return ParameterLayout.of(
        name, region_map.shape, dtype, pieces, computed, constants, _list_unfilled(region_map)
    )


def _list_unfilled(region_map: RegionMap) -> list[Box]:
    """Return the boxes that no region covers."""
    size = math.prod(region_map.shape)
    if sum(region.elements for region in region_map.regions) == size:
        return []
    left = [Region.dense(region_map.shape, None)]
    for region in region_map.regions:
        left = [part for rest in left for part in rest.subtract(region.start, region.stop)]
    return sorted(region.box for region in coalesce(left))
