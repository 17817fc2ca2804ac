"""Wrong use and bad input: a clear line, the documented code, nothing written, no traceback."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.command_runs import Run, entries, run_alone, run_here
from reshard import errors
from selection import choose

TP2 = ("--to", "tp=2", "--recipe", "none")
BAD_ARGUMENTS = [
    ("no_such_command",),
    ("--no-such-option",),
    ("inspect",),
    ("inspect", ""),
    ("inspect", "model", "model"),
    ("inspect", "nowhere"),
    ("inspect", "model/config.json"),
    ("inspect", "/dev/null"),
    ("inspect", "model", "--tensor", "no such *"),
    ("inspect", "model", "--picture", "no such tensor"),
    ("inspect", "model", "--threads", "0"),
    ("inspect", "model", "--threads", "many"),
    ("plan", "model", "--rule", "*=..."),
    ("plan", "nowhere", *TP2),
    ("plan", "model", "--to"),
    ("plan", "model", "--to", ""),
    ("plan", "model", "--to", "0"),
    ("plan", "model", "--to", "-1"),
    ("plan", "model", "--to", "whole"),
    ("plan", "model", "--to", "tp"),
    ("plan", "model", "--to", "tp="),
    ("plan", "model", "--to", "tp=0"),
    ("plan", "model", "--to", "tp=2,tp=2"),
    ("plan", "model", "--to", "tp=2.5"),
    ("plan", "model", *TP2, "--rule", ""),
    ("plan", "model", *TP2, "--rule", "norm"),
    ("plan", "model", *TP2, "--rule", "norm="),
    ("plan", "model", *TP2, "--rule", "=tp"),
    ("plan", "model", *TP2, "--rule", "norm=dp"),
    ("plan", "model", *TP2, "--rule", "norm=tp, tp"),
    ("plan", "model", *TP2, "--rule", "norm=tp, -"),
    ("plan", "model", *TP2, "--rule", "norm=tp@no_such_rule"),
    ("plan", "model", *TP2, "--rule", "norm=tp@stride0"),
    ("plan", "model", *TP2, "--rule", "norm={no_such_key}"),
    ("plan", "model", *TP2, "--rule", "norm=- | sum(tp)"),
    ("plan", "model", *TP2, "--recipe", "lama"),
    ("plan", "model", *TP2, "--recipe", "nowhere.toml"),
    ("plan", "model", *TP2, "--recipe", "model/config.json"),
    ("plan", "model", *TP2, "--recipe", "auto"),
    ("plan", "model", *TP2, "--recipe", ""),
    ("plan", "model", *TP2, "--strategy", "no_such_strategy"),
    ("plan", "model", *TP2, "--strategy", "simple", "--rule", "norm=tp"),
    ("plan", "model", *TP2, "--format", "safetensors"),
    ("plan", "model", *TP2, "--format", "no_such_format"),
    ("plan", "model", *TP2, "--replicas", "twice"),
    ("plan", "model", *TP2, "--max-file", "1GB"),
    ("plan", "model", *TP2, "--memory", "1"),
    ("plan", "model", *TP2, "--memory", "0"),
    ("plan", "model", *TP2, "--memory", "-1"),
    ("plan", "model", *TP2, "--memory", "256 apples"),
    ("plan", "model", *TP2, "--memory", "1e9"),
    ("plan", "model", *TP2, "--memory", ""),
    ("plan", "model", *TP2, "--picture", "no such tensor"),
    ("plan", "model", "--to", "full", "--rule", "norm=tp"),
    ("plan", "model", "--to", "full", "--recipe", "llama"),
    ("plan", "model", "--to", "full", "--format", "sharded-safetensors"),
    ("convert", "model"),
    ("convert", "model", "", *TP2),
    ("convert", "model", "model", *TP2),
    ("convert", "model", "model", *TP2, "--overwrite", "--rule", "norm=dp"),
    ("convert", "model", "model/inside", *TP2),
    ("convert", "model", ".", *TP2, "--overwrite"),
    ("convert", "model/model.safetensors", "model", *TP2, "--overwrite"),
    ("convert", "model", "/dev/null", *TP2),
    ("convert", "model", "nowhere/deep", *TP2),
    ("convert", "nowhere", "new", *TP2),
    ("convert", "model", "new", *TP2, "--memory", "4096"),
    ("convert", "model", "new", *TP2, "--overwrite", "yes"),
    ("verify", "model"),
    ("verify", "model", "nowhere"),
    ("verify", "nowhere", "model"),
    ("verify", "model", "model", "--threads", "-3"),
]


def assert_reported(run: Run, code: int) -> None:
    """Check that stderr has a message in the documented form, and nothing else."""
    assert run.code == code
    assert run.errors.startswith("reshard: ")
    assert "Traceback" not in run.errors + run.output
    assert "internal error" not in run.errors
    message = run.errors.removeprefix("reshard: ").splitlines()[0]
    assert len(message) > 10


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS, ids=" ".join)
def test_wrong_use_is_reported_and_nothing_is_written(
    folder: Path, arguments: tuple[str, ...]
) -> None:
    before, inside = entries(folder), entries(folder / "model")
    run = run_here(*arguments)
    assert_reported(run, 2)
    assert run.output == ""
    assert entries(folder) == before
    assert entries(folder / "model") == inside
    as_json = run_here(*arguments, "--json")
    assert as_json.code == 2
    error = as_json.json["error"]
    assert error.keys() == {"kind", "message"}
    assert error["message"] in as_json.errors


def with_header(folder: Path, text: bytes, data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file with any header."""
    size = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + text + data)


