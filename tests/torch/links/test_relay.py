"""What is handed on waits until it is complete."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

from reshard.errors import RunError
from reshard.torch.links.relay import BucketGate


def test_a_gate_opens_bucket_by_bucket() -> None:
    gate, passed = BucketGate(), threading.Event()

    def wait() -> None:
        gate.wait(1)
        passed.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    gate.begin(0)
    gate.end(0)
    assert not passed.is_set()
    gate.end(1)
    waiting.join()
    assert passed.is_set()


def test_what_is_complete_passes_after_a_failure() -> None:
    gate = BucketGate()
    gate.end(0)
    gate.fail(ValueError("no more"))
    gate.wait(0)
    with pytest.raises(RunError, match="the weights to hand on did not come: no more"):
        gate.wait(1)
