"""Inspections: which tensors of a model are computed with together, and whether ranks can.

1. A rule's marks say which of its dimensions are cut by which name (`cut_marks`); a tensor that a
   rule given by hand decides has the marks of the recipe's rule for it.
2. What each rank holds of them is found on the layouts themselves (`held_blocks`).
3. Tensors of one cut and one layer are an operator; where names have no numbers, those of one
   module: its weight and its bias.
4. Each operator is judged (`computability`). Layers are cut alike, so few kinds of operators are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from reshard.mesh import Axis, DeviceMesh
from reshard.recipes.config.expressions import Config
from reshard.recipes.coupling.computability import (
    CutTensor,
    find_mismatch,
    find_repetition,
    find_uneven,
    find_unshared,
    sizes_that_do,
)
from reshard.recipes.coupling.coupling import Coupling
from reshard.recipes.coupling.held_blocks import HeldBlock
from reshard.text.quantities import count_text

# What numbers a tensor's name has, and which of them count what lies behind the last one.
NumbersOfName = tuple[tuple[tuple[str, int], ...], frozenset[str]]


@dataclass(frozen=True)
class Finding:
    """An operator that ranks could not compute with, as text, and how many are like it."""

    text: str
    operators: int

    def __str__(self) -> str:
        others = self.operators - 1
        return self.text + (f" (and {count_text(others, 'operator')} like it)" if others else "")


@dataclass
class _Operator:
    """The tensors that are computed with together, the first of each kind by what it holds."""

    numbers: NumbersOfName
    blocks: dict[HeldBlock, str] = field(default_factory=dict)


class Inspection:
    """The operators of a model, gathered tensor by tensor."""

    def __init__(
        self, mesh: DeviceMesh, couplings: Mapping[str, Coupling], config: Config | None
    ) -> None:
        self.mesh, self.couplings, self.config = mesh, couplings, config
        self._operators: dict[object, _Operator] = {}
        self._groups: dict[tuple[Axis, ...], tuple[tuple[int, ...], ...]] = {}

    def add(self, tensor: str, numbers: NumbersOfName, blocks: Sequence[HeldBlock]) -> None:
        """Add what ranks hold of a tensor to the operators that it belongs to."""
        for block in blocks:
            key: tuple[object, ...] = (block.name.name, numbers)
            if block.name.member is None:
                # Cuts of other lengths or axes, such as those of shared experts, are others.
                module = None if numbers[0] else tensor.rpartition(".")[0]
                key = (*key, block.units, block.axes, module)
            operator = self._operators.get(key)
            if operator is None:
                operator = self._operators[key] = _Operator(numbers)
            operator.blocks.setdefault(block, tensor)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What ranks could not compute with, one of each kind."""
        judged: dict[object, str | None] = {}
        counts: dict[str, int] = {}
        for operator in self._operators.values():
            # Blocks are those of the cache of layouts: the same objects for all layers cut alike.
            key = frozenset(operator.blocks)
            if key not in judged:
                judged[key] = self._judge(operator)
            text = judged[key]
            if text is not None:
                counts[text] = counts.get(text, 0) + 1
        return tuple(Finding(text, count) for text, count in counts.items())

    def _judge(self, operator: _Operator) -> str | None:
        name = next(iter(operator.blocks)).name
        if name.member is None:
            return self._judge_cut(operator)
        return self._judge_coupling(operator, self.couplings[name.name])

    def _judge_cut(self, operator: _Operator) -> str | None:
        tensors = _list_tensors(operator)
        first = next(iter(operator.blocks))
        # An embedding or output layer may be cut in its own way, but not apart from its bias.
        if not operator.numbers[0] and len(tensors) == 1:
            return None
        problem = find_mismatch(tensors, is_unit=False)
        if problem is None and operator.numbers[0]:
            groups = self._group(first.axes)
            problem = find_repetition(tensors[0], first.units, groups, is_unit=False)
        return problem and f"{problem}; cut all tensors of {first.name} alike, each index once"

    def _judge_coupling(self, operator: _Operator, coupling: Coupling) -> str | None:
        tensors = _list_tensors(operator)
        counts = {block.name.member: block.units for block in operator.blocks}
        axes = next(iter(operator.blocks)).axes
        by_member: dict[str | None, list[CutTensor]] = {}
        for one in tensors:
            by_member.setdefault(one.name.member, []).append(one)
        units = by_member.get(coupling.unit, [])
        problem = next(
            filter(None, (find_mismatch(same, is_unit=True) for same in by_member.values())), None
        )
        if units:
            axes = next(b.axes for b in operator.blocks if b.name.member == coupling.unit)
            count = counts[coupling.unit]
            problem = problem or find_repetition(units[0], count, self._group(axes), is_unit=True)
            for member, (one, *_) in by_member.items():
                if problem is None and member != coupling.unit:
                    problem = find_unshared(units[0], one, count, counts[member])
            problem = problem or find_uneven(units[0], self._group(axes))
        return problem and f"{problem}; {self._advise(coupling, operator, axes)}"

    def _advise(self, coupling: Coupling, operator: _Operator, axes: tuple[Axis, ...]) -> str:
        unit, *others = coupling.counts(self.config, dict(operator.numbers[0])).values()
        sizes = sizes_that_do(unit, others)
        names = " ".join(map(str, axes)) or "the axis"
        size = 1
        for axis in axes:
            size *= self.mesh.axis_size(axis)
        if size in sizes:
            return f"{size} ranks along {names} would do if all of it were cut alike"
        return f"{names} has size {size}; sizes that would do: {', '.join(map(str, sizes))}"

    def _group(self, axes: tuple[Axis, ...]) -> tuple[tuple[int, ...], ...]:
        """The ranks that compute together: those that differ along `axes` only."""
        if axes not in self._groups:
            self._groups[axes] = self.mesh.groups(axes)
        return self._groups[axes]


def _list_tensors(operator: _Operator) -> list[CutTensor]:
    return [
        CutTensor(tensor + block.place, block.name, block.held)
        for block, tensor in operator.blocks.items()
    ]