def header(**entries: tuple[str, list[int], int, int]) -> bytes:
    return json.dumps(
        {
            name: {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
            for name, (dtype, shape, start, stop) in entries.items()
        }
    ).encode()


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def indexed(file: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"norm": file}})
        )

    return write


BAD_CHECKPOINTS: dict[str, Callable[[Path], None]] = {
    "nothing in it": lambda folder: (folder / "model.safetensors").unlink(),
    "truncated": cut_off,
    "empty file": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "seven bytes": lambda folder: (folder / "model.safetensors").write_bytes(b"1234567"),
    "header past the end": lambda folder: with_header(folder, b"{}", length=1000),
    "header of 2**63": lambda folder: with_header(folder, b"{}", length=2**63),
    "no JSON": lambda folder: with_header(folder, b"{x}"),
    "no UTF-8": lambda folder: with_header(folder, b'{"\xff":1}'),
    "deep JSON": lambda folder: with_header(folder, b"[" * 100_000),
    "a list": lambda folder: with_header(folder, b"[]"),
    "unknown dtype": lambda folder: with_header(folder, header(a=("F12", [1], 0, 1)), b"1"),
    "overlap": lambda folder: with_header(
        folder, header(a=("U8", [2], 0, 2), b=("U8", [2], 1, 3)), b"123"
    ),
    "hole": lambda folder: with_header(
        folder, header(a=("U8", [1], 0, 1), b=("U8", [1], 2, 3)), b"123"
    ),
    "outside": lambda folder: with_header(folder, header(a=("U8", [9], 0, 9)), b"123"),
    "wrong size": lambda folder: with_header(folder, header(a=("U8", [2], 0, 3)), b"123"),
    "negative shape": lambda folder: with_header(folder, header(a=("U8", [-3], 0, 3)), b"123"),
    "a folder for a file": lambda folder: (
        (folder / "model.safetensors").unlink(),
        (folder / "model.safetensors").mkdir(),
    ),
    "index to a missing file": indexed("missing.safetensors"),
    "index to elsewhere": indexed("../model/model.safetensors"),
    "index to the root": indexed("/dev/null"),
    "index that says too little": indexed("model.safetensors"),
    "index that is no JSON": lambda folder: (folder / "model.safetensors.index.json").write_text(
        "x"
    ),
    "manifest that is no JSON": lambda folder: (folder / "reshard.manifest.json").write_text("x"),
    "manifest of another version": lambda folder: (folder / "reshard.manifest.json").write_text(
        '{"format_version": 99}'
    ),
    "config that is no JSON": lambda folder: (folder / "config.json").write_text("{"),
}


