"""Layouts: who holds what, flat ranges as boxes, bindings and views."""

from __future__ import annotations

from reshard.layout import Layout


def test_an_empty_range_of_no_dimensions_holds_nothing() -> None:
    layout = Layout.flat_ranges((3,), {0: (0, 0), 1: (0, 1)}, dims=0)
    assert layout.local_shape(0) == (0,)
    assert layout.local_shape(1) == (3,)


def test_an_empty_range_of_a_scalar_holds_nothing() -> None:
    layout = Layout.flat_ranges((), {0: (0, 0), 1: (0, 1)})
    assert layout.local_shape(0) is None
    assert layout.holders == (1,)
