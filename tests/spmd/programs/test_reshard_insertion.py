"""Reshards as operations of a graph: the same program, in which nothing else moves."""

from __future__ import annotations

import numpy as np
import pytest

import reshard.spmd as sp
from reshard.spmd.arrays.argument_tree import leaves
from reshard.spmd.core.operator import find_operator
from reshard.spmd.graph import WITH_SHARDING
from reshard.spmd.programs.reshard_insertion import insert_reshards
from reshard.spmd.tracing.trace import trace_graph
from spmd.traced_functions import FUNCTIONS, Traced


@pytest.mark.parametrize("strategy", ["eager", "basic", "aggressive"])
@pytest.mark.parametrize("one", FUNCTIONS, ids=lambda one: one.name)
def test_every_reshard_is_an_operation(one: Traced, strategy: str) -> None:
    traced = sp.trace(one.function, *one.types(), strategy=strategy)
    inserted = insert_reshards(traced.graph, is_final=False)
    places = zip(inserted.graph.operations, inserted.places, strict=True)
    operators = [place for operation, place in places if operation.target is None]
    assert operators == [n for n, x in enumerate(traced.graph.operations) if x.target is None]
    found = trace_graph(inserted.graph, strategy)
    assert found.moved_bytes == traced.moved_bytes
    assert found.outputs == traced.outputs
    for operation in found.operations:
        name = operation.operation.operator
        moves = name == WITH_SHARDING or find_operator(name).placed is not None
        assert moves or not [*operation.before, *operation.after, *operation.reused]
    made, right = (
        [leaf for _, leaf in leaves([one.run(*given)])]
        for one, given in ((found, one.arrays()), (traced, one.arrays()))
    )
    for x, y in zip(made, right, strict=True):
        np.testing.assert_array_equal(x.to_dense(), y.to_dense())
