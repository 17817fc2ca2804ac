"""Every tensor of every class that transformers has for a model type is matched by its recipe.

The classes and their tensors were recorded by `tests/engines/names/harvest.py`.
"""

from __future__ import annotations

import copy

import pytest

from engines.names.replay import describe_unmatched, read_records, recorded_model_types


@pytest.mark.parametrize("model_type", recorded_model_types())
def test_every_tensor_is_matched(model_type: str) -> None:
    for record in read_records(model_type):
        assert list(describe_unmatched(record)) == []
        built = [size for size in record["classes"].values() if isinstance(size, int)]
        assert built and record["tensors"]


def test_unmatched_tensors_are_reported() -> None:
    (record, *_) = copy.deepcopy(read_records("bert"))
    record["tensors"]["bert.strange.weight"] = ["3x4"]
    assert list(describe_unmatched(record)) == ["bert.strange.weight [3, 4]"]
    record["config"]["model_type"] = "strange"
    assert list(describe_unmatched(record)) == ["no recipe for 'strange'"]
