"""The table of formats says of each what the format says itself."""

from __future__ import annotations

from reshard.checkpoint.formats.registry import shipped_formats, written_format, written_names


def test_names_are_known_without_formats() -> None:
    formats = shipped_formats()
    assert written_names() == tuple(sorted(one.name for one in formats if one.is_written))
    for name in written_names():
        assert written_format(name, to_whole=True).name == name
    assert not next(one for one in formats if one.name == "megatron-fsdp").is_written
