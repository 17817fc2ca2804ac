"""Our rules beside Shardy's own, for random operations of every kind that StableHLO has here.

Rules must be the same, factors numbered the same, but for the deliberate differences below: each
says what it would make of Shardy's rule, for what kind of operation, and why; the rest must be
equal. What each explains is counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from reshard.spmd.core.operator import operators
from reshard.spmd.rules.sharding_rule import OpShardingRule
from spmd.stablehlo_operations import MAKERS, Operation, operations

EACH = 100


def shardys(texts: Iterable[str | None]) -> list[OpShardingRule | None]:
    found = []
    for text in texts:
        if text is not None:
            text = text.partition("<")[2].rpartition(">")[0].replace(")->(", ") -> (")
            text = text.replace("blocked_propagation", "blocked")
            text = text if "{" in text else text + " {}"
        found.append(None if text is None else OpShardingRule.parse(text))
    return found


def changed(rule: OpShardingRule, **kinds: Iterable[int]) -> OpShardingRule:
    """The rule with other factors of some kinds."""
    every = {
        kind: getattr(rule, kind)
        for kind in ("reduction", "need_replication", "permutation", "blocked")
    } | kinds
    return OpShardingRule(rule.operands, rule.results, rule.sizes, **every, names=rule.names)


def factors(mappings: Iterable[Iterable[Iterable[int]]]) -> set[int]:
    return {factor for mapping in mappings for dim in mapping for factor in dim}


Change = Callable[[Operation, OpShardingRule], OpShardingRule]


@dataclass(frozen=True)
class Difference:
    """A deliberate one: what it makes of Shardy's rule, which stays as it is elsewhere."""

    reason: str
    kinds: tuple[str, ...]
    change: Change


def of_operands_alone(_: Operation, rule: OpShardingRule) -> OpShardingRule:
    alone = factors(rule.operands) - factors(rule.results) - {*rule.reduction}
    return changed(rule, need_replication={*rule.need_replication, *alone})


def of_results_alone(_: Operation, rule: OpShardingRule) -> OpShardingRule:
    alone = factors(rule.results) - factors(rule.operands)
    large = {factor for factor in alone if rule.sizes[factor] != 1}
    return changed(rule, need_replication={*rule.need_replication, *large})


def columns_pass(operation: Operation, rule: OpShardingRule) -> OpShardingRule:
    columns = rule.operands[1][-1 if operation.attributes["left_side"] else -2]
    return changed(rule, need_replication={*rule.need_replication} - {*columns})


def updates_once(_: Operation, rule: OpShardingRule) -> OpShardingRule:
    return changed(rule, reduction=(), need_replication={*rule.need_replication, *rule.reduction})


def index_and_value(_: Operation, rule: OpShardingRule) -> OpShardingRule:
    # Shardy's operation reduces pairs; the operator has one operand and gives the index.
    return OpShardingRule(
        rule.operands[:1], rule.results[:1], rule.sizes, need_replication=rule.reduction
    )


def shifted_in_place(operation: Operation, rule: OpShardingRule) -> OpShardingRule:
    moved = {
        dim
        for dim, (low, high) in enumerate(operation.attributes["pad_width"])
        if low or high or operation.attributes["interior"][dim]
    }
    return changed(rule, permutation={*rule.permutation, *moved})


def all_are_ordered(operation: Operation, rule: OpShardingRule) -> OpShardingRule:
    axis = len(operation.operands[0]) - 1
    if operation.attributes["k"] != operation.operands[0][axis]:
        return rule
    return changed(rule, need_replication=[axis], blocked=[axis])


DIFFERENCES = [
    Difference(
        "a factor that the operand alone has, and that is not reduced, is needed whole: Shardy "
        "leaves it to the partitioner",
        ("broadcast", "reshape"),
        of_operands_alone,
    ),
    Difference(
        "a factor that a reshape's result alone has would cut what the operand has elsewhere",
        ("reshape",),
        of_results_alone,
    ),
    Difference(
        "columns (or rows) of the right side are solved one by one",
        ("triangular solve",),
        columns_pass,
    ),
    Difference(
        "updates of a part would be added to each part's copy of the array, which is then summed",
        ("scatter",),
        updates_once,
    ),
    Difference(
        "an index says nothing without its value: contributions do not combine",
        ("argmax",),
        index_and_value,
    ),
    Difference(
        "padding on one side and cropping on the other moves elements", ("pad",), shifted_in_place
    ),
    Difference("the largest k of k are still put in order", ("top-k",), all_are_ordered),
]