@pytest.mark.parametrize("problem", BAD_CHECKPOINTS)
def test_a_bad_checkpoint_is_reported_and_nothing_is_written(folder: Path, problem: str) -> None:
    BAD_CHECKPOINTS[problem](folder / "model")
    before = entries(folder)
    runs = [run_here("convert", "model", "new", *TP2), run_here("plan", "model", *TP2)]
    # These read no config, and list a tensor of an unknown element type with the reason.
    if "config" not in problem and problem != "unknown dtype":
        runs += [run_here("inspect", "model", "--digest"), run_here("verify", "model", "model")]
    for run in runs:
        assert_reported(run, 2)
        assert "model" in run.errors
    assert entries(folder) == before


def test_a_tensor_of_an_unknown_dtype_is_listed(folder: Path) -> None:
    BAD_CHECKPOINTS["unknown dtype"](folder / "model")
    inspected = run_here("inspect", "model", "--digest")
    assert inspected.code == 0 and "dtype 'F12'" in " ".join(inspected.output.split())
    verified = run_here("verify", "model", "model")
    assert verified.code == 1 and "a of model cannot be read" in verified.output


def test_an_existing_target_is_kept(folder: Path) -> None:
    (folder / "new").mkdir()
    (folder / "new" / "precious").write_text("data")
    run = run_here("convert", "model", "new", *TP2)
    assert_reported(run, 2)
    assert "--overwrite" in run.errors
    assert entries(folder / "new") == {"precious"}


def leaves(error: type[errors.ReshardError]) -> list[type[errors.ReshardError]]:
    return [error, *(leaf for child in error.__subclasses__() for leaf in leaves(child))]


