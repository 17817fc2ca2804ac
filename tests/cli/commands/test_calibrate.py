"""What `reshard calibrate` refuses, before it measures anything; a real run is in tests/torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cli.command_runs import entries, run_here
from reshard.cli.commands.calibrate import _check_output
from reshard.errors import ReshardError

VARIABLES = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("missing", VARIABLES)
@pytest.mark.usefixtures("launched")
def test_it_is_started_by_torchrun(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(missing)
    run = run_here("calibrate")
    assert (run.code, run.output) == (2, "")
    assert run.errors.startswith(f"reshard: {missing} is not set")
    assert "torchrun --nproc-per-node N -m reshard calibrate" in run.errors
    assert run_here("calibrate", "--json").json["error"]["kind"] == "UsageError"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("WORLD_SIZE", "1", "a single rank sends nothing"),
        ("RANK", "first", "RANK='first'; torchrun sets it to a number"),
    ],
)
@pytest.mark.usefixtures("launched")
def test_invalid_jobs_are_refused(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    run = run_here("calibrate")
    assert run.code == 2 and message in run.errors


@pytest.mark.usefixtures("launched")
def test_torch_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    run = run_here("calibrate")
    assert run.code == 2 and "pip install 'reshard[torch]'" in run.errors


@pytest.mark.usefixtures("launched")
def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("LOCAL_RANK", "1000")
    run = run_here("calibrate", "--backend", "nccl")
    assert run.code == 2 and "for rank 1000 of this host" in run.errors


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 3, "interrupted; nothing was written"),
        (RuntimeError("timed out"), 3, "the ranks did not find each other: timed out"),
    ],
)
@pytest.mark.usefixtures("launched")
def test_a_failed_start_is_reported_in_a_line(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    dist = pytest.importorskip("torch.distributed")

    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(dist, "init_process_group", fails)
    before = entries(folder)
    run = run_here("calibrate", "--output", "machine.toml")
    assert run.code == code and run.errors == f"reshard: {message}\n"
    assert entries(folder) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seconds", "0"), "0.0 is not in the range x>0"),
        (("--largest", "much"), "'much' is not a size"),
        (("--backend", "mpi"), "'mpi' is not one of 'gloo', 'nccl'"),
    ],
)
def test_options_that_cannot_be(options: tuple[str, ...], message: str) -> None:
    run = run_here("calibrate", *options)
    assert run.code == 2 and message in run.errors


@pytest.mark.parametrize(
    ("output", "overwrite", "message"),
    [
        ("machine", False, "write machine.toml"),
        ("", False, "write machine.toml"),
        ("nowhere/machine.toml", False, "nowhere is not a folder"),
        ("there.toml", False, "there.toml exists; give --overwrite"),
        ("folder.toml", True, "folder.toml is a folder"),
        (None, True, "give --output FILE too"),
    ],
)
def test_outputs_that_cannot_be(
    output: str | None, overwrite: bool, message: str, folder: Path
) -> None:
    (folder / "there.toml").write_text("")
    (folder / "folder.toml").mkdir()
    with pytest.raises(ReshardError, match=message):
        _check_output(output, overwrite)


def test_outputs_that_can_be(folder: Path) -> None:
    (folder / "there.toml").write_text("")
    _check_output("there.toml", True)
    _check_output("new.toml", False)
    _check_output(None, False)


def test_its_help_has_examples_and_keys() -> None:
    text = run_here("calibrate", "--help").output
    examples = text.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in examples] == ["torchrun", "torchrun", "reshard"]
    assert "Keys of --json:" in text
    assert all(len(line) <= 100 for line in text.splitlines())
