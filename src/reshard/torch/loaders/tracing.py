"""Trace the layout of a rank from its weight loader.

The loader runs once with tensors that have shapes and no values, while a dispatch mode records its
operators (`tracing_mode`). This takes no memory and no device, so models of any size are traced at
once. A loader that reads values runs again with values that encode their position (`trace_values`):
if each element of each source has its own number, the values of a parameter after loading identify
their sources. Elements are numbered through all sources; a number has a low and a high part, each
exact in float32; the loader runs once for each. Narrower types would round them: nothing is cast.

A loader may write to a parameter, replace its storage (`param.data = loaded`) or replace the
parameter. Parameters are therefore looked up by name after it ran, and the changes are reverted
before it runs again (`LoaderTargets`).
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reshard.binding import View
from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError, RunError, UsageError
from reshard.geometry.regions import Region, coalesce
from reshard.geometry.strided_overlap import find_regions
from reshard.layout import Box
from reshard.recipes.engine_layouts import (
    Computed,
    Constant,
    ParameterLayout,
    RankLayout,
    SourcePiece,
)
from reshard.runs import IntArray
from reshard.torch.loaders.region_map import (
    ComputedFrom,
    CopyOf,
    FilledWith,
    Origin,
    RegionMap,
    add_cast,
)
from reshard.torch.loaders.tracing_mode import TracingMode, ValuesNeeded, carrier_dtype


class LoaderTargets:
    """The parameters and persistent buffers of a module, or the tensors of a dict.

    Raises UsageError for anything else, or if there are none.
    """

    def __init__(self, targets: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        if not isinstance(targets, torch.nn.Module | Mapping):
            raise UsageError(
                f"targets of {type(targets).__name__}; give the module that is loaded, or a dict "
                "of its tensors by name"
            )
        self.targets = targets
        for name, tensor in self.named().items():
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                raise UsageError(f"the target {name!r} is {tensor!r:.80}; give a dense tensor")
        if not self.named():
            raise UsageError("targets without a parameter; give the module that is loaded")

    def named(self) -> dict[str, torch.Tensor]:
        """Return the current tensors by name; shared tensors under each of their names."""
        if isinstance(self.targets, Mapping):
            return dict(self.targets)
        tensors: dict[str, torch.Tensor] = {}
        for prefix, module in self.targets.named_modules(remove_duplicate=False):
            entries = {**module._parameters}
            entries.update(
                (name, buffer)
                for name, buffer in module._buffers.items()
                if name not in module._non_persistent_buffers_set
            )
            for name, tensor in entries.items():
                if tensor is not None:
                    tensors[f"{prefix}.{name}" if prefix else name] = tensor
        return tensors

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore storages, parameters and attributes of modules on exit."""
        # Loaders may note in attributes of modules what they have loaded.
        tensors = [(tensor, tensor.detach()) for tensor in self.named().values()]
        modules = list(self.targets.modules()) if isinstance(self.targets, torch.nn.Module) else []
        before = [
            (module, {k: _copy_table(v) for k, v in vars(module).items()}) for module in modules
        ]
        table = dict(self.targets) if isinstance(self.targets, dict) else None
        try:
            yield
        finally:
            for module, attributes in before:
                # Cleared first, since a loader may have added attributes.
                vars(module).clear()
                vars(module).update(attributes)
            if table is not None and isinstance(self.targets, dict):
                self.targets.clear()
                self.targets.update(table)
            for tensor, memory in tensors:
                if tensor.untyped_storage()._cdata != memory.untyped_storage()._cdata:
                    tensor.data = memory

    @contextmanager
    def in_memory(self, carrier: Any, value: float) -> Iterator[None]:
        """Replace each tensor by a CPU tensor filled with `value`, of dtype `carrier(dtype)`.

        The objects and their attributes stay, since loaders identify parameters by them.
        """
        storages: dict[int, torch.Tensor] = {}
        swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            for name, tensor in self.named().items():
                # Tied parameters have several names.
                if any(tensor is done for done, _ in swapped):
                    continue
                replacement = _make_alike(tensor, storages, carrier, value)
                if weakref.getweakrefs(tensor):
                    raise RunError(
                        f"the values of {name!r} cannot be traced: something refers to it weakly; "
                        "trace the model before it is compiled or wrapped"
                    )
                try:
                    torch.utils.swap_tensors(tensor, replacement)
                except RuntimeError as error:
                    raise RunError(
                        f"the values of {name!r} cannot be traced: {error}; give tensors without "
                        "other views (`detach()` makes one)"
                    ) from error
                swapped.append((tensor, replacement))
            yield
        finally:
            for tensor, replacement in swapped:
                torch.utils.swap_tensors(tensor, replacement)


def _copy_table(value: Any) -> Any:
    """Copy a module's tables of parameters and modules."""
    return value.copy() if isinstance(value, dict | set) else value


