"""Records of verdicts, in `tests/golden/engines/judged`: one file a family.

Replaying a record takes no engine: the assignment of the recorded config and shapes is made again
at every parallelism, and must be what was judged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.errors import RecipeError
from reshard.recipes import Assignment, choose_recipe

from .shards import assign_case

FOLDER = Path(__file__).parents[2] / "golden" / "engines" / "judged"


def digest_of(assignment: Assignment) -> str:
    """16 digits that change with any layout."""
    hasher = hashlib.sha256()
    for name, layout in sorted(assignment.layouts.items()):
        hasher.update(f"{name}\0".encode() + layout.fingerprint)
    return hasher.hexdigest()[:16]


def write_shapes(tensors: Mapping[str, Any]) -> dict[str, str]:
    """The shapes of arrays, as text."""
    return {name: "x".join(map(str, tensors[name].shape)) for name in sorted(tensors)}


def read_shapes(written: dict[str, str]) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(map(int, shape.split("x"))) if shape else () for name, shape in written.items()
    }


def write_record(name: str, record: dict[str, Any]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def load_records() -> dict[str, dict[str, Any]]:
    """All records, by family."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def replay_case(case: dict[str, Any], parallelism: str) -> dict[str, Any]:
    """What a verdict says of the recipe, found again: its layouts' digest, or its refusal."""
    recipe = choose_recipe(case["config"])
    if recipe is None:
        return {"refused": f"no recipe is for {case['config'].get('model_type')!r}"}
    found: dict[str, Any] = {"equal": True}
    for shapes, layouts in (("shapes", "layouts"), ("hub_shapes", "hub_layouts")):
        if shapes in case:
            tensors = read_shapes(case[shapes])
            try:
                assignment = assign_case(recipe, parallelism, case["config"], tensors)
            except RecipeError as error:
                return {"refused": str(error)}
            found[layouts] = digest_of(assignment)
    return found
