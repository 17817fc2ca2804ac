"""`reshard example` writes a model that the other commands take, and refuses a folder in use."""

from __future__ import annotations

from pathlib import Path

from cli.command_runs import run_here


def test_the_example_is_converted_and_verified(folder: Path) -> None:
    run = run_here("example", "tiny", "--json")
    assert (run.code, run.errors) == (0, "")
    assert run.json["size_bytes"] == (folder / "tiny" / "model.safetensors").stat().st_size
    assert run.json["elements"] == 151_872
    assert run_here("convert", "tiny", "tp4", "--to", "tp=4", "--recipe", "auto", "-q").code == 0
    assert run_here("verify", "tiny", "tp4", "-q").code == 0


def test_a_folder_in_use_is_an_error_and_stays_as_it_is(folder: Path) -> None:
    before = (folder / "model" / "model.safetensors").read_bytes()
    run = run_here("example", "model")
    assert (run.code, run.output) == (2, "")
    assert "model is not empty (it has 'config.json')" in run.errors
    assert (folder / "model" / "model.safetensors").read_bytes() == before
    assert run_here("example", "").code == 2
    assert run_here("example", "quiet", "-q").output == ""
