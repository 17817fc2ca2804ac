"""Replays what `make engines` recorded of vLLM: layouts that equal its real ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from reshard.plans.documents.serialization import from_json, to_json
from reshard.recipes.engine_layouts import EngineLayout

GOLDEN = Path(__file__).parents[2] / "golden" / "engines" / "vllm"
FAMILIES = sorted(path.stem for path in GOLDEN.glob("*.json"))


def recorded(family: str) -> dict[str, EngineLayout]:
    record = json.loads((GOLDEN / f"{family}.json").read_text())
    return {text: from_json(json.dumps(one)) for text, one in record["layouts"].items()}


def test_enough_families() -> None:
    assert len(FAMILIES) >= 40


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_layout_is_read_and_accounts_for_every_element(family: str) -> None:
    for text, layout in recorded(family).items():
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