@pytest.mark.parametrize("error", leaves(errors.ReshardError), ids=lambda error: error.__name__)
def test_every_error_has_its_code(
    error: type[errors.ReshardError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("a tensor is not\nas expected")

    monkeypatch.setattr("reshard.checkpoint.comparison.compare", fail)
    run = run_here("verify", "a", "b", "--json")
    assert run.code == (3 if issubclass(error, errors.RunError) else 2)
    assert run.errors == "reshard: a tensor is not\nas expected\n"
    assert run.json == {
        "error": {"kind": error.__name__, "message": "a tensor is not\nas expected"}
    }


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device", "/full/disk"), "/full/disk: No space left"),
        (PermissionError(13, "Permission denied", b"/secret"), "/secret: Permission denied"),
        (OSError("strange"), "strange"),
        (MemoryError(), "out of memory"),
        (KeyboardInterrupt(), "interrupted"),
        (RuntimeError("a bug"), "internal error: RuntimeError: a bug; please report it"),
        (AssertionError(), "internal error: AssertionError"),
        (RecursionError("deep"), "internal error: RecursionError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_while_running_exits_with_3(
    error: BaseException, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("reshard.checkpoint.comparison.compare", fail)
    run = run_here("verify", "a", "b")
    assert run.code == 3
    assert run.errors.startswith(f"reshard: {message}")
    assert "Traceback" not in run.errors
    monkeypatch.setenv("RESHARD_DEBUG", "1")
    traced = run_here("verify", "a", "b")
    assert traced.code == 3
    assert "Traceback" in traced.errors
    assert f"reshard: {message}" in traced.errors


def test_another_conversion_staged_for_the_target_exits_with_3(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise errors.RunError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("reshard.checkpoint.conversion.run._ConversionRun.finish", fail)
        assert_reported(run_here("convert", "model", "new", *TP2), 3)
    other = run_here("convert", "model", "new", "--to", "3")
    assert_reported(other, 3)
    assert "--restart" in other.errors
    assert not (folder / "new").exists()
    assert run_here("convert", "model", "new", "--to", "3", "--restart").code == 0
    assert run_here("verify", "model", "new").code == 0


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (("convrt", "a", "b"), "convert"),
        (("verfy", "a", "b"), "verify"),
        (("Inspect", "a"), "inspect"),
        (("convert", "model", "new", "--too", "3"), "--to"),
        (("convert", "model", "new", *TP2, "--over-write"), "--overwrite"),
        (("inspect", "model", "--digets"), "--digest"),
        (("plan", "model", *TP2, "--recipe", "lama"), "llama"),
        (("plan", "model", *TP2, "--strategy", "simpel"), "simple"),
    ],
)
def test_the_error_for_a_misspelt_word_suggests_a_similar_word(
    arguments: tuple[str, ...], near: str
) -> None:
    run = run_here(*arguments)
    assert_reported(run, 2)
    # click 8.1 lists several near matches in other words.
    assert near in re.split("did you mean|possible options:", run.errors.lower(), maxsplit=1)[1]


def test_a_wrong_option_points_to_help() -> None:
    assert "Try 'reshard convert --help'." in run_here("convert", "--x").errors
    assert "Try 'reshard --help'." in run_here("--x").errors


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_a_missing_package_is_one_line(folder: Path, missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\n"
    code += "from reshard.cli import main; sys.exit(main())"
    run = run_alone("inspect", "model", cwd=folder, code=code)
    assert run.code == 2
    assert run.output == ""
    assert run.errors == (f"reshard: the command needs {missing}: pip install 'reshard[cli]'\n")


@pytest.mark.parametrize(
    ("missing", "options"), [("xxhash", ()), ("zlib_ng", ("--format", "torch-dcp"))]
)
def test_a_missing_hash_library_is_reported_before_anything_is_written(
    folder: Path, missing: str, options: tuple[str, ...]
) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\n"
    code += "from reshard.cli import main; sys.exit(main())"
    run = run_alone("convert", "model", "new", *TP2, *options, cwd=folder, code=code)
    assert_reported(run, 2)
    assert "pip install" in run.errors
    assert entries(folder) == {"model"}


def test_importing_the_command_needs_neither_click_nor_rich(folder: Path) -> None:
    code = "import sys, reshard.cli; sys.exit('click' in sys.modules or 'rich' in sys.modules)"
    assert run_alone(cwd=folder, code=code).code == 0


NOTATION = st.text(alphabet="tpdx=,- /?!@()[]{}:0123456789.*|sum\x00\n层", max_size=24)
WORDS = st.sampled_from(
    ["tp", "dp", "-", "...", "tp@stride2", "tp@blocks[2,2]", "x:(2)2", "=", ",", " ", "@", "[", "]"]
)
TEXTS = NOTATION | st.lists(WORDS, max_size=8).map("".join)


# Text that asks for more ranks than memory has room for is not what is tried here.
TARGETS = TEXTS.filter(lambda text: re.search(r"\d{5}", text) is None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=choose(60, 200))
@given(to=TARGETS, rule=TEXTS, memory=TEXTS)
def test_no_text_of_an_option_leads_to_an_internal_error(to: str, rule: str, memory: str) -> None:
    for arguments in (("--to", to), (*TP2, f"--rule=*={rule}"), (*TP2, "--memory", memory)):
        run = run_here("plan", "model", *arguments)
        assert run.code in (0, 2), run.errors
        assert (run.code == 0) == (run.errors == "")


@pytest.mark.parametrize("command", [("inspect", "model"), ("plan", "model", *TP2)])
def test_a_picture_is_not_drawn_in_json(command: tuple[str, ...]) -> None:
    run = run_here(*command, "--picture", "norm", "--json")
    assert_reported(run, 2)
    assert run.json["error"]["kind"] == "UsageError"
