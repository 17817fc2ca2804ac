"""Plain values come back from JSON as they were."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoint.deltas.beside import decode_value, encode_value, is_plain_path
from reshard.errors import FormatError, UsageError

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
values = st.recursive(
    plain | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=10,
)


@given(values)
def test_values_come_back(value: Any) -> None:
    found = decode_value(json.loads(json.dumps(encode_value(value))))
    assert found == value and repr(found) == repr(value)


def test_no_number_comes_back() -> None:
    assert math.isnan(decode_value(encode_value(float("nan"))))


def test_other_values_are_told() -> None:
    with pytest.raises(UsageError, match="a value of type object"):
        encode_value([object()])
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(UsageError, match="nested too deeply"):
        encode_value(deep)
    with pytest.raises(FormatError, match="nested too deeply"):
        decode_value(deep)


@pytest.mark.parametrize(
    "content",
    [{"set": []}, {}, {"a": 1, "b": 2}, {"bytes": "?"}, {"tuple": 3}, {"dict": [1]}, {"float": []}],
)
def test_what_no_value_is(content: Any) -> None:
    with pytest.raises(FormatError):
        decode_value(content)


def test_paths() -> None:
    names = ["a/b", "a//b", "/a", "a/../b", "", "reshard.manifest.json", "a/.hidden"]
    assert [is_plain_path(name) for name in names] == [True] + 6 * [False]
