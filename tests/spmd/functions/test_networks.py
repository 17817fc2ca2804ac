"""What the functions of networks move and keep, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import ArrayIndexError, UsageError

MESH = DeviceMesh.of(dp=2, tp=3)
OPTIONS: list[dict[str, Any]] = [{}, {"ignore_index": 0}, {"label_smoothing": 0.1}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("cut", ["dp, tp", "-, tp", "-, dp tp"])
def test_cross_entropy_exchanges_numbers_of_tokens_and_no_logits(
    cut: str, options: dict[str, Any]
) -> None:
    tokens = 48
    labels = sp.array(np.arange(tokens) % 300, spec(MESH, f"{cut.split(',')[0]}"))

    def loss(logits: Any) -> Any:
        return sp.sum(sp.cross_entropy(logits, labels, **options))

    moved = []
    for classes in (300, 600):
        logits = sp.array(np.zeros((tokens, classes)), spec(MESH, cut))
        trace = sp.trace(sp.value_and_grad(loss), logits)
        moved.append(trace.moved_bytes)
        # An all-reduce among n ranks moves 2 (n - 1) / n of its bytes from each: three of them, or
        # four where all classes share a part of the weight, and one of the loss.
        numbers = 3 + bool(options.get("label_smoothing"))
        assert trace.moved_bytes <= 2 * numbers * 8 * tokens * 5 + 200
    assert moved[0] == moved[1]


def test_the_gradient_of_a_softmax_asks_nobody_who_had_the_greatest() -> None:
    x = sp.array(np.random.default_rng(0).normal(size=(8, 30)), spec(MESH, "dp, tp"))
    names = []

    class Names:
        def record(self, call: Any, operands: Any, results: Any) -> None:
            names.append(call.name)

        def record_reshard(self, operand: Any, result: Any) -> None:
            pass

    with sp.recording(Names()):
        found = sp.grad(lambda x: sp.sum(sp.square(sp.softmax(x))))(x)
    assert names.count("max") == 1
    assert names.count("stop_gradient") == 1
    assert str(found.spec) == "dp, tp"


def test_labels_that_are_no_classes_are_refused() -> None:
    logits = sp.array(np.zeros((4, 6)), spec(MESH, "dp, tp"))
    with pytest.raises(ArrayIndexError, match="index 6 of a dimension of size 6"):
        sp.cross_entropy(logits, sp.array(np.array([0, 1, 6, 2])))
    with pytest.raises(ArrayIndexError, match="index -100"):
        sp.cross_entropy(logits, np.array([0, 1, -100, 2]))
    assert sp.cross_entropy(logits, np.array([0, 1, -100, 2]), ignore_index=-100).to_dense()[2] == 0
    with pytest.raises(UsageError, match=r"label_smoothing=1\.5; a number from 0 to 1"):
        sp.cross_entropy(logits, np.zeros(4, int), label_smoothing=1.5)
