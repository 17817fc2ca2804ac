"""What does the table of rules look like on a page?

`rules_document()` writes docs/rules.md: each operator with its rule for small shapes, and what it
does to partial operands. Operators whose rows are equal share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from reshard.spmd.operators.operator import Operator
from reshard.spmd.operators.table import SHIPPED, operators
from reshard.spmd.rules.rule_builder import Shape

_TWO, _THREE = [(4, 8), (8,)], [(4, 8), (4, 8), (4, 8)]
_ONE, _CUBE, _SQUARE = [(4, 8)], [(2, 4, 8)], [(2, 4, 4)]

Example = tuple[Sequence[Shape], dict[str, Any]]

_EXAMPLES: dict[str, Example] = {
    "divide": (_TWO, {}),
    "clip": (_THREE, {}),
    "clamp": ([(), (4, 8), ()], {}),
    "where": (_THREE, {}),
    "select": (_THREE, {}),
    "matmul": ([(2, 4, 8), (8, 16)], {}),
    "vecdot": ([(4, 8), (8,)], {}),
    "tensordot": ([(4, 8, 2), (2, 8, 5)], {"axes": [[1, 2], [1, 0]]}),
    "dot_general": (
        [(2, 4, 8), (2, 8, 5)],
        {"batching": [[0], [0]], "contracting": [[2], [1]]},
    ),
    "einsum": ([(2, 4, 8), (2, 5, 8)], {"subscripts": "bik,bjk->bij"}),
    "outer": ([(4,), (8,)], {}),
    "permute_dims": (_CUBE, {"axes": (2, 0, 1)}),
    "matrix_transpose": (_CUBE, {}),
    "moveaxis": (_CUBE, {"source": 0, "destination": 2}),
    "reshape": ([(4, 6)], {"shape": (2, 12)}),
    "expand_dims": (_ONE, {"axis": 1}),
    "squeeze": ([(4, 1, 8)], {"axis": 1}),
    "broadcast_to": ([(1, 8)], {"shape": (2, 4, 8)}),
    "broadcast_arrays": ([(4, 1), (8,)], {}),
    "concat": ([(4, 8), (4, 3)], {"axis": 1}),
    "stack": ([(4,), (4,)], {"axis": 1}),
    "unstack": ([(4, 2)], {"axis": 1}),
    "split": (_ONE, {"indices_or_sections": 2, "axis": 1}),
    "flip": (_ONE, {"axis": 1}),
    "roll": (_ONE, {"shift": 1, "axis": 1}),
    "pad": (_ONE, {"pad_width": [(0, 0), (1, 2)]}),
    "slice": (_ONE, {"starts": [0, 1], "limits": [4, 7]}),
    "tile": (_ONE, {"repetitions": (3, 1)}),
    "repeat": (_ONE, {"repeats": 3, "axis": 0}),
    "meshgrid": ([(4,), (8,)], {"indexing": "ij"}),
    "take": ([(100, 8), (4,)], {"axis": 0}),
    "embedding": ([(100, 8), (2, 4)], {}),
    "take_along_axis": ([(4, 8), (4, 3)], {"axis": 1}),
    "scatter": ([(100, 8), (4,), (4, 8)], {"axis": 0}),
    "dynamic_slice": ([(4, 8), (), ()], {"sizes": (4, 3)}),
    "dynamic_update_slice": ([(4, 8), (4, 3), (), ()], {}),
    "checked_index": ([(4,)], {"size": 10}),
    "one_hot": ([(4,)], {"num_classes": 10}),
    "searchsorted": ([(8,), (4,)], {}),
    "isin": ([(4, 8), (3,)], {}),
    "top_k": (_ONE, {"k": 3}),
    "convolution": ([(2, 6, 8, 8), (10, 3, 3, 3)], {"groups": 2}),
    "max_pool": ([(2, 3, 8)], {"window": (2,)}),
    "avg_pool": ([(2, 3, 8)], {"window": (2,)}),
    "sum_pool": ([(2, 3, 8)], {"window": (2,)}),
    "layer_norm": ([(4, 8), (8,), (8,)], {}),
    "rms_norm": ([(4, 8), (8,)], {}),
    "batch_norm": ([(4, 8), (8,), (8,), (8,), (8,)], {}),
    "cross_entropy": ([(4, 10), (4,)], {}),
    "attention": ([(2, 8, 5, 16), (2, 4, 7, 16), (2, 4, 7, 32)], {}),
    "solve": ([(2, 4, 4), (2, 4, 3)], {}),
    "triangular_solve": ([(2, 4, 4), (2, 4, 3)], {}),
    "cross": ([(4, 3), (4, 3)], {}),
    "cholesky": (_SQUARE, {}),
    "inv": (_SQUARE, {}),
    "matrix_power": (_SQUARE, {"n": 2}),
    "eigh": (_SQUARE, {}),
    "eigvalsh": (_SQUARE, {}),
    "eig": (_SQUARE, {}),
    "eigvals": (_SQUARE, {}),
    "det": (_SQUARE, {}),
    "slogdet": (_SQUARE, {}),
    "arange": ([], {"start": 8}),
    "linspace": ([], {"start": 0, "stop": 1, "num": 8}),
    "eye": ([], {"n_rows": 4}),
    "iota": ([], {"shape": (4, 8)}),
    "fftfreq": ([], {"n": 8}),
    "rfftfreq": ([], {"n": 8}),
    "random_bits": ([(2,)], {"shape": (4, 8)}),
}
_OF_FAMILY: dict[str, Example] = {
    "reductions": (_ONE, {"axis": 1}),
    "ordering": (_ONE, {"axis": 1}),
    "windows": (_ONE, {"axis": 1}),
    "networks": (_ONE, {"axis": 1}),
    "linear algebra": (_CUBE, {}),
    "Fourier transforms": (_ONE, {}),
    "creation": ([], {"shape": (4, 8)}),
}
_SHIFTS = {"fftshift", "ifftshift"}


def example_of(operator: Operator) -> Example:
    """Small shapes and attributes to show an operator's rule with."""
    if operator.name in _EXAMPLES:
        return _EXAMPLES[operator.name]
    if operator.name.endswith("_like"):
        return _ONE, {}
    if operator.name in _SHIFTS:
        return _ONE, {"axes": 1}
    if operator.family == "elementwise":
        try:
            operator.rule(_TWO)
        except ValueError:
            return _ONE, {}
        return _TWO, {}
    return _OF_FAMILY.get(operator.family, (_ONE, {}))