def without_scalars_behind(rule: OpShardingRule, count: int) -> OpShardingRule:
    """Without the scalars that an operation has behind the operator's operands."""
    if any(rule.operands[count:]):
        return rule
    kinds = {
        k: getattr(rule, k) for k in ("reduction", "need_replication", "permutation", "blocked")
    }
    return OpShardingRule(
        rule.operands[:count], rule.results, rule.sizes, **kinds, names=rule.names
    )


def plain(rule: OpShardingRule) -> str:
    """The text without how contributions combine, which Shardy's rules do not say."""
    return str(
        OpShardingRule(
            rule.operands,
            rule.results,
            rule.sizes,
            reduction=rule.reduction,
            need_replication=rule.need_replication,
            permutation=rule.permutation,
            blocked=rule.blocked,
        )
    )


def channels_alone(rule: OpShardingRule) -> tuple[object, ...]:
    """A convolution's rule without its space: factors of batch and channels by first place.

    Factors of size 1 say nothing, and Shardy has one or two for a single channel.
    """
    kept = [
        [[factor for factor in dim if rule.sizes[factor] != 1] for dim in mapping[:2]]
        for mapping in rule.tensors
    ]
    order = list(dict.fromkeys(factor for mapping in kept for dim in mapping for factor in dim))
    number = {factor: place for place, factor in enumerate(order)}
    return (
        [[[number[f] for f in dim] for dim in mapping] for mapping in kept],
        [rule.sizes[f] for f in order],
        [number[f] for f in rule.reduction if f in number],
        [number[f] for f in rule.permutation if f in number],
    )


def compared(operation: Operation, theirs: OpShardingRule | None, counts: Counter[str]) -> None:
    ours = operators[operation.operator].rule(operation.operands, **operation.attributes)
    if theirs is None:
        # Shardy has no rule for a reshape of nothing; ours matches equal leading and trailing
        # dimensions.
        assert operation.kind == "reshape" and 0 in operation.operands[0], operation
        counts["a reshape of nothing"] += 1
        return
    if operation.kind == "convolution":
        # In Shardy a window as long as its result or longer makes the space a reduction, for the
        # gradients of kernels; ours is moved whole always, and the kernel's own is needed whole.
        assert channels_alone(ours) == channels_alone(theirs), (operation, str(ours), str(theirs))
        space = {factor for dim in ours.results[0][2:] for factor in dim}
        assert space == {*ours.permutation}
        counts["space of a convolution"] += theirs.permutation != ours.permutation
        return
    theirs = without_scalars_behind(theirs, len(operation.operands))
    for difference in DIFFERENCES:
        if plain(theirs) == plain(ours):
            return
        if operation.kind in difference.kinds:
            explained = difference.change(operation, theirs)
            counts[difference.reason] += explained is not theirs
            theirs = explained
    assert plain(theirs) == plain(ours), operation


@pytest.fixture(scope="module")
def pairs() -> list[tuple[Operation, OpShardingRule | None]]:
    pytest.importorskip("jax")
    asked = operations(seed=7, each=EACH)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("shardy_rules.py"))],
        input=json.dumps([[one.arguments, one.text] for one in asked]),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return list(zip(asked, shardys(json.loads(done.stdout)), strict=True))


def test_rules_are_shardys(pairs: list[tuple[Operation, OpShardingRule | None]]) -> None:
    counts: Counter[str] = Counter()
    for operation, theirs in pairs:
        compared(operation, theirs, counts)
    assert len(pairs) == EACH * len(MAKERS)
    # Each difference explains something, and most rules need none.
    assert {difference.reason for difference in DIFFERENCES} <= set(counts)
    assert sum(counts.values()) < len(pairs) / 3


def test_the_comparison_sees_a_wrong_rule(
    pairs: list[tuple[Operation, OpShardingRule | None]],
) -> None:
    seen = 0
    for operation, theirs in pairs:
        if theirs is None or operation.kind in ("argmax", "convolution") or not theirs.sizes:
            continue
        whole = {*theirs.need_replication}
        free = {*range(len(theirs.sizes))} - {*theirs.reduction, *theirs.permutation}
        wrong = changed(theirs, need_replication=whole ^ {min(free, default=0)} if free else whole)
        if free and operation.kind in ("dot", "elementwise", "sort", "gather", "FFT"):
            with pytest.raises(AssertionError):
                compared(operation, wrong, Counter())
            seen += 1
    assert seen > 3 * EACH
