"""What networks are made of, on shardings over a 2x3 mesh, against PyTorch or NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from torch.nn import functional

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from selection import choose
from spmd.network_cases import CASES, RANDOM, NetworkCase, X, by_torch

MESH = DeviceMesh.of(x=2, y=3)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_sharding(case: NetworkCase) -> None:
    for given in case.shardings(MESH, choose(case.most // 2, case.most)):
        case.check(given, MESH)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_some_shardings_of_tensors(case: NetworkCase) -> None:
    with sp.running(sp.in_process("torch")):
        for given in case.shardings(MESH, 6):
            case.check(given, MESH)


def test_a_softmax_of_a_cut_axis_stays_in_shards() -> None:
    found = sp.softmax(sp.array(X, spec(MESH, "x, y")), axis=0)
    assert str(found.spec) == "x, y"


def test_rows_of_a_cut_table_hold_contributions() -> None:
    indices, table = np.array([6, 0, -1, 3, 3]), sp.array(X, spec(MESH, "x, -"))
    found = sp.embedding(sp.array(indices, spec(MESH, "y")), table)
    assert str(found.spec) == "y, - | sum(x)"


def test_convolution_of_height_width_and_channels_in_shards() -> None:
    image, kernel = RANDOM.normal(size=(3, 5, 7, 7)), RANDOM.normal(size=(5, 5, 3, 3))
    expected = by_torch(functional.conv2d, image, kernel)
    for text, of_kernel in (
        ("-, -, x, -", "-, -, -, -"),
        ("-, -, -, y", "-, -, -, -"),
        ("-, x, y, -", "-, -, -, -"),
        ("-, -, x, y", "y, -, -, -"),
        ("y, -, -, -", "x, -, -, -"),
    ):
        found = sp.convolution(
            sp.array(image, spec(MESH, text)), sp.array(kernel, spec(MESH, of_kernel))
        )
        assert found.shape == expected.shape
        np.testing.assert_allclose(found.to_dense(), expected, 1e-11, 1e-11)
