"""The output of every command, compared with files that were checked by eye.

`RESHARD_UPDATE_GOLDEN=1 pytest tests/cli` writes the files anew; look at every change. Times and
rates are replaced, and so are what is resident, and the figures of files, whose headers may change.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cli.command_runs import mask_measurements, run_here, write_model
from reshard.text import display_width
from selection import keep_where

GOLDEN = Path(__file__).parent.parent / "golden" / "cli"
RULES = ("--rule", "*.weight=tp, -", "--rule", "lost=tp")
TP4 = ("--to", "tp=4,dp=2", *RULES, "--allow", "unmatched")

CASES: dict[str, tuple[str, ...]] = {
    "example": ("example", "tiny"),
    "inspect": ("inspect", "model"),
    "inspect_sharded": ("inspect", "sharded"),
    "inspect_chosen_json": ("inspect", "sharded", "--tensor", "mlp.*", "--json"),
    "inspect_picture": ("inspect", "sharded", "--tensor", "norm", "--picture", "embed.weight"),
    "inspect_digest": ("inspect", "sharded", "--digest"),
    "inspect_digest_of_none": ("inspect", "model", "--digest"),
    "plan": ("plan", "model", *TP4),
    "plan_json": ("plan", "model", *TP4, "--json"),
    "plan_picture": ("plan", "sharded", "--to", "full", "--picture", "embed.weight"),
    "plan_ranks": ("plan", "sharded", "--to", "3"),
    "plan_without_rules": ("plan", "model", "--to", "tp=2", "--recipe", "none"),
    "plan_many_unmatched": (
        *("plan", "deep", "--to", "tp=2", "--rule", "layer.0=tp", "--allow", "unmatched"),
    ),
    "plan_thousand_ranks": (
        *("plan", "wide", "--to", "dp=8,pp=8,tp=16", "--rule", "*.weight=dp pp tp, -"),
        *("--rule", "norm=tp", "--allow", "unmatched"),
    ),
    "plan_thousand_sources": ("plan", "many", "--to", "tp=48", "--rule", "*=tp, ..."),
    "plan_long_names": (
        *("plan", "named", "--to", "tp=2", "--rule", "*.layers.0.*=tp", "--allow", "unmatched"),
    ),
    "convert": ("convert", "model", "new", *TP4),
    "convert_json": ("convert", "model", "new", *TP4, "--json"),
    "convert_full": ("convert", "sharded", "new", "--to", "full", "--max-file", "1kB"),
    "explain": ("explain", "x, y", "y, x", "--mesh", "x=2,y=3", "--shape", "6x6"),
    "explain_json": ("explain", "tp", "tp@cyclic2", "--mesh", "tp=2", "--shape", "6", "--json"),
    "explain_contents": (
        *("explain", "[[0, 1]]", "P('y')", "--mesh", "x=2,y=3", "--shape", "6"),
        *("--dtype", "bfloat16", "--contents"),
    ),
    "explain_many_boxes": (
        *("explain", "tp@cyclic1, -", "tp, -", "--mesh", "tp=3", "--shape", "60x4"),
        *("--to-ranks", "3-5"),
    ),
    "explain_many_ranks": (
        *("explain", "dp tp, -", "-, dp tp", "--mesh", "dp=16,tp=16"),
        *("--shape", "30522x384", "--dtype", "float32"),
    ),
    "explain_thousand_ranks": (
        *("explain", "dp pp tp, -", "pp, dp tp", "--mesh", "dp=8,pp=8,tp=16"),
        *("--shape", "32768x8192", "--dtype", "bfloat16"),
    ),
    "explain_thousand_uneven": (
        *("explain", "a@cyclic3, b@cyclic5, -", "-, b, a", "--mesh", "a=32,b=32"),
        *("--shape", "3052x4099x7"),
    ),
    "explain_long_axes": (
        *("explain", "data_parallel_replicate tensor_parallel, -", "-, tensor_parallel"),
        *("--mesh", "data_parallel_replicate=4,tensor_parallel=256", "--shape", "4096x4096"),
    ),
    "explain_three_dimensions": (
        *("explain", "a, b, c", "c, b, a", "--mesh", "a=4,b=4,c=4", "--shape", "64x64x64"),
    ),
    "explain_hidden_parts": (
        *("explain", "a, b, c, -", "-, c, b, a", "--mesh", "a=8,b=8,c=16"),
        *("--shape", "64x64x64x16"),
    ),
    "explain_sum_of_many": (
        *("explain", "-, - | sum(x y)", "x y, -", "--mesh", "x=16,y=16", "--shape", "30522x384"),
    ),
    "explain_topology": (
        *("explain", "x y, -", "-, x", "--mesh", "x=4,y=4", "--shape", "4096x4096"),
        *("--dtype", "bfloat16", "--topology", "h100-8"),
    ),
    "explain_nothing": ("explain", "-, x", "-, x", "--mesh", "x=2", "--shape", "4x4"),
    "verify_same": ("verify", "model", "sharded"),
    "verify_same_json": ("verify", "model", "sharded", "--json"),
    "verify_differs": ("verify", "model", "other"),
    "verify_differs_json": ("verify", "model", "other", "--json"),
}
DIFFERENT = {"verify_differs", "verify_differs_json"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, the same cut for eight ranks, a model that differs, and models of many names."""
    folder = tmp_path_factory.mktemp("made")
    write_model(folder / "model")
    with contextlib.chdir(folder):
        make_checkpoints(folder)
    return folder


