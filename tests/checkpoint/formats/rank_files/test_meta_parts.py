"""How Meta's files shard tensors; whole models are in `tests/checkpoint/naming`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from reshard.checkpoint import open_checkpoint
from reshard.errors import UsageError


def write(folder: Path, parameters: str | None, ranks: int = 2) -> Path:
    folder.mkdir()
    for rank in range(ranks):
        part = {
            "tok_embeddings.weight": torch.ones(6, 4),
            "layers.0.attention.wo.weight": torch.ones(8, 4),
        }
        torch.save(part, folder / f"consolidated.0{rank}.pth")
    if parameters is not None:
        (folder / "params.json").write_text(parameters)
    return folder


def test_the_embedding_is_over_its_rows_or_columns_by_its_shape(tmp_path: Path) -> None:
    by_columns = open_checkpoint(write(tmp_path / "a", json.dumps({"dim": 8, "n_heads": 4})))
    assert by_columns.tensors["tok_embeddings.weight"].shape == (6, 8)
    assert by_columns.tensors["layers.0.attention.wo.weight"].shape == (8, 8)
    by_rows = open_checkpoint(write(tmp_path / "b", json.dumps({"dim": 4, "n_heads": 4})))
    assert by_rows.tensors["tok_embeddings.weight"].shape == (12, 4)


@pytest.mark.parametrize("parameters", [None, "{", "[]"])
def test_without_parameters_the_sharding_is_not_guessed(
    tmp_path: Path, parameters: str | None
) -> None:
    with pytest.raises(UsageError, match=r"files of 2 ranks and no params.json"):
        open_checkpoint(write(tmp_path / "a", parameters))


def test_key_value_heads_that_files_do_not_divide(tmp_path: Path) -> None:
    parameters = json.dumps({"dim": 8, "n_heads": 4, "n_kv_heads": 1})
    with pytest.raises(UsageError, match="1 key/value heads, which they do not divide"):
        open_checkpoint(write(tmp_path / "a", parameters))
