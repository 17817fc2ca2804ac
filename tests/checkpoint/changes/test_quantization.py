"""Values of quantised weights, whole and of each rank, against those that libraries recorded."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import reshard.checkpoint
from engines.quantized.records import (
    NAME,
    Tensors,
    cut_record,
    read_record,
    record_names,
    write_model,
)
from reshard.checkpoint.blocks import grid
from reshard.errors import UncomputableError, UsageError
from selection import choose, keep_covering

CASTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
FLAT = [name for name in record_names() if name.startswith("bitsandbytes")]
COMPUTED = [name for name in record_names() if name not in FLAT]


def dequantize(
    folder: Path, stored: Tensors, config: dict[str, object], kind: torch.dtype
) -> torch.Tensor:
    """The values that a conversion makes of stored tensors."""
    model = write_model(folder / "model", stored, config)
    reshard.checkpoint.convert(model, folder / "new", to="full", dequantize=True, dtype=CASTS[kind])
    (found,) = load_file(next((folder / "new").glob("*.safetensors"))).values()
    assert "quantization_config" not in json.loads((folder / "new/config.json").read_text())
    return found


@pytest.mark.parametrize("block_bytes", [None, 3000])
@pytest.mark.parametrize("name", COMPUTED)
def test_values_are_the_librarys(
    name: str, block_bytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block, and in blocks that begin inside groups and packed elements."""
    if block_bytes is not None:
        monkeypatch.setattr(grid, "BLOCK_BYTES", block_bytes)
    record = read_record(name)
    found = dequantize(tmp_path, record.stored, record.config, record.values.dtype)
    assert found.dtype == record.values.dtype
    assert torch.equal(found, record.values)


@pytest.mark.parametrize(
    ("name", "dimension"),
    keep_covering(1, itertools.product(COMPUTED, (-2, -1)), "the same method, cut elsewhere"),
)
def test_ranks_have_their_part_of_the_values(name: str, dimension: int, tmp_path: Path) -> None:
    record = read_record(name)
    for parts in choose((3,), (2, 3, 5)):
        folder = tmp_path / str(parts)
        ranks = cut_record(folder, record, dimension % record.values.ndim, parts)
        assert len(ranks) > 1
        found = [
            dequantize(folder / str(rank), stored, record.config, record.values.dtype)
            for rank, stored in enumerate(ranks)
        ]
        assert torch.equal(torch.cat(found, dimension), record.values)


def compute_flat(stored: Tensors) -> torch.Tensor:
    """bitsandbytes' values: an entry of a table, times the greatest absolute value of the block."""
    absmax = stored[".weight.absmax"]
    (state,) = (json.loads(bytes(v.tolist())) for n, v in stored.items() if "quant_state" in n)
    if ".weight.nested_absmax" in stored:
        blocks = stored[".weight.nested_absmax"].repeat_interleave(256)[: len(absmax)]
        absmax = stored[".weight.nested_quant_map"][absmax.long()] * blocks
        absmax = absmax + state["nested_offset"]
    packed = stored[".weight"].view(-1)
    # The first of two is in the high four bits.
    numbers = torch.stack([packed >> 4, packed & 15], -1).view(-1, 64).long()
    values = stored[".weight.quant_map"][numbers] * absmax[:, None]
    return values.view(-1, state["shape"][1]).to(torch.bfloat16)


@pytest.mark.parametrize("name", FLAT)
def test_rows_of_flat_weights_are_cut_between_blocks(name: str, tmp_path: Path) -> None:
    record = read_record(name)
    assert torch.equal(compute_flat(record.stored), record.values)
    for parts in range(1, 6):
        ranks = cut_record(tmp_path / str(parts), record, 0, parts)
        # Nested statistics are of 64 x 256 elements: sixteen rows of 1024, of which there are four.
        assert len(ranks) == ({3: 2, 5: 4}.get(parts, parts) if "nested" in name else parts)
        assert torch.equal(torch.cat([compute_flat(stored) for stored in ranks]), record.values)


@pytest.mark.parametrize("name", FLAT)
def test_columns_of_flat_weights_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UncomputableError, match="ties its 1024 elements together"):
        cut_record(tmp_path, read_record(name), 1, 2)
    assert not (tmp_path / "cut").exists()


def test_columns_in_any_order_are_refused(tmp_path: Path) -> None:
    record = read_record("gptq")
    in_any_order = record._replace(config=record.config | {"desc_act": True})
    with pytest.raises(UncomputableError, match=rf"{NAME}.g_idx' \(GPTQ\) ties its 224 elements"):
        cut_record(tmp_path / "columns", in_any_order, 1, 2)
    assert len(cut_record(tmp_path / "rows", in_any_order, 0, 2)) == 2
    with pytest.raises(UsageError, match="has its groups in any order"):
        dequantize(tmp_path / "d", record.stored, in_any_order.config, torch.float16)


def test_a_table_of_groups_in_compressed_tensors_ties_columns(tmp_path: Path) -> None:
    record = read_record("int4-groups")
    table = torch.from_numpy(np.random.default_rng(0).permutation(224) // 32).to(torch.int32)
    ordered = record._replace(stored=record.stored | {".weight_g_idx": table})
    with pytest.raises(UncomputableError, match="weight_g_idx"):
        cut_record(tmp_path, ordered, 1, 2)


def test_flat_weights_are_not_computed(tmp_path: Path) -> None:
    record = read_record("bitsandbytes-nf4")
    with pytest.raises(UsageError, match=r"\(bitsandbytes 4-bit\) cannot be computed"):
        dequantize(tmp_path, record.stored, record.config, torch.bfloat16)
