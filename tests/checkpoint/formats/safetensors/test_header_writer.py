"""Headers that are made when they are written, against those made by JSON, and cut into files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.checkpoint_files import Tensor, tensor, write_file
from reshard import checkpoint
from reshard.checkpoint.formats.safetensors import header_writer
from reshard.checkpoint.formats.safetensors.header import parse_header
from reshard.checkpoint.formats.safetensors.header_writer import (
    HeaderFile,
    NewHeader,
    check_header,
    place_rows,
)
from reshard.dtypes import dtype
from reshard.errors import UsageError

KINDS = ((dtype("F32"), (2, 3)), (dtype("U8"), (5,)), (dtype("BF16"), ()))

names_of_tensors = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    unique=True,
    max_size=12,
)


@given(names_of_tensors, st.data())
def test_the_text_is_that_of_json(names: list[str], data: st.DataObject) -> None:
    number = st.integers(0, len(KINDS) - 1)
    kind = np.array([data.draw(number) for _ in names], dtype=np.int64)
    begins = ((7, 0), (12,), ())
    metadata = {"format": "pt", "OFFSETS": "", "after \u00e9": '"'}
    header = NewHeader(names, np.arange(len(names)), KINDS, kind, metadata, "OFFSETS", begins)
    first_bytes = b"".join(header.pieces())
    info = {
        name: {"saved_offsets": begins[of]} for name, of in zip(names, kind.tolist(), strict=True)
    }
    content: dict[str, object] = {"__metadata__": {**metadata, "OFFSETS": json.dumps(info)}}
    at = 0
    for name, of in zip(names, kind.tolist(), strict=True):
        element, shape = KINDS[of]
        size = int(np.prod(shape, dtype=int)) * element.itemsize_bytes
        tag, place = element.safetensors_tag, [at, at + size]
        content[name] = {"dtype": tag, "shape": shape, "data_offsets": place}
        at += size
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    assert first_bytes[8:].rstrip(b" ") == text
    length = int.from_bytes(first_bytes[:8], "little")
    assert len(first_bytes) == header.data_start_bytes == 8 + length
    assert len(first_bytes) % 4096 == 0
    read = parse_header(first_bytes[8:], header.file_size_bytes, "x")
    assert [tensor.start_bytes for tensor in read.tensors] == header.starts.tolist()


def test_a_file_has_its_header_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"layers.{number}" for number in range(100)]
    kind = np.arange(100) % len(KINDS)
    header = NewHeader(names, np.arange(100), KINDS, kind, {"OFFSETS": ""}, "OFFSETS", ((),) * 3)
    whole = b"".join(header.pieces())
    monkeypatch.setattr(header_writer, "_TENSORS_A_PIECE", 7)
    monkeypatch.setattr(header_writer, "_WRITTEN_BYTES", 300)
    file = HeaderFile.of("a", 0, header)
    at = 0
    for begin, piece in file.known_bytes():
        assert begin == at
        assert len(piece.strip()) < 1000
        assert whole[begin : begin + len(piece)] == piece
        at += len(piece)
    assert at == len(whole) == header.data_start_bytes


def test_headers_that_would_be_too_long_are_those_of_several_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source: dict[str, Tensor] = {
        f"layers.{number:03}.weight": tensor("float32", (8, 2), number) for number in range(99)
    }
    write_file(tmp_path / "model.safetensors", source)
    monkeypatch.setattr(header_writer, "LARGEST_HEADER_BYTES", 2 * 4096)
    checkpoint.convert(tmp_path / "model.safetensors", tmp_path / "full", to="full")
    checkpoint.convert(tmp_path / "full", tmp_path / "cut", to="tp=2", rules=["*=tp, -"])
    files = sorted(path.name for path in (tmp_path / "cut").glob("*.safetensors"))
    many = len(files) // 2
    assert many > 1
    assert files[0] == f"shard-00001-model-00001-of-{many:05}.safetensors"
    assert files[-1] == f"shard-00002-model-{many:05}-of-{many:05}.safetensors"
    index = json.loads((tmp_path / "full" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == source.keys()
    assert len(set(index["weight_map"].values())) > 1
    # Also without what the manifests say.
    for folder in ("full", "cut"):
        assert checkpoint.compare(tmp_path / "model.safetensors", tmp_path / folder).is_same
        (tmp_path / folder / "reshard.manifest.json").unlink()
        assert checkpoint.compare(tmp_path / "model.safetensors", tmp_path / folder).is_same


def test_a_name_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_writer, "LARGEST_HEADER_BYTES", 2 * 4096)
    names = ["w" * 10_000, "b"]
    headers = place_rows(names, np.arange(2), KINDS, np.zeros(2, np.int64), {})
    assert len(headers) == 2
    check_header(headers[1])
    with pytest.raises(UsageError, match="bytes, expected at most 8192"):
        check_header(headers[0], "a file")
