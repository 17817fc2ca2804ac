"""Where a recipe and transformers' own plan of tensor parallelism differ.

transformers has a plan for most models: for each module, the style in which it is cut. A style
stands for a dimension of each of the module's parameters; the recipe's sharding names the
dimensions that `tp` cuts. A family says of each difference why it is there.
"""

from __future__ import annotations

import fnmatch
import re
from typing import Any

from .family import Family
from .shards import CutModel

WHOLE, ROWS, COLUMNS = "whole", "rows", "columns"
ROW_STYLES = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise")
COLUMN_STYLES = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise")


def planned_cut(style: str | None, parameter: str, ndim: int) -> str:
    """The dimension that a style cuts of a parameter: its rows, its columns, or none."""
    if style in ROW_STYLES:
        return ROWS
    if style in COLUMN_STYLES:
        return WHOLE if ndim == 1 or parameter.endswith(".bias") else COLUMNS
    return {"embedding_rowwise": ROWS, "embedding_colwise": COLUMNS}.get(style or "", WHOLE)


def recipe_cut(cut: CutModel, name: str) -> str:
    """The dimension that the recipe cuts over tp, counted like a plan's from the back."""
    ndim = len(cut.assignment.specs[name].dim_specs)
    cuts = {d - ndim for d in range(ndim) if "tp" in cut.cut_axes(name, d)}
    if not cuts:
        return WHOLE
    if ndim == 1:
        return ROWS
    return {(-2,): ROWS, (-1,): COLUMNS}.get(tuple(sorted(cuts)), str(sorted(cuts)))


def differences(plan: dict[str, str], cut: CutModel) -> dict[str, str]:
    """For each parameter (its numbers as `*`) that is cut otherwise: how."""
    found: dict[str, str] = {}
    for name, spec in cut.assignment.specs.items():
        general = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        style = plan.get(general, plan.get(general.rpartition(".")[0]))
        theirs = planned_cut(style, general, len(spec.dim_specs))
        ours = recipe_cut(cut, name)
        if theirs != ours:
            said = f"{theirs} ({style})" if style else theirs
            found[general] = f"{ours} here, {said} in the plan"
    return found


def explain_differences(
    family: Family, model: Any, cut: CutModel
) -> tuple[list[str] | None, list[str]]:
    """The differences with their reasons, and what is wrong: those without, reasons of none.

    None for a model that transformers has no plan for.
    """
    plan = model.tp_plan
    # A plan of the output layer alone is what a class has whose config has none.
    if not any("*" in name for name in plan):
        return None, []
    lines, wrong = [], []
    unused = {*family.differs}
    for name, how in differences(plan, cut).items():
        patterns = [one for one in family.differs if fnmatch.fnmatchcase(name, one)]
        unused -= {*patterns[:1]}
        if patterns:
            lines.append(f"`{name}`: {how}: {family.differs[patterns[0]]}")
        else:
            wrong.append(f"{name} is cut otherwise than in transformers' plan, unexplained: {how}")
    wrong += [f"no parameter like {one} differs from transformers' plan" for one in unused]
    return lines, wrong
