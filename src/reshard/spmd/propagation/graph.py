"""Graphs: values, and the operations that compute them.

A `Graph` is a traced function: values by number, of which some are its inputs, operations in an
order in which each finds its operands, and outputs. Its text has all of it::

    %0: float32[4, 8], %1: float32[8, 16]
    %2: float32[4, 16] = matmul(%0, %1) ([i, k], [k, j]) -> ([i, j]) {i=4, j=16, k=8} reduction={k}
    %3: float32[4] = sum(%2; axis=1) ([i, j]) -> ([i]) {i=4, j=16} reduction={j}
    return %3, %2
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from reshard.errors import NotationError, SpecError
from reshard.spmd.rules.sharding_rule import OpShardingRule

WITH_SHARDING = "with_sharding"
"""The operator whose result is its operand in a sharding that was asked for."""


@dataclass(frozen=True, slots=True)
class Value:
    """An array of a graph.

    Args:
        index: its number in the graph.
        shape: of the array.
        dtype: its name, such as float32.

    >>> print(Value(2, (4, 16)))
    %2: float32[4, 16]
    """

    index: int
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"%{self.index}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Operation:
    """One application of an operator.

    Args:
        operator: its name.
        operands: numbers of the values it reads.
        results: numbers of the values it makes.
        rule: how their dimensions hang together.
        attributes: the operator's, such as `axis`.
    """

    operator: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: OpShardingRule
    attributes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        words = ", ".join(f"%{operand}" for operand in self.operands)
        if self.attributes:
            words += "; " + ", ".join(
                f"{name}={value!r}" for name, value in self.attributes.items()
            )
        return f"{self.operator}({words}) {self.rule}"


@dataclass(frozen=True, slots=True)
class Graph:
    """A function as a graph of values and operations.

    Args:
        values: all of them, by their numbers.
        inputs: numbers of the function's arguments.
        operations: in topological order: each after those whose results it reads.
        outputs: numbers of the values that it returns; a value may occur several times.

    Raises:
        SpecError: a value that is read before it is computed, is computed twice, or does not exist;
            an operation whose number of operands or results, or their numbers of dimensions, differ
            from its rule.

    >>> text = '''%0: float32[4, 8], %1: float32[4, 8]
    ... %2: float32[4, 8] = add(%0, %1) ([i, j], [i, j]) -> ([i, j]) {i=4, j=8}
    ... return %2'''
    >>> graph = Graph.parse(text)
    >>> str(graph) == text, graph.operations[0].results
    (True, (2,))
    """

    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        # Values are found by their number as an index, so numbers must be 0, 1, 2 and so on.
        numbers = [value.index for value in self.values]
        if numbers != list(range(len(numbers))):
            raise SpecError(f"values are numbered {numbers}; number them 0, 1, 2 and so on")
        made = set(self.inputs)
        for operation in self.operations:
            for operand in operation.operands:
                if operand not in made:
                    raise SpecError(
                        f"%{operand} of {operation} is read before it is made; order operations so "
                        "that each follows those it reads from"
                    )
            for result in operation.results:
                if result in made or not 0 <= result < len(self.values):
                    raise SpecError(f"%{result} of {operation} is made twice, or is no value")
                made.add(result)
            self._check_ranks(operation)
        for output in self.outputs:
            if output not in made:
                raise SpecError(f"output %{output} is not made by any operation")

    def last_uses(self) -> list[list[int]]:
        """For each operation, the values that nothing reads after it, but inputs and outputs.

        >>> graph = Graph.parse('''%0: float32[4]
        ... %1: float32[4] = exp(%0) ([i]) -> ([i]) {i=4}
        ... %2: float32[4] = exp(%1) ([i]) -> ([i]) {i=4}
        ... return %2''')
        >>> graph.last_uses()
        [[], [1]]
        """
        # A result that nobody reads is freed at once; a dictionary keeps the last of equal keys.
        last = {
            value: place
            for place, one in enumerate(self.operations)
            for value in (*one.results, *one.operands)
        }
        found: list[list[int]] = [[] for _ in self.operations]
        for value in last.keys() - {*self.inputs, *self.outputs}:
            found[last[value]].append(value)
        return found

    def _check_ranks(self, operation: Operation) -> None:
        numbers = (*operation.operands, *operation.results)
        mappings = operation.rule.tensors
        counts = len(operation.operands), len(operation.results)
        if counts != (len(operation.rule.operands), len(operation.rule.results)):
            raise SpecError(
                f"{operation} has {counts[0]} operands and {counts[1]} results; its rule is for "
                f"{len(operation.rule.operands)} and {len(operation.rule.results)}"
            )
        for number, mapping in zip(numbers, mappings, strict=True):
            if len(self.values[number].shape) != len(mapping):
                raise SpecError(
                    f"{self.values[number]} of {operation} has {len(self.values[number].shape)} "
                    f"dimensions; the rule has {len(mapping)}"
                )

    @classmethod
    def of(
        cls,
        inputs: Sequence[Sequence[int]],
        operations: Iterable[tuple[str, Sequence[int], OpShardingRule | str]],
        outputs: Sequence[int],
    ) -> Graph:
        """Create a graph of float32 values whose shapes are those of the rules.

        Args:
            inputs: the arguments' shapes; they are values 0, 1 and so on.
            operations: name, operands and rule of each; its results are the next values.
            outputs: numbers of the values it returns.

        >>> print(Graph.of([(4, 8)], [("exp", [0], "([i, j]) -> ([i, j]) {i=4, j=8}")], [1]))
        %0: float32[4, 8]
        %1: float32[4, 8] = exp(%0) ([i, j]) -> ([i, j]) {i=4, j=8}
        return %1
        """
        values = [Value(number, tuple(shape)) for number, shape in enumerate(inputs)]
        found = []
        for name, operands, rule in operations:
            rule = OpShardingRule.parse(rule) if isinstance(rule, str) else rule
            results = range(len(values), len(values) + len(rule.results))
            values += [
                Value(number, shape)
                for number, shape in zip(results, rule.result_shapes, strict=True)
            ]
            found.append(Operation(name, tuple(operands), tuple(results), rule))
        return cls(tuple(values), tuple(range(len(inputs))), tuple(found), tuple(outputs))

    @classmethod
    def parse(cls, text: str) -> Graph:
        """Parse the text of a graph.

        Raises:
            NotationError: a line that is not an operation.
            SpecError: a graph that cannot be.
        """
        if not isinstance(text, str):
            raise NotationError(f"{text!r} is no text of a graph; give a str")
        lines = [line.strip() for line in text.strip().splitlines()]
        if len(lines) < 2 or not lines[-1].startswith("return"):
            raise NotationError(
                f"{text!r} is not a graph; write its inputs, a line an operation, and return %0"
            )
        values = _parse_values(lines[0])
        inputs = tuple(value.index for value in values)
        operations = []
        for line in lines[1:-1]:
            found = re.fullmatch(r"(?P<results>[^=]*?) = (?P<name>\w+)\((?P<rest>.*)", line)
            # The rule stands behind the first `) `.
            arguments, close, rule = found["rest"].partition(") ") if found else ("", "", "")
            if found is None or not close:
                raise NotationError(
                    f"{line!r} is not an operation; write %2: float32[4] = exp(%1) and its rule"
                )
            results = _parse_values(found["results"])
            operands, _, attributes = arguments.partition(";")
            operations.append(
                Operation(
                    found["name"],
                    _parse_numbers(operands),
                    tuple(value.index for value in results),
                    OpShardingRule.parse(rule),
                    MappingProxyType(_parse_attributes(attributes)),
                )
            )
            values += results
        ordered = tuple(sorted(values, key=lambda value: value.index))
        outputs = _parse_numbers(lines[-1].removeprefix("return"))
        return cls(ordered, inputs, tuple(operations), outputs)

    def __str__(self) -> str:
        lines = [", ".join(str(self.values[number]) for number in self.inputs)]
        for operation in self.operations:
            results = ", ".join(str(self.values[number]) for number in operation.results)
            lines.append(f"{results} = {operation}")
        return "\n".join([*lines, "return " + ", ".join(f"%{n}" for n in self.outputs)])


def _parse_values(text: str) -> list[Value]:
    found = re.findall(r"%(\d+): (\w+)\[([\d, ]*)\]", text)
    values = [
        Value(int(number), tuple(int(size) for size in shape.split(",") if size.strip()), dtype)
        for number, dtype, shape in found
    ]
    # findall skips what does not match; written again, the values show whether anything was.
    if ", ".join(map(str, values)) != text.strip():
        raise NotationError(f"{text!r} is not a list of values; write %0: float32[4, 8], %1: ...")
    return values


def _parse_numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(re.fullmatch(r"%\d+", word) for word in words):
        raise NotationError(f"{text!r} is not a list of values; write %0, %1")
    return tuple(int(word[1:]) for word in words)


def _parse_attributes(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        # Read as keywords of a call, so that Python finds where each ends; only literals are
        # evaluated.
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError(text)
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError):
        raise NotationError(f"{text!r} are not attributes; write axis=1, keepdims=True") from None