@pytest.fixture
def checkpoints(folder: Path, made: Path) -> None:
    """Copies of them in the folder of the test."""
    shutil.copytree(made, folder, dirs_exist_ok=True)


def make_checkpoints(folder: Path) -> None:
    """Write them from `model`, into the folder that is the current one."""
    rules = ("--rule", "*.weight=tp, -", "--rule", "*=...")
    assert run_here("convert", "model", "sharded", "--to", "tp=4,dp=2", *rules, "-q").code == 0
    other = load_file("model/model.safetensors")
    other["embed.weight"][7, 3] += 1
    other["embed.weight"][29, 7] += 1
    other["mlp.up.weight"] = other["mlp.up.weight"].reshape(8, 16)
    other["norm"] = other["norm"].astype(np.float16)
    other["extra"] = other.pop("step")
    (folder / "other").mkdir()
    save_file(other, folder / "other" / "model.safetensors")
    wide = {"a.weight": np.zeros((2048, 2), np.int8), "b.weight": np.zeros((1000, 3), np.int8)}
    write_model(folder / "wide", **wide, norm=np.zeros(16, np.int8), lost=np.zeros(4, np.int8))
    cut = ("--to", "tp=96", "--rule", "*=tp, ...")
    assert run_here("convert", "wide", "many", *cut, "-q").code == 0
    block = "model.language_model.decoder.layers.{}.mixture_of_experts_block.local_experts.{}."
    name = block + "feed_forward_network.gate_proj.weight"
    write_model(
        folder / "named", **{name.format(i, 10 * i): np.zeros(2, np.int8) for i in range(20)}
    )
    write_model(folder / "deep", **{f"layer.{i}": np.zeros(2, np.int8) for i in range(50)})


@pytest.mark.usefixtures("checkpoints")
@pytest.mark.parametrize(
    "name",
    keep_where(lambda name: name != "explain_thousand_uneven", CASES, "many seconds of planning"),
)
def test_output_is_as_checked_by_eye(name: str) -> None:
    run = run_here(*CASES[name])
    assert run.errors == ""
    assert run.code == (1 if name in DIFFERENT else 0)
    found = mask_measurements(run.output)
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("RESHARD_UPDATE_GOLDEN") == "1":
        golden.write_text(found, encoding="utf-8")
    assert found == golden.read_text(encoding="utf-8")


def test_every_golden_file_belongs_to_a_case() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == CASES.keys()


@pytest.mark.parametrize(
    "name", [name for name in CASES if CASES[name][0] in ("plan", "explain") if "json" not in name]
)
def test_a_change_of_many_ranks_fits_on_a_screen(name: str) -> None:
    lines = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 52
    assert max(map(display_width, lines)) <= 112


