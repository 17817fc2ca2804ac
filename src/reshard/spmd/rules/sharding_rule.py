"""Sharding rules: the common factors of the dimensions of operands and results.

An `OpShardingRule` names *factors*, as einsum does, and lists the factors that make up each
dimension, major to minor. A matrix product, and a reshape that merges two dimensions::

    ([i, k], [k, j]) -> ([i, j]) {i=4, k=8, j=16} reduction={k}
    ([i, j]) -> ([ij]) {i=2, j=4}

A factor that is sharded over mesh axes can have that sharding in every dimension it is in. The cost
for the operator depends on the factor's kind:

    pass-through      nothing: each device computes its part of the results
    reduction         a result that lacks it has a contribution on each device, to be combined
    need_replication  the operator needs all of it on each device
    permutation       the sharding carries over, but elements move between devices
    blocked           shardings do not propagate along it

The notions are Shardy's (OpenXLA, `sdy.op_sharding_rule`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from reshard._interning import Interned
from reshard._validation import check_type
from reshard.errors import NotationError, SpecError
from reshard.layout import REDUCTIONS

Mapping = tuple[tuple[int, ...], ...]
"""The factors of a tensor's dimensions: per dimension their indices, major to minor."""

_KINDS = ("reduction", "need_replication", "permutation", "blocked")
FACTOR_NAME = r"[a-zA-Z](?:_\d+)?"
"""The pattern of a factor's name."""
# Shardy names factors in this order.
_LETTERS = "ijklmnopqrstuvwxyz"


def factor_names(count: int) -> tuple[str, ...]:
    """Return default names of factors: i to z, then z_1, z_2 and so on.

    >>> factor_names(3)
    ('i', 'j', 'k')
    """
    extra = count - len(_LETTERS)
    return (*_LETTERS[:count], *(f"z_{number}" for number in range(1, extra + 1)))


