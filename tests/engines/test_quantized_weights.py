"""Values of the shards of quantised weights, by the libraries that define the formats.

The records are what the libraries make; each rank's stored tensors, given to the library as a
weight of their own, are the rank's part of the values.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if os.environ.get("RESHARD_ENGINE") != "quantization":
    pytest.skip("needs RESHARD_ENGINE=quantization", allow_module_level=True)

from engines.quantized.library import FORMATS
from engines.quantized.records import cut_record, read_record, record_names


def test_every_format_is_recorded() -> None:
    assert record_names() == sorted(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_records_are_what_the_library_makes(name: str) -> None:
    record = read_record(name)
    stored, _ = FORMATS[name].make()
    assert set(stored) == set(record.stored)
    for end, one in stored.items():
        assert one.dtype == record.stored[end].dtype
        assert one.float().tolist() == record.stored[end].float().tolist()
    assert torch.equal(FORMATS[name].values(stored), record.values)


@pytest.mark.parametrize("dimension", [-2, -1])
@pytest.mark.parametrize("name", FORMATS)
def test_shards_have_their_part_of_the_values(name: str, dimension: int, tmp_path: Path) -> None:
    if name.startswith("bitsandbytes") and dimension == -1:
        pytest.skip("columns of flat rows are refused: see test_folding")
    record = read_record(name)
    for parts in range(1, 6):
        ranks = cut_record(tmp_path / str(parts), record, dimension % record.values.ndim, parts)
        assert len(ranks) > 1 or parts == 1
        found = torch.cat([FORMATS[name].values(stored) for stored in ranks], dimension)
        assert torch.equal(found, record.values)
