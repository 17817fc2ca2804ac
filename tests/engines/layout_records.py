"""Layouts of engines that equal what their real ranks hold, recorded: a file a family.

`tests/golden/engines/ENGINE/FAMILY.json` has the versions, the config, and for each parallelism the
layout of all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from reshard.plans.serialization import from_json, to_json
from reshard.recipes.engine_layouts import EngineLayout

GOLDEN = Path(__file__).parents[1] / "golden" / "engines"


class RecordedLayout(NamedTuple):
    """The layout of an engine for a family's config, at a parallelism."""

    family: str
    parallelism: str
    config: dict[str, Any]
    layout: EngineLayout


def families_of(engine: str) -> list[str]:
    """The families that an engine has records of."""
    return sorted(path.stem for path in (GOLDEN / engine).glob("*.json"))


def read_layouts(engine: str, family: str) -> Iterator[RecordedLayout]:
    """The recorded layouts of a family."""
    record = json.loads((GOLDEN / engine / f"{family}.json").read_text())
    for text, document in record["layouts"].items():
        layout = from_json(json.dumps(document))
        assert isinstance(layout, EngineLayout)
        yield RecordedLayout(family, text, record["config"], layout)


def write_layout(
    engine: str, family: str, versions: dict[str, str], config: Any, text: str, layout: EngineLayout
) -> None:
    """Record a layout beside those of the family's other parallelisms."""
    path = GOLDEN / engine / f"{family}.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    layouts = record.get("layouts", {})
    layouts[text] = json.loads(to_json(layout))
    path.parent.mkdir(parents=True, exist_ok=True)
    # A line a layout: short, and what changes is seen.
    lines = [f'"versions": {json.dumps(versions)}', f'"config": {json.dumps(config)}']
    texts = [
        f'"{key}": {json.dumps(one, separators=(",", ":"))}' for key, one in sorted(layouts.items())
    ]
    lines.append('"layouts": {\n' + ",\n".join(texts) + "\n}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
