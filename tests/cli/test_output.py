"""Output: JSON written item by item, and reports as files, whole or not at all."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.command_runs import entries, mask_measurements, run_here, write_model
from reshard.cli import output
from reshard.cli.options import check_report
from reshard.errors import RunError, UsageError
from reshard.text import bytes_text
from show.page_parts import parsed, svgs

EXPLAIN = ("explain", "x, y", "y, x", "--mesh", "x=2,y=3", "--shape", "6x6")
PLAN = ("plan", "model", "--to", "tp=4,dp=2", "--rule", "*.weight=tp, -", "--rule", "*=...")
COMMANDS = [EXPLAIN, PLAN]

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans())
def test_a_json_object_is_the_same_with_iterators_for_lists(
    content: dict[str, Any], is_lazy: bool
) -> None:
    given_content = {
        key: iter(value) if is_lazy and isinstance(value, list) else value
        for key, value in content.items()
    }
    written: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "write_pieces", written.extend)
        output.write_json(given_content)
    assert "".join(written) == json.dumps(content, indent=1) + "\n"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_report_does_not_change_the_output(folder: Path, command: tuple[str, ...]) -> None:
    without = run_here(*command)
    run = run_here(*command, "--html", "report.html", "--ranks-per-host", "4")
    assert (run.code, run.errors) == (0, "")
    assert mask_measurements(run.output) == mask_measurements(without.output)
    page = (folder / "report.html").read_text(encoding="utf-8")
    parsed(page)
    assert len(svgs(page)) >= 4
    assert entries(folder) == {"model", "report.html"}
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((folder / "report.html").stat().st_mode) == 0o666 & ~mask
    assert run_here(*command, "--html", "again.html", "--ranks-per-host", "4", "--json").json
    assert (folder / "again.html").read_text(encoding="utf-8") == page


def test_the_report_of_a_checkpoint_has_the_figures_of_the_plan(folder: Path) -> None:
    others = ("--rule", "*=...")
    cut = ("convert", "model", "cut", "--to", "tp=2", "--rule", "*.weight=tp, -", *others)
    assert run_here(*cut).code == 0
    plan = ("plan", "cut", "--to", "tp=4", "--rule", "*.weight=-, tp", *others)
    content = run_here(*plan, "--json").json
    assert run_here(*plan, "--html", "report.html").code == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert content["moved_bytes"] > 0
    assert f"<dt>moves</dt><dd>{bytes_text(content['moved_bytes'])}</dd>" in page
    assert "embed.weight: 30x8 of float32" in page
    assert "mlp.up.weight: 16x8 of float32" in page
    assert page.count("<section>") >= 3


def test_tensors_that_change_alike_are_drawn_once(folder: Path) -> None:
    tensors = {f"layer.{i}.weight": np.zeros((8, 4), np.float32) for i in range(30)}
    shapes = {f"other.{i}": np.zeros((20 + i, 4), np.float32) for i in range(9)}
    write_model(folder / "deep", **tensors, **shapes)
    plan = ("plan", "deep", "--to", "tp=2", "--rule", "*=tp, -")
    assert run_here(*plan, "--html", "report.html").code == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "layer.0.weight and 29 more like it" in page
    assert page.count("<section>") == 6
    assert "Not drawn: 4 smaller tensors." in page


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_an_existing_file_is_kept(folder: Path, command: tuple[str, ...]) -> None:
    (folder / "report.html").write_text("precious")
    run = run_here(*command, "--html", "report.html")
    assert (run.code, run.output) == (2, "")
    assert "--overwrite" in run.errors
    assert (folder / "report.html").read_text() == "precious"
    assert run_here(*command, "--html", "report.html", "--overwrite").code == 0
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert entries(folder) == {"model", "report.html"}


def test_a_dangling_link_is_a_file_that_exists(folder: Path) -> None:
    (folder / "report.html").symlink_to("nowhere")
    assert run_here(*EXPLAIN, "--html", "report.html").code == 2
    assert (folder / "report.html").is_symlink()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--html", ""), "an empty name"),
        (("--html", "model"), "is a folder"),
        (("--html", "model", "--overwrite"), "is a folder"),
        (("--html", "nowhere/report.html"), "nowhere is not a folder"),
        (("--html", "model/config.json/report.html"), "is not a folder"),
        (("--overwrite",), "--html FILE"),
        (("--ranks-per-host", "4"), "--html FILE"),
        (("--html", "r.html", "--ranks-per-host", "0"), "--ranks-per-host"),
        (("--html", "r.html", "--ranks-per-host", "many"), "--ranks-per-host"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_wrong_options_of_a_report_are_refused(
    folder: Path, command: tuple[str, ...], arguments: tuple[str, ...], said: str
) -> None:
    run = run_here(*command, *arguments)
    assert (run.code, run.output) == (2, "")
    assert said in run.errors
    assert entries(folder) == {"model"}


def test_a_file_created_in_the_meantime_is_kept(folder: Path) -> None:
    path = folder / "report.html"
    check_report(str(path), False, None)
    path.write_text("precious")
    with pytest.raises(UsageError, match="exists"):
        output.write_whole(path, "page", False, "report")
    assert path.read_text() == "precious"
    assert entries(folder) == {"model", "report.html"}


def test_a_report_on_a_file_system_without_links(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = folder / "report.html"
    output.write_whole(path, "page", False, "report")
    assert path.read_text() == "page"
    with pytest.raises(UsageError, match="exists"):
        output.write_whole(path, "other", False, "report")
    assert path.read_text() == "page"
    assert entries(folder) == {"model", "report.html"}


def test_a_failed_write_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"cannot write the report: .*No space left"):
        output.write_whole(folder / "report.html", "page", False, "report")
    assert entries(folder) == {"model"}
