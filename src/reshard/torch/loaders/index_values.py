"""Trace a loader by element values that encode their position.

A loader that reads values needs some. If each element of each source holds its own number, the
values of a parameter after loading identify their sources:

1. Elements are numbered through all sources. A number has a low and a high part, each exact in\n
float32; the loader runs once for each. Narrower types would round them, so nothing is cast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from reshard.errors import RunError
from reshard.geometry.regions import Region
from reshard.torch.loaders.element_map import Integers, find_boxes
from reshard.torch.loaders.region_map import (
    ComputedFrom,
    CopyOf,
    FilledWith,
    Origin,
    RegionMap,
    add_cast,
)
from reshard.torch.loaders.targets import LoaderTargets
from reshard.torch.loaders.tracing_mode import TracingMode, carrier_dtype

# The bits of the low part of a number; both parts are exact in float32, even after additions.
LOW_BITS = 22
RUNS = 4
MAX_BYTES = 16 << 30

_UNFILLED, _CONSTANT, _COMPUTED = -1, -2, -3


def trace_values(
    run: Callable[[dict[str, torch.Tensor]], None],
    kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    targets: LoaderTargets,
    max_bytes: int = MAX_BYTES,
) -> tuple[dict[str, RegionMap], TracingMode]:
    """Return the contents of each target after loading, by values, and the last run's tracing mode.

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
    torch.set_default_dtype(torch.float32)
    try:
        for number in range(RUNS):
            sources = {
                name: _number(base, shape, number).to(carrier_dtype(dtype))
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
    return regions, mode


def _read_values(tensor: torch.Tensor) -> NDArray[np.float64]:
    values: NDArray[np.float64] = tensor.detach().cpu().to(torch.float64).numpy()
    return values.copy()


def _number(base: int, shape: Sequence[int], run: int) -> torch.Tensor:
    """Return the values of a source in a run."""
    numbers = np.arange(base, base + math.prod(shape), dtype=np.int64)
    return torch.from_numpy(_value(numbers, run).reshape(tuple(shape)))


def _value(numbers: Integers, run: int) -> Integers:
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
    bases: Integers,
    source_types: list[str],
    dtype: str,
    traced: RegionMap,
) -> RegionMap:
    """Return the regions of a target, given its values in all runs."""
    shape = values[0].shape
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
    for start, stop, (source_number, value), (first,), steps in find_boxes(
        [position], [category, bits]
    ):
        if source_number >= 0:
            cast = add_cast((), source_types[source_number], dtype)
            strides = tuple(step for (step,) in steps)
            regions.append(Region(start, stop, CopyOf(source_number, cast), first, strides))
        elif source_number == _CONSTANT:
            fill = float(np.array(value, dtype=np.int64).view(np.float64))
            regions.append(Region(start, stop, FilledWith(fill), 0, (0,) * len(start)))
        elif source_number == _COMPUTED:
            regions += _find_operations(traced, start, stop)
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