def _partial(operator: Operator) -> str:
    words = {"each": "all together", "one": "any one", "none": ""}
    if isinstance(operator.linear, tuple):
        said = "sum: " + " and ".join(f"operand {number}" for number in operator.linear)
    else:
        said = words[operator.linear] and f"sum: {words[operator.linear]}"
    return "; ".join(filter(None, [said, *operator.commutes]))


def _row(operator: Operator) -> tuple[str, ...]:
    if not operator.has_rule:
        return "replicated", "", "", operator.note
    shapes, attributes = example_of(operator)
    inferred = operator.inferred(shapes, **attributes)
    said = ", ".join(f"{name}={value}" for name, value in attributes.items())
    names = [inferred.rule.names[factor] for factor in inferred.adjusted]
    place = f"a part knows its place along {', '.join(names)}" if names else ""
    note = "; ".join(filter(None, [operator.note, place]))
    return f"`{inferred.rule}`", f"`{said}`" if said else "", _partial(operator), note


_HEAD = """# The table of rules

What every operator of `reshard.spmd` does to cut operands. This page is written from the table
(`reshard.spmd.operators.document`), and a test holds that it says what the table says.

A rule names factors, as einsum does: a factor that is cut may be cut so in each dimension it is in.
`reduction` factors are summed (or combined by the operator named) over the devices that have parts;
`need_replication` factors must be whole on each device; the elements of `permutation` factors move
between devices when they are cut; along `blocked` factors shardings do not propagate.

*Partial* says which operands may be partial sums, so that the result is one and its reduction can
wait: all together, any one of them, or those named; then other reductions that may wait too. A part
that knows its place computes with it: the rows of a table it has, the diagonal as it lies there.
An operator that is *replicated* has no rule: its operands are whole on every device, and a warning
names it once. Give one to an operator of your own with `@reshard.spmd.rule`.
"""


def rules_document() -> str:
    """The page, as Markdown.

    >>> rules_document().startswith("# The table of rules")
    True
    """
    lines = [_HEAD]
    shipped = [operator for name, operator in operators.items() if name in SHIPPED]
    families = list(dict.fromkeys(operator.family for operator in shipped))
    for family in families:
        lines += [f"## {family[0].upper()}{family[1:]}", ""]
        lines += ["| operators | rule | attributes | partial | note |", "|---|---|---|---|---|"]
        rows = sorted(
            ((_row(one), one.name) for one in shipped if one.family == family),
            key=lambda row: (row[0][0] == "replicated", row),
        )
        for row, names in groupby(rows, key=lambda pair: pair[0]):
            operators_text = ", ".join(f"`{name}`" for _, name in names)
            lines.append(f"| {operators_text} | {' | '.join(row)} |")
        lines.append("")
    return "\n".join(lines)
