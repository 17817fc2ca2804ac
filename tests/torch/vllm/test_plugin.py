"""A rank's model, filled by reading: what its own loader would have put there, and no more bytes.

The loaders here are written as vLLM's are; vLLM itself: `tests/engines/vllm/test_generation.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reshard import checkpoint
from reshard.errors import RunError
from reshard.torch.vllm.plugin import load_rank
from vllm_rank_model import RankModel, make_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    save_file(make_weights(), tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("cut", [False, True])
def test_a_rank_holds_the_values_of_its_loader(folder: Path, rank: int, cut: bool) -> None:
    from safetensors.torch import load_file

    right = RankModel(rank)
    right.load_weights(load_file(folder / "model.safetensors").items())
    if cut:
        # A checkpoint that is cut over other ranks, which vLLM cannot read by itself.
        rules = ["gate=tp, -", "down=-, tp", "*=..."]
        checkpoint.convert(folder, folder.parent / "cut", to="tp=3", rules=rules)
        folder = folder.parent / "cut"
    model = RankModel(rank)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(7)
    report = load_rank(model, folder)
    for name, tensor in right.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert report.by_loader == ("A_log",)
    assert report.needed_bytes <= report.read_bytes <= 1.05 * report.needed_bytes
    whole = sum(one.size_bytes for one in checkpoint.open(folder).tensors.values())
    assert report.needed_bytes < 0.51 * whole


def test_refusals_of_a_loader_are_reported(folder: Path) -> None:
    class Refusing(RankModel):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            raise KeyError("no parameter 'gate'")

    with pytest.raises(RunError, match="no parameter 'gate'"):
        load_rank(Refusing(0), folder)
