"""Marks of tensors that a run has left partly new and partly old."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from reshard.torch.exchange.consistency import _MARKED, is_usable, mark_unusable, mark_usable  # noqa: E402


def test_a_mark_stays_until_the_tensor_is_filled() -> None:
    tensor, other = torch.ones(3), torch.ones(3)
    mark_unusable(tensor)
    assert not is_usable(tensor)
    assert is_usable(other)
    mark_usable(tensor)
    assert is_usable(tensor)
    mark_usable(tensor)


@pytest.mark.parametrize("write", [lambda t: t.zero_(), lambda t: t[1:].add_(1)])
def test_what_the_user_writes_counts(write: object) -> None:
    tensor = torch.ones(3)
    mark_unusable(tensor)
    write(tensor)  # type: ignore[operator]
    assert is_usable(tensor)
    mark_unusable(tensor)
    assert not is_usable(tensor)


def test_other_memory_counts() -> None:
    tensor = torch.nn.Parameter(torch.ones(3))
    mark_unusable(tensor)
    tensor.data = torch.zeros(3)
    assert is_usable(tensor)


def test_inference_tensors_are_marked() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    mark_unusable(tensor)
    assert not is_usable(tensor)


def test_marks_keep_no_tensor_alive() -> None:
    gc.collect()
    before = len(_MARKED)
    tensor = torch.ones(3)
    mark_unusable(tensor)
    assert len(_MARKED) == before + 1
    del tensor
    gc.collect()
    assert len(_MARKED) == before
