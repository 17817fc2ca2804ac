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

HIDDEN, WIDTH, VOCABULARY = 1024, 3072, 1000


class RankModel(torch.nn.Module):
    """One rank of two: fused rows, cut columns, a padded vocabulary, a computed parameter."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.rank = rank
        self.gate_up = torch.nn.Parameter(torch.empty(WIDTH, HIDDEN, dtype=dtype))
        self.down = torch.nn.Parameter(torch.empty(HIDDEN, WIDTH // 2, dtype=dtype))
        self.embedding = torch.nn.Parameter(torch.empty(VOCABULARY // 2 + 12, HIDDEN, dtype=dtype))
        self.A = torch.nn.Parameter(torch.empty(8))
        self.bias = torch.nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.register_buffer("scale", torch.tensor(1.0))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            with torch.no_grad():
                if name in ("gate", "up"):
                    half = WIDTH // 2
                    target = self.gate_up.narrow(0, half * (name == "up"), half)
                    target.copy_(weight.narrow(0, half * self.rank, half))
                elif name == "down":
                    half = WIDTH // 2
                    self.down.copy_(weight.narrow(1, half * self.rank, half))
                elif name == "embedding":
                    half = VOCABULARY // 2
                    self.embedding[:half].copy_(weight[half * self.rank : half * (self.rank + 1)])
                    self.embedding[half:].fill_(0)
                elif name == "A_log":
                    self.A.copy_(-torch.exp(weight.float().narrow(0, 8 * self.rank, 8)))
                elif name == "bias":
                    self.bias.copy_(weight)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    shapes = {
        "gate": (WIDTH, HIDDEN),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
        "embedding": (VOCABULARY, HIDDEN),
        "A_log": (16,),
        "bias": (16,),
    }
    tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("cut", [False, True])
def test_a_rank_holds_what_its_loader_puts_there(folder: Path, rank: int, cut: bool) -> None:
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


def test_a_loader_that_refuses_says_why(folder: Path) -> None:
    class Refusing(RankModel):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            raise KeyError("no parameter 'gate'")

    with pytest.raises(RunError, match="no parameter 'gate'"):
        load_rank(Refusing(0), folder)
