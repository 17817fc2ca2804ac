"""Every format is in the campaigns, as what is read and as what is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.any_conversion import plan_any
from checkpoint.campaigns.small_checkpoints import (
    CONVERSIONS,
    SOURCES,
    SmallConversion,
    Source,
)
from reshard.checkpoint import check_digests, open_checkpoint, run_conversion, shipped_formats
from reshard.checkpoint.formats.format import Listing
from reshard.checkpoint.formats.registry import all_formats, detect_format, written_names


def test_no_format_is_missing() -> None:
    assert {source.format for source in SOURCES} == {one.name for one in shipped_formats()}
    assert {one.format for one in CONVERSIONS} == {*written_names()}
    for rows in (SOURCES, CONVERSIONS):
        assert len({row.name for row in rows}) == len(rows)


pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda one: one.name)
def test_a_source_is_what_it_says(source: Source, tmp_path: Path) -> None:
    path = source.make(tmp_path)
    opened = source.open(path)
    assert opened.format == source.format
    assert opened.tensors
    # The table of formats leaves out no format that detects the path.
    listing = Listing(path)
    assert detect_format(listing) == next(one for one in all_formats() if one.detect(listing))
    # As macOS leaves them on disks that keep no attributes, and in every folder that was looked at.
    for folder in [path, *path.rglob("*")] if path.is_dir() else []:
        if folder.is_dir():
            (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
        else:
            folder.with_name(f"._{folder.name}").write_bytes(b"\0\5\x16\7" + bytes(78))
    again = source.open(path)
    assert (again.format, again.notes) == (opened.format, opened.notes)
    assert again.tensors == opened.tensors


@pytest.mark.parametrize("row", CONVERSIONS, ids=lambda one: one.name)
def test_a_conversion_is_to_what_it_says(row: SmallConversion, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    source, options = row.make(tmp_path / "made")
    conversion = plan_any(source, tmp_path / "target", **options)
    run_conversion(conversion)
    opened = open_checkpoint(tmp_path / "target")
    assert opened.format == row.format
    assert opened.tensors.keys() == conversion.write_plan.tensors.keys()
    assert not check_digests(opened).damaged
