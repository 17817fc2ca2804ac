"""The names by which a rule cuts dimensions, read from its spec."""

from __future__ import annotations

import pytest

from reshard.recipes.coupling.cut_marks import CutName, marks_of
from reshard.rule_text import parse_rule

KNOWN = {"wide", "heads.query", "heads.key_value", "expert"}
WIDE, QUERY, KEY = CutName("wide"), CutName("heads", "query"), CutName("heads", "key_value")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("tp, -", []),
        ("tp@heads{heads}, -", []),
        ("tp@{unknown}, -", []),
        ("tp@{wide}, -", [(0, 0, (WIDE,))]),
        ("-, tp@{ wide } ?!2", [(1, 0, (WIDE,))]),
        ("fsdp / tp@{heads.query}, -", [(0, 1, (QUERY,))]),
        ("..., tp@{wide}", [(-1, 0, (WIDE,))]),
        ("ep@{expert} / fsdp, ..., tp@{wide}, -",
         [(0, 0, (CutName("expert"),)), (-2, 0, (WIDE,))]),
        ("tp@{wide}@blocks[{a | b},{(a, b) // 2}], -", [(0, 0, (WIDE,))]),
        ("-, tp@{wide}@groups2", [(1, 0, (WIDE,))]),
        ("-, tp@{wide}@groups{pair}", [(1, 0, (WIDE,))]),
        ("tp@{wide}@halo[1,1], -", []),
        ("tp@joined[{q // 2 | r}@{heads.query},{k},{k}@{heads.key_value}] / fsdp, -",
         [(0, 0, (QUERY, None, KEY))]),
        ("tp@{wide}, - | only(pp=0)", [(0, 0, (WIDE,))]),
        ("", []),
    ],
)  # fmt: skip
def test_marks(spec: str, expected: list[tuple[int, int, tuple[CutName | None, ...]]]) -> None:
    found = [(mark.item, mark.level, mark.names) for mark in marks_of(spec, KNOWN)]
    assert found == expected


@pytest.mark.parametrize(
    ("spec", "rule", "length", "expected"),
    [
        ("tp@{wide}", "", 6, [(WIDE, 0, 6, 1)]),
        ("tp@{wide}", "heads2", 6, [(WIDE, 0, 6, 1)]),
        ("tp@{heads.query}", "heads2", 6, [(QUERY, 0, 6, 3)]),
        ("tp@{wide}@blocks[4,2]", "unit2@blocks[4,2]", 6, [(WIDE, 0, 4, 1), (WIDE, 4, 6, 1)]),
        ("tp@{wide}@groups2", "groups2", 6, [(WIDE, 0, 6, 2)]),
        ("tp@joined[8@{heads.query},2,4@{heads.key_value}]", "joined[8@heads4,2,4@heads2]", 14,
         [(QUERY, 0, 8, 2), (KEY, 10, 14, 2)]),
    ],
)  # fmt: skip
def test_blocks(
    spec: str, rule: str, length: int, expected: list[tuple[CutName, int, int, int]]
) -> None:
    (mark,) = marks_of(spec, KNOWN)
    assert mark.blocks(parse_rule(rule), length) == expected
