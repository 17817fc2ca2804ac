"""Layouts by transformers where it is not installed; tests/engines has those where it is."""

from __future__ import annotations

import importlib.util

import pytest

from reshard.errors import MissingExtraError, UsageError
from reshard.torch.transformers import layouts

CONFIG = {"model_type": "llama"}


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is not None, reason="transformers is installed"
)
def test_a_missing_transformers_is_named() -> None:
    with pytest.raises(MissingExtraError, match=r"need transformers 5\.20 or later"):
        layouts(CONFIG, tp=2)


@pytest.mark.parametrize("size", [0, -1, 1.5, "two", True])
def test_invalid_sizes_are_refused(size: object) -> None:
    with pytest.raises(UsageError, match="tp"):
        layouts(CONFIG, tp=size)  # type: ignore[arg-type]
