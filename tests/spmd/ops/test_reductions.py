"""Element types of running totals."""

from __future__ import annotations

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("cut", ["-", "x", "- | sum(x)"])
@pytest.mark.parametrize("name", ["cumulative_sum", "cumulative_prod"])
def test_totals_have_the_type_that_is_asked_for(name: str, cut: str, library: str) -> None:
    data = np.array([3, 5, -7, 2, 100, 9, 4], np.int8)
    with sp.running(sp.in_process(library)):
        x = sp.array(data, spec(DeviceMesh.of(x=2), cut))
        for options in ({"dtype": "int8"}, {"dtype": "int16"}, {"dtype": "float32"}, {}):
            for initial in (False, True):
                found = getattr(sp, name)(x, include_initial=initial, **options)
                expected = getattr(np, name)(data, include_initial=initial, **options)
                assert found.dtype.name == expected.dtype.name
                np.testing.assert_array_equal(np.asarray(found), expected)
