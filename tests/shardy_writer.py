"""Functions of StableHLO, written operation by operation."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from reshard.mesh import DeviceMesh
from reshard.notation.shardy import shardy_mesh_text, shardy_text
from reshard.sharding import DimSpec, ShardingSpec

Shape = tuple[int, ...]


@dataclass
class Statement:
    """One operation in MLIR: `{0}`, `{1}`.. stand for the operands."""

    name: str
    operands: list[int]
    results: list[tuple[Shape, str]]
    template: str
    attributes: str = ""
    """Further attributes, inside the braces."""
    numbers: list[int] = field(default_factory=list)


@dataclass
class Program:
    """A function: its mesh, its arguments, its operations, what it returns."""

    mesh: DeviceMesh
    values: list[tuple[Shape, str]]
    inputs: list[int]
    statements: list[Statement]
    outputs: list[int]
    annotations: dict[int, ShardingSpec] = field(default_factory=dict)
    asked: dict[int, ShardingSpec] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The module in MLIR."""
        arguments = ", ".join(
            f"%v{number}: {tensor(*self.values[number])}{self._marked(self.annotations, number)}"
            for number in self.inputs
        )
        results = ", ".join(
            f"{tensor(*self.values[number])}{self._marked(self.asked, place)}"
            for place, number in enumerate(self.outputs)
        )
        lines = [
            "module {",
            shardy_mesh_text(self.mesh),
            f"func.func @main({arguments}) -> ({results}) {{",
        ]
        lines += map(self._line, self.statements)
        names = ", ".join(map(self._name, self.outputs))
        types = ", ".join(tensor(*self.values[number]) for number in self.outputs)
        return "\n".join([*lines, f"return {names} : {types}", "}", "}"])

    def _name(self, number: int) -> str:
        for one in self.statements:
            if number in one.numbers and len(one.numbers) > 1:
                return f"%v{one.numbers[0]}#{one.numbers.index(number)}"
        return f"%v{number}"

    def _marked(self, specs: dict[int, ShardingSpec], number: int) -> str:
        if number not in specs:
            return ""
        return f" {{sdy.sharding = {shardy_text(specs[number])}}}"

    def _line(self, one: Statement) -> str:
        operands = [self._name(number) for number in one.operands]
        types = [tensor(*self.values[number]) for number in one.operands]
        results = [tensor(*self.values[number]) for number in one.numbers]
        given = [self.annotations.get(number) for number in one.numbers]
        attributes = [one.attributes] if one.attributes else []
        if one.name == "sharding_constraint":
            spec = self.annotations[one.numbers[0]]
            sharding = shardy_text(spec).removeprefix("#sdy.sharding")
            constrained = f"sdy.sharding_constraint {operands[0]} {sharding} : {types[0]}"
            return f"%v{one.numbers[0]} = {constrained}"
        if any(spec is not None for spec in given):
            texts = ", ".join(
                shardy_text(
                    spec
                    or ShardingSpec(
                        self.mesh, [DimSpec(is_open=True)] * len(self.values[number][0])
                    )
                ).removeprefix("#sdy.sharding")
                for number, spec in zip(one.numbers, given, strict=True)
            )
            attributes.append(f"sdy.sharding = #sdy.sharding_per_value<[{texts}]>")
        body = one.template.format(
            *operands, types=", ".join(types), result=", ".join(results), first=results[0]
        )
        found = f"%v{one.numbers[0]}" + (f":{len(one.numbers)}" if len(one.numbers) > 1 else "")
        marks = "{" + ", ".join(attributes) + "}" if attributes else ""
        return f"{found} = " + body.replace("@attributes", marks)


def tensor(shape: Shape, dtype: str) -> str:
    """The MLIR type of an array."""
    return f"tensor<{''.join(f'{size}x' for size in shape)}{dtype}>"


class Writer:
    """Writes operations one after the other."""

    def __init__(self, random: Random, sizes: list[int]) -> None:
        self.random = random
        self.sizes = sizes
        self.values: list[tuple[Shape, str]] = []
        self.statements: list[Statement] = []
        self.inputs: list[int] = []

    def argument(self, shape: Shape, dtype: str = "f32") -> int:
        """A new argument of the function."""
        self.values.append((shape, dtype))
        self.inputs.append(len(self.values) - 1)
        return len(self.values) - 1

    def like(self, shape: Shape) -> int:
        """A value of a shape: one that is there, or a new argument."""
        there = [n for n, value in enumerate(self.values) if value == (shape, "f32")]
        if there and self.random.random() < 0.7:
            return self.random.choice(there)
        return self.argument(shape)

    def write(
        self,
        name: str,
        operands: list[int],
        results: list[tuple[Shape, str]],
        template: str,
        attributes: str = "",
    ) -> int:
        """Add an operation. The number of its first result."""
        numbers = list(range(len(self.values), len(self.values) + len(results)))
        self.values += results
        self.statements.append(Statement(name, operands, results, template, attributes, numbers))
        return numbers[0]

    def value(self, ranks: range, at_least: int = 1) -> int:
        """A value to work on."""
        there = [
            n
            for n, (shape, dtype) in enumerate(self.values)
            if dtype == "f32" and len(shape) in ranks and min(shape, default=1) >= at_least
        ]
        if there and self.random.random() < 0.85:
            return self.random.choice(there[-4:] if self.random.random() < 0.6 else there)
        shape = tuple(
            self.random.choice(self.sizes)
            for _ in range(self.random.randint(ranks.start, min(ranks.stop - 1, 3)))
        )
        return self.argument(shape)

    def shape(self, number: int) -> Shape:
        """The shape of a value."""
        return self.values[number][0]
