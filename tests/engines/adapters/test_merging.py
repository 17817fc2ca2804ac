"""Adapters merged into their base, and what `merge_and_unload` of PEFT gives.

The product is summed in another order, so the last place may differ.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if os.environ.get("RESHARD_ENGINE") != "transformers":
    pytest.skip("needs PEFT", allow_module_level=True)

import torch

from checkpoint.changes.merged_weights import compare_weights
from engines.adapters.peft_models import CASES, write_case
from reshard import checkpoint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_as_peft_merges(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    write_case(tmp_path, case, dtype)
    adapters = [tmp_path / "adapter", tmp_path / "second"]
    for name, taken in (("merged", adapters[:1]), ("merged both", adapters)):
        target = tmp_path / f"ours {name}"
        checkpoint.convert(tmp_path / "base", target, to="full", adapters=taken)
        found = compare_weights(target, tmp_path / name)
        if dtype is torch.float32:
            assert found.of_greatest < 5e-7
        else:
            assert found.differing <= 0.002 * found.elements
            assert found.of_greatest < 2**-7