def _make_alike(
    tensor: torch.Tensor, storages: dict[int, torch.Tensor], carrier: Any, value: float
) -> torch.Tensor:
    """Return a CPU tensor with the strides and attributes of `tensor`; memory stays shared."""
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        size = storage.nbytes() // tensor.dtype.itemsize
        storages[storage._cdata] = torch.full((size,), value, dtype=carrier(tensor.dtype))
    flat = storages[storage._cdata]
    alike = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    if isinstance(tensor, torch.nn.Parameter):
        # Integer parameters cannot require gradients.
        needs = tensor.requires_grad and alike.is_floating_point()
        alike = torch.Tensor._make_subclass(type(tensor), alike, needs)
    vars(alike).update(vars(tensor))
    return alike


# The bits of the low part of a number; both parts are exact in float32, even after additions.
LOW_BITS = 22
# A run for each part, and two with mixed bits: a computed value may happen to look like the number
# of an element in the first two, but hardly in all four.
RUNS = 4
MAX_BYTES = 16 << 30

_UNFILLED, _CONSTANT, _COMPUTED = -1, -2, -3
# Groups of names of targets that share memory.
Ties = tuple[tuple[str, ...], ...]


def trace_values(
    run: Callable[[dict[str, torch.Tensor]], None],
    kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    targets: LoaderTargets,
    max_bytes: int = MAX_BYTES,
) -> tuple[dict[str, RegionMap], TracingMode, Ties]:
    """Return the contents of each target after loading, by values.

    The last run's tracing mode and the targets that share memory after it are returned, too.

    Args:
        run: the loader, given the sources.
        kinds: the type and shape of each source.
        targets: what it fills; they are as before afterwards.
        max_bytes: of all sources and targets together in float32.

    Raises:
        RunError: a model that is too large for it, or whatever the loader raises.
    """
    sizes = [math.prod(shape) for _, shape in kinds.values()]
    # Sources are separated by a gap, so that no box continues into the next source. No element has
    # number 0, a common fill value.
    bases = np.cumsum([1, *(size + 1 for size in sizes)])
    target_elements = sum(tensor.numel() for tensor in targets.named().values())
    needed = 4 * (int(bases[-1]) + target_elements)
    if needed > max_bytes:
        raise RunError(
            f"this loader looks at values, and values for the sources and targets take "
            f"{needed:,} bytes, more than {max_bytes:,}; trace a smaller model of the same kind, "
            "or give more (`max_bytes`)"
        )
    values_by_name: dict[str, list[NDArray[np.float64]]] = {}
    types: dict[str, torch.dtype] = {}
    dtypes = {name: tensor.dtype for name, tensor in targets.named().items()}
    default = torch.get_default_dtype()
    # A narrower type would round numbers in tensors that the loader makes.
    torch.set_default_dtype(torch.float32)
    try:
        for number in range(RUNS):
            sources = {
                name: _number(base, shape, number).to(carrier_dtype(dtype))
                # The last base is where a further source would begin.
                for base, (name, (dtype, shape)) in zip(bases.tolist(), kinds.items(), strict=False)
            }
            # Unfilled elements have another value in each run, unlike constants.
            with targets.kept(), targets.in_memory(carrier_dtype, -1.0 - number):
                mode = TracingMode(sources, [dtype for dtype, _ in kinds.values()])
                for name, tensor in targets.named().items():
                    mode.register_target(tensor, dtypes[name])
                with mode:
                    run(sources)
                maps = {}
                for name, tensor in targets.named().items():
                    values_by_name.setdefault(name, []).append(_read_values(tensor))
                    maps[name] = mode.read(tensor)
                    types[name] = mode.type_of(tensor)
                # Before the targets are restored, since a loader may tie them.
                tied = find_shared_memory(targets.named())
    finally:
        torch.set_default_dtype(default)
    mode.target_types = types
    names = [str(dtype).removeprefix("torch.") for dtype, _ in kinds.values()]
    regions = {}
    for name, values in values_by_name.items():
        if len(values) != RUNS or len({value.shape for value in values}) != 1:
            raise RunError(
                f"the loader makes {name!r} of another shape from run to run, by its values; "
                "layouts do not depend on values"
            )
        dtype = str(types[name]).removeprefix("torch.")
        regions[name] = _find_regions(values, bases, names, dtype, maps[name])
    return regions, mode, tied


def _read_values(tensor: torch.Tensor) -> NDArray[np.float64]:
    # Numbers of elements have at most 22 bits in any carrier, so float64 holds them exactly.
    values: NDArray[np.float64] = tensor.detach().cpu().to(torch.float64).numpy()
    return values.copy()


def _number(base: int, shape: Sequence[int], run: int) -> torch.Tensor:
    """Return the values of a source in a run."""
    numbers = np.arange(base, base + math.prod(shape), dtype=np.int64)
    return torch.from_numpy(_value(numbers, run).reshape(tuple(shape)))