@pytest.mark.usefixtures("checkpoints")
@pytest.mark.parametrize("name", ["inspect", "plan", "convert", "verify", "explain"])
def test_json_has_the_keys_that_help_lists(name: str) -> None:
    arguments = {
        "inspect": ("sharded", "--digest"),
        "plan": ("model", *TP4),
        "convert": ("model", "new", *TP4),
        "verify": ("model", "sharded"),
        "explain": ("x", "-", "--mesh", "x=2", "--shape", "4"),
    }[name]
    content = run_here(name, *arguments, "--json").json
    help_text = run_here(name, "--help").output
    documented = help_text.partition("Keys of --json:")[2].partition("\n\n")[0]
    documented = re.sub(r"\([^)]*\)", "", documented)
    outer = documented
    while outer != (outer := re.sub(r"\{[^{}]*\}|\[[^\[\]]*\]", "", outer)):
        pass
    assert set(re.findall(r"\w+", outer)) == content.keys()
    for key, inner in re.findall(r"(\w+) \[\{([^\[\]]*?)\}\]", documented):
        holders = [content, *(v for v in content.values() if isinstance(v, dict))]
        items = next(holder[key] for holder in holders if key in holder)
        for item in items:
            assert item.keys() == set(re.findall(r"\w+", inner))


def test_a_broken_file_changes_digest_and_place(folder: Path) -> None:
    assert run_here("convert", "model", "sharded", *TP4, "--replicas", "once").code == 0
    shard = next(folder.glob("sharded/shard-00002*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    run = run_here("inspect", "sharded", "--digest")
    assert run.code == 1
    assert "1 block damaged" in run.output
    damaged = run_here("inspect", "sharded", "--digest", "--json")
    assert damaged.code == 1
    (block,) = damaged.json["digest_check"]["damaged"]
    assert block["expected"] != block["found"]
    assert any(shard.name in place for place in block["places"])
    assert block["tensor"] in run.output and shard.name in run.output
    assert run_here("inspect", "sharded", "--digest", "--quiet").code == 1
    others = [name for name in load_file("model/model.safetensors") if name != block["tensor"]]
    for name in others:
        assert run_here("inspect", "sharded", "--digest", "--tensor", name).code == 0


def test_json_is_one_object_of_plain_ascii(folder: Path) -> None:
    write_model(folder / "層", **{"wte\x1b[2J": np.zeros(3, np.int8)})
    run = run_here("inspect", "層", "--json")
    assert run.output.isascii()
    assert json.loads(run.output)["tensors"][0]["name"] == "wte\x1b[2J"


def test_names_cannot_write_to_a_terminal(folder: Path) -> None:
    write_model(folder / "evil", **{"wte\x1b[2J\n": np.zeros(3, np.int8)})
    for arguments in (
        ("inspect", "evil", "--picture", "wte\x1b[2J\n"),
        ("plan", "evil", "--to", "2"),
        ("convert", "evil", "new", "--to", "tp=2", "--rule", "w*=-"),
        ("verify", "evil", "model"),
        ("inspect", "evil", "--tensor", "\x1b[1m"),
    ):
        run = run_here(*arguments)
        assert "\x1b" not in run.output + run.errors
        assert run.code in (0, 1, 2)


def test_quiet_prints_nothing() -> None:
    for arguments, code in (
        (("convert", "model", "new", "--to", "3", "--quiet"), 0),
        (("verify", "model", "new", "--quiet"), 0),
        (("inspect", "model", "--quiet"), 0),
    ):
        run = run_here(*arguments)
        assert (run.code, run.output, run.errors) == (code, "", "")


def test_same_command_again_after_all_was_done(folder: Path) -> None:
    first = run_here("convert", "model", "new", "--to", "3")
    again = run_here("convert", "model", "new", "--to", "3", "--overwrite")
    assert (first.code, again.code) == (0, 0)
    assert run_here("verify", "model", "new").code == 0
