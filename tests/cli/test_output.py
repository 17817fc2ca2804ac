"""JSON that is written item by item is the JSON of the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.cli import output

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans())
def test_lists_may_be_iterators(content: dict[str, Any], is_lazy: bool) -> None:
    given_content = {
        key: iter(value) if is_lazy and isinstance(value, list) else value
        for key, value in content.items()
    }
    written: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "write_pieces", written.extend)
        output.write_json(given_content)
    assert "".join(written) == json.dumps(content, indent=1) + "\n"