def _value(numbers: IntArray, run: int) -> IntArray:
    """Return the values of elements, given their numbers, in a run."""
    if run == 0:
        return numbers & ((1 << LOW_BITS) - 1)
    if run == 1:
        return numbers >> LOW_BITS
    # Mix the bits so that the values of neighbours are unrelated.
    factor = 0x9E3779B97F4A7C15 if run == 2 else 0xC2B2AE3D27D4EB4F
    # Products overflow 64 bits on purpose; scalars would cause a warning.
    mixed = np.atleast_1d(numbers).astype(np.uint64) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(64 - LOW_BITS)).astype(np.int64).reshape(numbers.shape)


def _find_regions(
    values: list[NDArray[np.float64]],
    bases: IntArray,
    source_types: list[str],
    dtype: str,
    traced: RegionMap,
) -> RegionMap:
    """Return the regions of a target, given its values in all runs."""
    shape = values[0].shape
    # Loaders may make infinities and NaN, whose `floor` warns.
    with np.errstate(invalid="ignore"):
        are_whole = [np.isfinite(value) & (value == np.floor(value)) for value in values]
    whole = [
        np.where(is_integer, value, -1).astype(np.int64)
        for is_integer, value in zip(are_whole, values, strict=True)
    ]
    number = whole[0] + (whole[1] << LOW_BITS)
    source = np.searchsorted(bases, number, side="right") - 1
    is_copied = (number >= 0) & (source >= 0) & (source < len(source_types))
    candidates = np.where(is_copied, number, 0)
    for run in range(RUNS):
        is_copied &= _value(candidates, run) == values[run]
    is_unfilled = np.logical_and.reduce([v == -1.0 - run for run, v in enumerate(values)])
    same = np.logical_and.reduce(
        [(v == values[0]) | (np.isnan(v) & np.isnan(values[0])) for v in values]
    )
    category = np.where(
        is_copied, source, np.where(is_unfilled, _UNFILLED, np.where(same, _CONSTANT, _COMPUTED))
    )
    position = np.where(is_copied, number - bases[np.where(is_copied, source, 0)], 0)
    # Compare constants by their bits: NaN differs from itself.
    bits = np.where(category == _CONSTANT, values[0], 0.0).view(np.int64)
    regions: list[Region] = []
    for region in find_regions(position, category, bits):
        source_number, value = region.container
        if source_number >= 0:
            cast = add_cast((), source_types[source_number], dtype)
            regions.append(region._replace(container=CopyOf(source_number, cast)))
        elif source_number == _CONSTANT:
            fill = float(np.array(value, dtype=np.int64).view(np.float64))
            regions.append(region._replace(container=FilledWith(fill)))
        elif source_number == _COMPUTED:
            regions += _find_operations(traced, region.start, region.stop)
    return RegionMap(tuple(shape), tuple(regions))


def _find_operations(
    traced: RegionMap, start: tuple[int, ...], stop: tuple[int, ...]
) -> list[Region]:
    """Return the traced operations of a computed box."""
    part = traced.crop(start, stop)
    unknown: Origin = ComputedFrom(("unknown",), ())

    def name(origin: Origin) -> Origin:
        # The operators copied it, the values differ: the loader bypassed the dispatcher.
        is_computed = isinstance(origin, ComputedFrom) or (
            isinstance(origin, CopyOf) and not origin.is_copied
        )
        return origin if is_computed else unknown

    result = RegionMap.of(part.shape, unknown).overwrite(part.map_origins(name).regions)
    return [region.translate(start) for region in result.regions]


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
            return _lay_out(rank, specs, *_follow(run, specs, target_set), None)
        except Exception as error:
            # Whether values help is known after the second attempt.
            failure = error
            if values is False:
                raise _explain(error, "without values") from error
    try:
        traced = trace_values(run, specs, target_set, max_bytes)
    except Exception as error:
        if failure is not None and not isinstance(failure, ValuesNeeded):
            # Report the first error, which a user of the loader would see.
            raise RunError(
                f"load_weights raised {type(failure).__name__}: {_shorten(failure)}; give the "
                f"sources and targets that it loads (with values too: {_shorten(error)})"
            ) from failure
        raise _explain(error, "with values") from error
    reason = "as asked" if failure is None else f"it asked for values: {_shorten(failure)}"
    return _lay_out(rank, specs, *traced, reason)


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
) -> tuple[dict[str, RegionMap], TracingMode, Ties]:
    """Return the same as `trace_values`, from a run without values."""
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


def find_shared_memory(named: Mapping[str, torch.Tensor]) -> Ties:
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
    maps: Mapping[str, RegionMap],
    mode: TracingMode,
    tied: Ties,
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
