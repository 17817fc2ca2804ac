"""Local functions of reductions: of parts without elements, and running totals of parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from reshard.spmd.local.by_name import find_function, own_attributes
from reshard.spmd.local.local_work import Function, LocalWork


def extremum(work: LocalWork) -> list[Function]:
    """A part without elements gives what any number replaces."""
    function = partial(
        find_function(work, work.library.namespace, work.name), **own_attributes(work)
    )
    functions: list[Function] = []
    for shape, result in zip(work.operand_shapes_here(), work.result_shapes_here(()), strict=True):
        # A library refuses the maximum of nothing; the identity leaves other ranks' contributions
        # alone.
        is_empty = bool(work.result_specs) and 0 in shape
        functions.append(partial(_fill_identity, work, result) if is_empty else function)
    return functions


def _fill_identity(work: LocalWork, shape: tuple[int, ...], x: Any) -> Any:
    """Least for `max`, greatest for `min`."""
    made = work.library.filled(shape, work.library.identity(work.name, x), x)
    return work.library.linked(made, x)


def running_totals(work: LocalWork) -> Function:
    """Totals up to each place of an axis; with lengths of parts, anew at the start of each."""
    options = own_attributes(work)
    parts, axis = options.pop("parts", None), options["axis"]
    scan = partial(find_function(work, work.library.namespace, work.name), **options)
    if parts is None or work.is_cut(0, axis):
        # A part that is cut off is all of one that begins anew.
        return scan
    ends = np.cumsum(parts).tolist()
    windows = [
        (slice(None),) * axis + (slice(end - size, end),)
        for end, size in zip(ends, parts, strict=True)
    ]
    concat = work.library.namespace.concat
    return lambda x: concat([scan(x[window]) for window in windows], axis=axis)