class OpShardingRule(Interned):
    """The factors of an operator's tensors.

    Args:
        operands: a mapping per operand: for each dimension the indices of its factors, major to
            minor.
        results: the same per result.
        sizes: of the factors, by index. A dimension of several factors has their product.
        reduction: indices of factors over which contributions are combined.
        need_replication: indices of factors that each device needs whole.
        permutation: indices of factors whose elements move between devices.
        blocked: indices of factors along which nothing propagates.
        reduction_operator: how contributions combine: sum, max, min, mean or product.
        names: of the factors, by index; i, j, k and so on when not given.

    Raises:
        SpecError: an index without a factor, a factor in no tensor or twice in a tensor, a
            reduction factor in all results, a negative size, two kinds for a factor.

    >>> rule = OpShardingRule([[[0], [2]], [[2], [1]]], [[[0], [1]]], [4, 16, 8], reduction=[2])
    >>> print(rule)
    ([i, k], [k, j]) -> ([i, j]) {i=4, j=16, k=8} reduction={k}
    >>> OpShardingRule.parse(str(rule)) is rule
    True
    >>> rule.result_shapes
    ((4, 16),)
    """

    def __init__(
        self,
        operands: Iterable[Iterable[Iterable[int]]],
        results: Iterable[Iterable[Iterable[int]]],
        sizes: Iterable[int],
        *,
        reduction: Iterable[int] = (),
        need_replication: Iterable[int] = (),
        permutation: Iterable[int] = (),
        blocked: Iterable[int] = (),
        reduction_operator: str = "sum",
        names: Sequence[str] | None = None,
    ) -> None:
        self.operands = _write_mappings(operands)
        self.results = _write_mappings(results)
        self.sizes = tuple(int(size) for size in sizes)
        # Sorted, so that equal rules are the same interned object.
        self.reduction = tuple(sorted(set(reduction)))
        self.need_replication = tuple(sorted(set(need_replication)))
        self.permutation = tuple(sorted(set(permutation)))
        self.blocked = tuple(sorted(set(blocked)))
        self.reduction_operator = reduction_operator
        self.names = factor_names(len(self.sizes)) if names is None else tuple(names)
        self._check()

    def _check(self) -> None:
        if self.reduction_operator not in REDUCTIONS:
            raise SpecError(
                f"unknown reduction {self.reduction_operator!r}; it is one of "
                f"{', '.join(REDUCTIONS)}"
            )
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names):
            raise SpecError(
                f"{len(self.sizes)} factors have the names {list(self.names)}; give each one of "
                "its own"
            )
        for name, size in zip(self.names, self.sizes, strict=True):
            if not re.fullmatch(FACTOR_NAME, name):
                raise SpecError(f"factor name {name!r} must be a letter, or such as z_1")
            if size < 0:
                raise SpecError(f"factor {name} has size {size}; 0 or more was expected")
        used = {factor for mapping in self.tensors for dim in mapping for factor in dim}
        kinds = (self.reduction, self.need_replication, self.permutation, self.blocked)
        for factor in used.union(*kinds):
            if not 0 <= factor < len(self.sizes):
                raise SpecError(f"factor {factor} is not one of the {len(self.sizes)} factors")
        for mapping in self.tensors:
            factors = [factor for dim in mapping for factor in dim]
            for factor in factors:
                if factors.count(factor) > 1:
                    raise SpecError(
                        f"factor {self.names[factor]} is twice in "
                        f"{_write_mapping(mapping, self.names)}; a factor is once in a tensor"
                    )
        for factor, name in enumerate(self.names):
            if factor not in used:
                raise SpecError(f"factor {name} is in no tensor; leave it out")
        seen: dict[int, str] = {}
        # The first three kinds are mutually exclusive; "blocked" may be combined with any of them.
        for kind in _KINDS[:3]:
            for factor in getattr(self, kind):
                if factor in seen:
                    raise SpecError(
                        f"factor {self.names[factor]} is of the kinds {seen[factor]} and {kind}; "
                        "give it one"
                    )
                seen[factor] = kind
        for factor in self.reduction:
            if self.results and not any(factor in combined for combined in self.contributed):
                raise SpecError(
                    f"factor {self.names[factor]} is reduced, but it is in all results; "
                    "contributions are combined over factors that a result lacks"
                )

    @cached_property
    def contributed(self) -> tuple[tuple[int, ...], ...]:
        """For each result, the factors along which devices have contributions to it.

        >>> rule = OpShardingRule.parse("([i, j]) -> ([i], [j]) {i=4, j=8} reduction={i, j}")
        >>> rule.contributed
        ((1,), (0,))
        """
        owned = [{factor for dim in mapping for factor in dim} for mapping in self.results]
        return tuple(
            tuple(factor for factor in self.reduction if factor not in own) for own in owned
        )

    def interning_key(self) -> object:
        kinds = (self.reduction, self.need_replication, self.permutation, self.blocked)
        return (
            self.operands,
            self.results,
            self.sizes,
            kinds,
            self.reduction_operator,
            self.names,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # The text is complete, and parsing it interns the rule when it is unpickled.
        return (OpShardingRule.parse, (str(self),))

    @property
    def tensors(self) -> tuple[Mapping, ...]:
        """The mappings of the operands, then of the results."""
        return self.operands + self.results

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The operands' shapes, as products of the factors' sizes."""
        return tuple(self._find_shape(mapping) for mapping in self.operands)

    @property
    def result_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The results' shapes, as products of the factors' sizes."""
        return tuple(self._find_shape(mapping) for mapping in self.results)

    def _find_shape(self, mapping: Mapping) -> tuple[int, ...]:
        shape = []
        for dim in mapping:
            size = 1
            for factor in dim:
                size *= self.sizes[factor]
            shape.append(size)
        return tuple(shape)

    @classmethod
    def parse(cls, text: str) -> OpShardingRule:
        """Parse the text of a rule. Factors are numbered in the order in which their sizes appear.

        Raises:
            NotationError: a text that is not a rule.
            SpecError: a rule that cannot be.

        >>> OpShardingRule.parse("([i, j]) -> ([i]) {i=4, j=3} reduction={j:max}")
        OpShardingRule('([i, j]) -> ([i]) {i=4, j=3} reduction={j:max}')
        """
        check_type(text, str, "text of a sharding rule", "give a str", NotationError)
        # 1. The parts of the text: operands, results, sizes, and then the kinds.
        match = re.fullmatch(
            r"\s*\((?P<operands>[^()]*)\)\s*->\s*\((?P<results>[^()]*)\)"
            r"\s*\{(?P<sizes>[^{}]*)\}(?P<kinds>(?:\s*\w+\s*=\s*\{[^{}]*\})*)\s*",
            text,
        )
        if match is None:
            raise NotationError(
                f"{text!r} is not a sharding rule; write it as "
                "([i, k], [k, j]) -> ([i, j]) {i=4, k=8, j=16} reduction={k}"
            )
        # 2. Sizes. Their order numbers the factors.
        sizes: dict[str, int] = {}
        for item in _read_items(match["sizes"]):
            size = re.fullmatch(rf"({FACTOR_NAME})\s*=\s*(\d+)", item)
            if size is None or size[1] in sizes:
                raise NotationError(
                    f"{item!r} of {text!r} is not a factor's size; give each factor once, as in i=4"
                )
            sizes[size[1]] = int(size[2])
        index = {name: number for number, name in enumerate(sizes)}
        # 3. Kinds; the operator of a reduction is written at its factors, `{k:max}`.
        kinds: dict[str, list[int]] = {}
        operator = "sum"
        for kind, content in re.findall(r"(\w+)\s*=\s*\{([^{}]*)\}", match["kinds"]):
            if kind not in _KINDS or kind in kinds:
                raise NotationError(
                    f"{kind!r} of {text!r} is not a kind of factor, or there twice; the kinds are "
                    f"{', '.join(_KINDS)}"
                )
            names = [item.partition(":") for item in _read_items(content)]
            kinds[kind] = [_read_index(index, name.strip(), text) for name, _, _ in names]
            operators = {after.strip() for _, _, after in names if after}
            if operators and (kind != "reduction" or len(operators) > 1):
                raise NotationError(
                    f"{kind}={{{content}}} of {text!r}: one operator may follow reduced "
                    "factors, as in reduction={k:max}"
                )
            operator = next(iter(operators), operator)
        return cls(
            _parse_mappings(match["operands"], index, text),
            _parse_mappings(match["results"], index, text),
            sizes.values(),
            reduction=kinds.get("reduction", ()),
            need_replication=kinds.get("need_replication", ()),
            permutation=kinds.get("permutation", ()),
            blocked=kinds.get("blocked", ()),
            reduction_operator=operator,
            names=tuple(sizes),
        )

    def __str__(self) -> str:
        # Unlike a template, a rule without factors has braces, too.
        text = write_rule(self, self.names)
        return text if self.sizes else f"{text} {{}}"

    def __repr__(self) -> str:
        return f"OpShardingRule({str(self)!r})"


def write_rule(rule: Any, names: Sequence[str], more: str = "") -> str:
    """Return the text of a rule, or of a template, whose sizes may be None.

    Args:
        rule: an `OpShardingRule` or a `Template`.
        names: of its factors.
        more: text after the operands.
    """
    operands, results = (
        ", ".join(_write_mapping(mapping, names) for mapping in mappings)
        for mappings in (rule.operands, rule.results)
    )
    text = f"({operands}{more}) -> ({results})"
    sizes = [f"{n}={s}" for n, s in zip(names, rule.sizes, strict=True) if s is not None]
    if sizes:
        text += f" {{{', '.join(sizes)}}}"
    suffix = "" if rule.reduction_operator == "sum" else f":{rule.reduction_operator}"
    for kind in _KINDS:
        factors = getattr(rule, kind)
        if factors:
            after = suffix if kind == "reduction" else ""
            text += f" {kind}={{{', '.join(names[factor] + after for factor in factors)}}}"
    return text


def _write_mapping(mapping: Mapping, names: Sequence[str]) -> str:
    dims = ("".join(names[factor] for factor in dim) or "1" for dim in mapping)
    return f"[{', '.join(dims)}]"


def _write_mappings(tensors: Iterable[Iterable[Iterable[int]]]) -> tuple[Mapping, ...]:
    return tuple(
        tuple(tuple(int(factor) for factor in dim) for dim in mapping) for mapping in tensors
    )


def _read_items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _read_index(index: dict[str, int], name: str, text: str) -> int:
    if name not in index:
        raise NotationError(f"factor {name!r} of {text!r} has no size; add it, as in {{{name}=4}}")
    return index[name]


def _parse_mappings(body: str, index: dict[str, int], text: str) -> list[list[list[int]]]:
    if re.fullmatch(r"\s*(\[[^\[\]]*\]\s*(,\s*\[[^\[\]]*\]\s*)*)?", body) is None:
        raise NotationError(
            f"({body}) of {text!r} is not a list of tensors; write it as ([i, k], [k, j])"
        )
    mappings = []
    for content in re.findall(r"\[([^\[\]]*)\]", body):
        dims = []
        for item in _read_items(content):
            if item != "1" and re.fullmatch(f"({FACTOR_NAME})+", item) is None:
                raise NotationError(
                    f"dimension {item!r} of {text!r} is not made of factors; write it as i, or as "
                    "ij for two factors, or as 1 for none"
                )
            # A digit belongs to the letter before it, so `iz_1` is `i` and `z_1`.
            dims.append([_read_index(index, name, text) for name in re.findall(FACTOR_NAME, item)])
        mappings.append(dims)
    return mappings
