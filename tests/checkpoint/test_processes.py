"""Several processes make one checkpoint: the same one, sharing the work, and surviving kills."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint.checkpoint_files import Tensor, tensor, write_file
from checkpoint.process_runs import content, run
from live_processes import free_port
from reshard import checkpoint, log
from reshard.checkpoint.processes import (
    GlooProcesses,
    OneProcess,
    OtherProcessError,
    ProcessMark,
    _meet_first,
    running_processes,
)
from reshard.errors import RunError, UsageError

distributed = pytest.importorskip("torch.distributed")
SHARDED, TORCH = "sharded-safetensors", "torch-dcp"
WHOLE: dict[str, Tensor] = {
    "w": tensor("float32", (300, 200), 1),
    "v": tensor("bfloat16", (101, 500), 2),
    "s": tensor("int64", (), 3),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_file(folder / "model.safetensors", WHOLE)
    return folder


@pytest.mark.parametrize("form", [SHARDED, TORCH])
def test_any_number_of_processes_makes_the_same_files(model: Path, form: str) -> None:
    size_bytes = checkpoint.open(model).size_bytes
    results = {}
    buffers: dict[int, list[int]] = {}
    for count in (1, 2, 3, 4):
        target = model.with_name(f"of-{count}")
        outcome = run(count, model, target, form)
        assert [code for code, _ in outcome] == [0] * count, outcome
        results[count] = content(target)
        reports = [json.loads(text.splitlines()[-1]) for _, text in outcome]
        shares = [read for read, _ in reports[0]["by_process"]]
        assert all(report == reports[0] for report in reports)
        # No byte is read twice, and each process reads its share of the blocks.
        assert len(shares) == count
        assert sum(shares) == size_bytes
        assert max(shares) <= size_bytes / count + 2 * 4096
        written = [written for _, written in reports[0]["by_process"]]
        assert sum(written) >= size_bytes
        # Process 0 writes headers and what is beside the tensors too.
        assert max(written[1:], default=0) <= size_bytes / count + 2 * 4096
        buffers[count] = reports[0]["buffers"]
    # The four threads of a machine, each with its buffers, are shared among its processes.
    one = buffers[4][0]
    assert buffers == {1: [4 * one], 2: [2 * one] * 2, 3: [2 * one] * 3, 4: [one] * 4}
    assert results[1] == results[2] == results[3] == results[4]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_stops_the_others_and_any_number_goes_on(model: Path, killed: int) -> None:
    target = model.with_name("target")
    outcome = run(2, model, target, SHARDED, killed, 1)
    assert outcome[killed][0] == -9
    assert outcome[1 - killed][0] == 3, outcome
    assert "run the same command again, it continues" in outcome[1 - killed][1].lower()
    assert not target.exists()
    ((code, text),) = run(1, model, target, SHARDED)
    assert code == 0, text
    assert json.loads(text.splitlines()[-1])["resumed"] > 0
    undisturbed = model.with_name("undisturbed")
    assert run(1, model, undisturbed, SHARDED)[0][0] == 0
    assert content(target) == content(undisturbed)


def test_more_processes_go_on_from_fewer(model: Path) -> None:
    target = model.with_name("target")
    assert run(1, model, target, SHARDED, 0, 2)[0][0] == -9
    outcome = run(3, model, target, SHARDED)
    assert [code for code, _ in outcome] == [0, 0, 0], outcome
    assert json.loads(outcome[2][1].splitlines()[-1])["resumed"] > 0
    undisturbed = model.with_name("undisturbed")
    assert run(1, model, undisturbed, SHARDED)[0][0] == 0
    assert content(target) == content(undisturbed)


def test_what_stops_process_0_is_told_to_all(model: Path) -> None:
    target = model.with_name("target")
    target.mkdir()
    outcome = run(2, model, target, SHARDED)
    assert [code for code, _ in outcome] == [3, 3]
    assert "UsageError: the target exists" in outcome[0][1]
    assert "RunError: process 0 could not begin: the target exists" in outcome[1][1]


@pytest.mark.parametrize(("is_final", "is_left"), [(True, False), (False, True)])
def test_input_that_is_wrong_for_another_process_leaves_nothing(
    model: Path, is_final: bool, is_left: bool
) -> None:
    class First(OneProcess):
        """Process 0, which another process tells that it stops."""

        def check(self) -> None:
            raise OtherProcessError("another process stopped: process 1: wrong", is_final)

    before = sorted(model.parent.rglob("*"))
    with pytest.raises(RunError, match="process 1: wrong"):
        checkpoint.convert(model, model.with_name("target"), to="full", processes=First())
    assert (sorted(model.parent.rglob("*")) != before) is is_left


def test_a_process_that_stops_tells_whether_it_is_for_good(store: Any) -> None:
    def processes(rank: int) -> GlooProcesses:
        group = SimpleNamespace(get_rank=lambda _: rank, get_world_size=lambda _: 2)
        return GlooProcesses(group, None, store, 9, {})

    with contextlib.closing(processes(1)) as failed, contextlib.closing(processes(0)) as other:
        failed.fail("no such tensor", is_final=True)
        with pytest.raises(OtherProcessError, match="process 1: no such tensor") as caught:
            other.check()
    assert caught.value.is_final


def test_one_process_needs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with running_processes() as processes:
        assert isinstance(processes, OneProcess)
        assert processes.share("x") == "x"
        assert processes.collect("x") == ["x"]


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR, MASTER_PORT is not set"),
    ],
)
def test_variables_that_contradict_each_other(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], match: str
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=match), running_processes():
        pass


@pytest.mark.parametrize(
    ("rank", "match"),
    [
        (0, r"rank 1 of 2 did not come within 0\.3 s.*--wait-for-ranks"),
        (1, r"rank 0 did not come within 0\.3 s.*--wait-for-ranks"),
    ],
)
def test_a_process_that_never_comes(rank: int, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RunError, match=match), running_processes(wait_s=0.3):
        pass


@pytest.fixture
def store() -> Any:
    return distributed.HashStore()


def come(store: Any, rank: int, mark: ProcessMark) -> None:
    store.set(f"come/{rank}", json.dumps(astuple(mark)))


@pytest.mark.linux_only(reason="the end of a process is seen in /proc")
def test_a_process_that_came_and_ended_is_known_at_once(store: Any) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    come(store, 1, replace(ProcessMark.of_this_process(), number=ended.pid))
    with pytest.raises(RunError, match="rank 1 ended before the others came"):
        _meet_first(store, 0, 3, 60)


@pytest.mark.linux_only(reason="the start of a process is seen in /proc")
def test_a_number_that_another_process_has_by_now() -> None:
    assert replace(ProcessMark.of_this_process(), start="1").is_gone


def test_what_runs_elsewhere_cannot_be_told(store: Any) -> None:
    elsewhere = replace(ProcessMark.of_this_process(), place="another host", start="1")
    assert not elsewhere.is_gone
    come(store, 1, elsewhere)
    assert _meet_first(store, 0, 2, 60) == {1: elsewhere}


def test_who_waits_long_says_for_whom(
    store: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "NOTICE_S", 0.05)
    come(store, 1, ProcessMark.of_this_process())
    with pytest.raises(RunError, match="ranks 0,3 of 4 did not come"):
        _meet_first(store, 2, 4, 0.3)
    assert capsys.readouterr().err == ("reshard: waiting for ranks 0,3 of 4, which have not come\n")
