"""Replays what `make engines` recorded of vLLM: layouts that equal its real ranks."""

from __future__ import annotations

import math

import pytest

from engines.layout_records import families_of, read_layouts
from reshard.plans.serialization import from_json, to_json

FAMILIES = families_of("vllm")


def test_enough_families() -> None:
    assert len(FAMILIES) >= 40


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_layout_is_read_and_accounts_for_every_element(family: str) -> None:
    for _, text, _, layout in read_layouts("vllm", family):
        assert layout.engine == "vllm"
        assert from_json(to_json(layout)) == layout
        held = layout.source_layouts()
        for name, source in layout.sources.items():
            if name in layout.unread:
                continue
            # No rank has more of it than there is, and all together have all of it.
            sizes = [
                sum(box.elements for box in held[name].boxes(rank.rank))
                for rank in layout.ranks
                if rank.rank in held[name].holders
            ]
            assert max(sizes) <= math.prod(source.shape) <= sum(sizes), (family, text, name)
        for name, operations in layout.computed.items():
            assert operations == ("to float32", "exp", "neg"), (family, name)
