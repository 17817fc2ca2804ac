"""A loader traced by values that name their place.

A loader that looks at values cannot be followed without any. Where every element of every source
holds its own number, what a parameter holds afterwards says where it came from:

1. Elements are numbered through all sources. A number has a low and a high part, each exact in
   float32; the loader runs once for each. Narrower types would round them, so nothing is cast to
   one.
2. What is computed would name other elements. So it runs twice more with numbers that follow from
   the first by no simple rule: only an element that was copied has all of them.
3. What has the same value in all runs is a constant, what still has the value from before is not
   filled, and the rest is computed. By what, the operators say that were followed (`following`).
4. Boxes are found in the numbers of each parameter (`element_map`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from reshard.errors import RunError
from reshard.torch.loaders.element_map import Integers, find_boxes
from reshard.torch.loaders.following import FollowedOperators, carrier_of
from reshard.torch.loaders.origins import Filled, Made, Origin, Taken, with_cast
from reshard.torch.loaders.region_map import RegionMap, TensorRegion
from reshard.torch.loaders.targets import LoaderTargets

# Numbers are parted here; both parts are exact in float32, also after the loader adds some.
LOW_BITS = 22
RUNS = 4
MOST_BYTES = 16 << 30

_UNFILLED, _CONSTANT, _COMPUTED = -1, -2, -3


def trace_values(
    run: Callable[[dict[str, torch.Tensor]], None],
    kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    targets: LoaderTargets,
    most_bytes: int = MOST_BYTES,
) -> tuple[dict[str, RegionMap], FollowedOperators]:
    """What each target has after a loader ran, by values; and the last run, as it was followed.

    Args:
        run: the loader, given the sources.
        kinds: the type and shape of each source.
        targets: what it fills; they are as before afterwards.
        most_bytes: of all sources and targets together in float32.

    Raises:
        RunError: a model that is too large for it, or whatever the loader raises.
    """
    sizes = [math.prod(shape) for _, shape in kinds.values()]
    # A gap behind each source, so that no box reaches into the next. No element has the number 0:
    # loaders fill with that.
    bases = np.cumsum([1, *(size + 1 for size in sizes)])
    held = sum(tensor.numel() for tensor in targets.named().values())
    needed = 4 * (int(bases[-1]) + held)
    if needed > most_bytes:
        raise RunError(
            f"this loader looks at values, and values for the sources and targets take "
            f"{needed:,} bytes, more than {most_bytes:,}; trace a smaller model of the same kind, "
            "or give more (`most_bytes`)"
        )
    found: dict[str, list[NDArray[np.float64]]] = {}
    types: dict[str, torch.dtype] = {}
    before = {name: tensor.dtype for name, tensor in targets.named().items()}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        for number in range(RUNS):
            sources = {
                name: _number(base, shape, number).to(carrier_of(kind))
                for base, (name, (kind, shape)) in zip(bases.tolist(), kinds.items(), strict=False)
            }
            # The value of what is not filled differs from run to run, as no constant does.
            with targets.kept(), targets.in_memory(carrier_of, -1.0 - number):
                followed = FollowedOperators(sources, [kind for kind, _ in kinds.values()])
                for name, tensor in targets.named().items():
                    followed.register_target(tensor, before[name])
                with followed:
                    run(sources)
                maps = {}
                for name, tensor in targets.named().items():
                    found.setdefault(name, []).append(_read_values(tensor))
                    maps[name] = followed.read(tensor)
                    types[name] = followed.type_of(tensor)
    finally:
        torch.set_default_dtype(default)
    followed.target_types = types
    names = [str(kind).removeprefix("torch.") for kind, _ in kinds.values()]
    regions = {}
    for name, values in found.items():
        if len(values) != RUNS or len({one.shape for one in values}) != 1:
            raise RunError(
                f"the loader makes {name!r} of another shape from run to run, by its values; "
                "layouts do not depend on values"
            )
        kind = str(types[name]).removeprefix("torch.")
        regions[name] = _find_regions(values, bases, names, kind, maps[name])
    return regions, followed


def _read_values(tensor: torch.Tensor) -> NDArray[np.float64]:
    values: NDArray[np.float64] = tensor.detach().cpu().to(torch.float64).numpy()
    return values.copy()


def _number(base: int, shape: Sequence[int], run: int) -> torch.Tensor:
    """The values of a source in one run."""
    numbers = np.arange(base, base + math.prod(shape), dtype=np.int64)
    return torch.from_numpy(_value(numbers, run).reshape(tuple(shape)))


def _value(numbers: Integers, run: int) -> Integers:
    """The value of each element, by its number, in one run."""
    if run == 0:
        return numbers & ((1 << LOW_BITS) - 1)
    if run == 1:
        return numbers >> LOW_BITS
    # Mixed so that numbers side by side have nothing to do with one another.
    factor = 0x9E3779B97F4A7C15 if run == 2 else 0xC2B2AE3D27D4EB4F
    # Products outgrow 64 bits, and are meant to; single numbers would be warned of.
    mixed = np.atleast_1d(numbers).astype(np.uint64) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(64 - LOW_BITS)).astype(np.int64).reshape(numbers.shape)


def _find_regions(
    values: list[NDArray[np.float64]],
    bases: Integers,
    source_types: list[str],
    dtype: str,
    followed: RegionMap,
) -> RegionMap:
    """The regions of a target, from its values in all runs."""
    shape = values[0].shape
    with np.errstate(invalid="ignore"):
        are_whole = [np.isfinite(value) & (value == np.floor(value)) for value in values]
    whole = [
        np.where(one, value, -1).astype(np.int64)
        for one, value in zip(are_whole, values, strict=True)
    ]
    number = whole[0] + (whole[1] << LOW_BITS)
    source = np.searchsorted(bases, number, side="right") - 1
    is_copied = (number >= 0) & (source >= 0) & (source < len(source_types))
    known = np.where(is_copied, number, 0)
    for run in range(RUNS):
        is_copied &= _value(known, run) == values[run]
    is_unfilled = np.logical_and.reduce([v == -1.0 - run for run, v in enumerate(values)])
    same = np.logical_and.reduce(
        [(v == values[0]) | (np.isnan(v) & np.isnan(values[0])) for v in values]
    )
    kind = np.where(
        is_copied, source, np.where(is_unfilled, _UNFILLED, np.where(same, _CONSTANT, _COMPUTED))
    )
    position = np.where(is_copied, number - bases[np.where(is_copied, source, 0)], 0)
    # The bits of a constant tell it from others, also where it is not a number.
    bits = np.where(kind == _CONSTANT, values[0], 0.0).view(np.int64)
    regions: list[TensorRegion] = []
    for start, stop, (what, value), (first,), steps in find_boxes([position], [kind, bits]):
        if what >= 0:
            cast = with_cast((), source_types[what], dtype)
            strides = tuple(step for (step,) in steps)
            regions.append(TensorRegion(start, stop, Taken(what, first, strides, cast)))
        elif what == _CONSTANT:
            number_of = float(np.array(value, dtype=np.int64).view(np.float64))
            regions.append(TensorRegion(start, stop, Filled(number_of)))
        elif what == _COMPUTED:
            regions += _find_operations(followed, start, stop)
    return RegionMap(tuple(shape), tuple(regions))


def _find_operations(
    followed: RegionMap, start: tuple[int, ...], stop: tuple[int, ...]
) -> list[TensorRegion]:
    """What the operators that were followed say of a box that is computed."""
    part = followed
    for d, (low, high) in enumerate(zip(start, stop, strict=True)):
        part = part.narrowed(d, low, high)
    unknown: Origin = Made(("unknown",), ())

    def name(origin: Origin) -> Origin:
        # It was seen as copied, and is not: something behind the operators changed it.
        is_computed = isinstance(origin, Made) or (
            isinstance(origin, Taken) and not origin.is_copied
        )
        return origin if is_computed else unknown

    named = RegionMap.of(part.shape, unknown).overwritten(part.changed(name).regions)
    return [
        TensorRegion(
            tuple(a + b for a, b in zip(region.start, start, strict=True)),
            tuple(a + b for a, b in zip(region.stop, start, strict=True)),
            region.origin,
        )
        for region in named.regions
    ]
