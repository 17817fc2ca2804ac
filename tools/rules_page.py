"""Write docs/rules.md: each operator with its rule for small shapes and its partial operands.

Operators with equal rows share a row. Run it after a change of an operator's record:

    python tools/rules_page.py
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from reshard.spmd.core.operator import Operator, operators, shipped_operators


def _write_partial(operator: Operator) -> str:
    words = {"each": "all together", "one": "any one", "none": ""}
    if isinstance(operator.linear, tuple):
        said = "sum: " + " and ".join(f"operand {number}" for number in operator.linear)
    else:
        said = words[operator.linear] and f"sum: {words[operator.linear]}"
    return "; ".join(filter(None, [said, *operator.commutes]))


def _write_row(operator: Operator) -> tuple[str, ...]:
    if not operator.has_rule:
        return "replicated", "", "", operator.note
    shapes, attributes = operator.example or ([(4, 8)], {})
    inferred = operator.inferred(shapes, **attributes)
    said = ", ".join(f"{name}={value}" for name, value in attributes.items())
    places, first = (
        ", ".join(inferred.rule.names[factor] for factor in factors)
        for factors in (inferred.adjusted, inferred.leading)
    )
    said_of_place = places and f"a part knows its place along {places}"
    said_of_first = first and f"a cut of {first} comes first"
    note = "; ".join(filter(None, [operator.note, said_of_place, said_of_first]))
    return f"`{inferred.rule}`", f"`{said}`" if said else "", _write_partial(operator), note


_FAMILIES = (
    "elementwise",
    "products",
    "reductions",
    "movement",
    "indexing",
    "ordering",
    "windows",
    "networks",
    "linear algebra",
    "Fourier transforms",
    "creation",
)
_HEAD = """# The table of rules

What every operator of `reshard.spmd` does to cut operands. This page is written from the table
(`tools/rules_page.py`), and a test holds that it says what the table says.

A rule names factors, as einsum does: a factor that is cut may be cut so in each dimension it is in.
`reduction` factors are summed (or combined by the operator named) over the devices that have parts;
`need_replication` factors must be whole on each device; the elements of `permutation` factors move
between devices when they are cut; along `blocked` factors shardings do not propagate.

*Partial* says which operands may be partial sums, so that the result is one and its reduction can
wait: all together, any one of them, or those named; then other reductions that may wait too. A part
that knows its place computes with it: the rows of a table it has, the diagonal as it lies there.
An axis cuts one factor: of what operands ask for, factors of results come before reduced ones, and
those of larger operands before others, unless it is said that a cut comes first.
An operator that is *replicated* has no rule: its operands are whole on every device, and a warning
names it once. Give one to an operator of your own with `@reshard.spmd.rule`.
"""


def rules_document() -> str:
    """Return the page as Markdown."""
    lines = [_HEAD]
    shipped = [operator for name, operator in operators.items() if name in shipped_operators()]
    families = list(dict.fromkeys([*_FAMILIES, *(operator.family for operator in shipped)]))
    for family in families:
        lines += [f"## {family[0].upper()}{family[1:]}", ""]
        lines += ["| operators | rule | attributes | partial | note |", "|---|---|---|---|---|"]
        rows = sorted(
            ((_write_row(one), one.name) for one in shipped if one.family == family),
            key=lambda row: (row[0][0] == "replicated", row),
        )
        for row, names in groupby(rows, key=lambda pair: pair[0]):
            operators_text = ", ".join(f"`{name}`" for _, name in names)
            lines.append(f"| {operators_text} | {' | '.join(row)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "rules.md").write_text(rules_document())
