"""`reshard convert --for vllm`, by a recorded layout: no engine is needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoint.checkpoint_files import build_header, read_file
from cli.command_runs import Run, run_here
from reshard import checkpoint
from reshard.binding import View
from reshard.checkpoint.conversion import staging
from reshard.checkpoint.options import ConversionRequest
from reshard.errors import UsageError
from reshard.layout import Box
from reshard.mesh import DeviceMesh
from reshard.plans.serialization import from_json, to_json
from reshard.recipes.engine_layouts import EngineLayout, ParameterLayout, RankLayout, SourcePiece
from reshard.recipes.engine_layouts.engines import Engine

GOLDEN = Path(__file__).parents[2] / "golden" / "engines" / "vllm"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of random bytes, and beside it the layout of vLLM's two ranks."""
    document = json.dumps(json.loads((GOLDEN / "qwen2.json").read_text())["layouts"]["tp=2"])
    layout = from_json(document)
    folder = tmp_path / "qwen2"
    folder.mkdir()
    header, _ = build_header([(n, s.dtype, s.shape) for n, s in layout.sources.items()])
    size = sum(int(np.prod(s.shape)) * s.dtype.itemsize_bytes for s in layout.sources.values())
    content = np.random.default_rng(0).bytes(size)
    (folder / "model.safetensors").write_bytes(header + content)
    (folder / "tokenizer.json").write_text("{}")
    (tmp_path / "layout.json").write_text(document)
    return folder


def test_files_for_the_ranks_of_an_engine(model: Path, tmp_path: Path) -> None:
    layout, target = str(tmp_path / "layout.json"), tmp_path / "out"
    arguments = ("convert", str(model), str(target), "--for", "vllm", "--layout", layout)
    done = run_here(*arguments, "--json")
    assert done.code == 0
    assert done.json["to"] == "tp=2"
    assert done.json["format"] == "vllm-sharded-state"
    assert {path.name for path in target.iterdir()} >= {
        "model-rank-0-part-0.safetensors",
        "model-rank-1-part-0.safetensors",
        "tokenizer.json",
    }
    shown = run_here("inspect", str(target))
    assert shown.code == 0
    assert "vllm-sharded-state" in shown.output
    assert run_here(*arguments).code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--to tp=8"),
        (("--to", "tp=2", "--layout", "layout.json"), "give one of them"),
        (("--to", "tp=2", "--recipe", "qwen2"), "--for vllm with --recipe"),
        (("--to", "tp=2", "--rule", "*=..."), "--for vllm with --rule"),
        (("--to", "tp=2", "--replicas", "every"), "--for vllm with --replica"),
        (("--to", "fsdp=2"), "the axis 'fsdp' of a layout of vllm"),
        (("--to", "tp=2,ep=3"), "vLLM deals experts to all ranks"),
    ],
)
def test_mistakes_are_answered(model: Path, options: tuple[str, ...], message: str) -> None:
    (model / "config.json").write_text("{}")
    found = run_here("convert", str(model), str(model.parent / "out"), "--for", "vllm", *options)
    assert found.code == 2
    assert message in found.errors


def derive_toy(
    model: str, tp: int = 1, dtype: str = "auto", sources: Mapping[str, object] | None = None
) -> EngineLayout:
    """A layout as vLLM chooses it for a float32 model: in bfloat16, but for one table."""
    low = "bfloat16" if dtype == "auto" else dtype
    steps = () if low == "float32" else (f"to {low}",)
    piece = SourcePiece(Box((0, 0), (4, 8)), "up", View(0, (8, 1)), steps)
    table = SourcePiece(Box((0,), (3,)), "table", View(0, (1,)))
    parameters = {
        "up": ParameterLayout.of("up", (4, 8), low, [piece]),
        "table": ParameterLayout.of("table", (3,), "float32", [table]),
    }
    own = {"up": ("float32", (4, 8)), "table": ("float32", (3,))}
    assert sources in (None, own)
    return EngineLayout("vllm", "1.0", DeviceMesh.of(tp=1), own, (RankLayout(0, parameters),))


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A float32 model, and an engine that takes it in bfloat16."""
    folder = tmp_path / "wide"
    folder.mkdir()
    up = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    save_file({"up": up, "table": np.ones(3, np.float32)}, folder / "model.safetensors")
    config = {"model_type": "toy", "torch_dtype": "float32", "text_config": {"dtype": "float32"}}
    (folder / "config.json").write_text(json.dumps(config))
    engines = {"vllm": Engine("vllm", "a toy", derive_toy)}
    monkeypatch.setattr("reshard.recipes.engine_layouts.engines.ENGINES", engines)
    return folder


def test_a_target_and_its_format_are_known_of_each_other(wide: Path, tmp_path: Path) -> None:
    """The format alone, for ranks, is the target; the target takes its own format, and no other."""

    def convert(name: str, *options: str) -> Run:
        return run_here("convert", str(wide), str(tmp_path / name), *options)

    form = ("--format", "vllm-sharded-state")
    for name, options in (
        ("a", (*form, "--to", "tp=1")),
        ("b", (*form, "--to", "tp=1", "--for", "vllm")),
        ("c", ("--to", "tp=1", "--for", "vllm")),
    ):
        assert convert(name, *options).code == 0
    files = ["model-rank-0-part-0.safetensors", "config.json", "reshard.engine-layout.json"]
    for file in files:
        assert len({(tmp_path / name / file).read_bytes() for name in "abc"}) == 1
    for options, message in (
        (form, "--for vllm --to tp="),
        ((*form, "--to", "full"), "--for vllm --to tp="),
        ((*form, "--to", "tp=1", "--recipe", "llama"), "--for vllm with --recipe"),
        (("--for", "vllm", "--format", "torch-dcp", "--to", "tp=1"), "--for vllm with --format"),
        (("--for", "hf", "--format", "torch-dcp"), "--for hf with --format"),
        (("--for", "hf", "--to", "tp=2"), "or --for hf for files of ranks"),
    ):
        found = convert("new", *options)
        assert found.code == 2
        assert message in found.errors
    with pytest.raises(UsageError, match="use --for vllm"):
        ConversionRequest(to="tp=2", format="vllm-sharded-state")


@pytest.mark.parametrize("given", [None, "bf16", "fp16"])
def test_casts_of_the_engine_are_noted_and_in_the_config(
    wide: Path, tmp_path: Path, given: str | None
) -> None:
    command = ("convert", str(wide), str(tmp_path / "out"), "--for", "vllm", "--to", "tp=1")
    command += () if given is None else ("--dtype", given)
    kind = "float16" if given == "fp16" else "bfloat16"
    note = f"1 tensor (first: up) are rounded from float32 to {kind}, as vLLM's loader does"
    # In the plan as in the result.
    for run in (run_here(*command, "--dry-run", "--json"), run_here(*command, "--json")):
        assert run.code == 0, run.errors
        assert any(note in one for one in run.json["notes"])
    written = read_file(tmp_path / "out" / "model-rank-0-part-0.safetensors")
    assert {name: tensor.dtype.name for name, tensor in written.items()} == {
        "up": kind,
        "table": "float32",
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == kind
    assert config["text_config"]["dtype"] == kind


def test_another_type_keeps_the_elements(wide: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    command = ("convert", str(wide), str(target), "--for", "vllm", "--to", "tp=1")
    done = run_here(*command, "--dtype", "fp32", "--json")
    assert done.code == 0, done.errors
    assert not any("rounded" in note for note in done.json["notes"])
    assert any("start it with --dtype float32" in note for note in done.json["notes"])
    assert (target / "config.json").read_bytes() == (wide / "config.json").read_bytes()
    (tmp_path / "layout.json").write_text(to_json(derive_toy("")))
    layout = ("--layout", str(tmp_path / "layout.json"), "--dtype", "fp32")
    found = run_here("convert", str(wide), str(tmp_path / "b"), "--for", "vllm", *layout)
    assert found.code == 2
    assert "--dtype fp32 with --layout" in found.errors


def test_files_for_vllm_are_checked_against_the_architecture(wide: Path, tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    (wide / "config.json").write_text(json.dumps(config))
    before = sorted(tmp_path.rglob("*"))
    command = ("convert", str(wide), str(tmp_path / "out"), "--for", "vllm", "--to", "tp=1")
    for allowed in ((), ("--allow", "unknown"), ("--allow", "incomplete")):
        found = run_here(*command, *allowed)
        assert found.code == 2
        assert "are not those that the record of LlamaForCausalLM" in found.errors
        assert sorted(tmp_path.rglob("*")) == before
    done = run_here(*command, "--allow", "unknown", "--allow", "incomplete", "--json")
    assert done.code == 0, done.errors
    assert any(note.startswith("allowed as unknown: 2 tensors") for note in done.json["notes"])


@pytest.mark.parametrize("is_derived", [True, False])
def test_one_model_of_two_is_selected(wide: Path, tmp_path: Path, is_derived: bool) -> None:
    up, table = np.ones((4, 8), np.float32), np.ones(3, np.float32)
    both = {"net.up": up, "net.table": table, "net_ema.up": 2 * up, "net_ema.table": table}
    save_file(both, wide / "model.safetensors")
    (tmp_path / "layout.json").write_text(to_json(derive_toy("", dtype="float32")))
    layout = ("--layout", str(tmp_path / "layout.json"))
    command = ("convert", str(wide), str(tmp_path / "out"), "--for", "vllm")
    command += ("--to", "tp=1", "--dtype", "fp32") if is_derived else layout
    found = run_here(*command)
    assert found.code == 2 and "Choose one with --select net or --select net_ema" in found.errors
    done = run_here(*command, "--select", "net_ema")
    assert done.code == 0, done.errors
    written = read_file(tmp_path / "out" / "model-rank-0-part-0.safetensors")
    assert (written["up"].bits.view(np.float32) == 2).all()


def test_a_package_is_looked_for_before_anything_is_made(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    before = sorted(tmp_path.rglob("*"))
    for more in ((), ("--dry-run",)):
        target = str(tmp_path / "out")
        found = run_here("convert", str(wide), target, "--for", "vllm", "--to", "tp=1", *more)
        assert found.code == 2
        assert "ml_dtypes" in found.errors
        assert "reshard[checkpoint]" in found.errors
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_swap_in_two_renames_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    (tmp_path / "model").mkdir(exist_ok=True)
    save_file({"w": np.ones(4, np.float32)}, tmp_path / "model" / "model.safetensors")
    command = ("convert", str(tmp_path / "model"), str(tmp_path / "new"), "--to", "full")
    assert "two renames" not in run_here(*command).output
    monkeypatch.setattr(staging, "exchange_names", _swap if can_exchange else lambda *_: False)
    told = run_here(*command, "--overwrite", "--max-file", "1kB")
    assert told.code == 0, told.errors
    assert ("was replaced by two renames" in told.output) == (not can_exchange)
    assert checkpoint.open(tmp_path / "new").tensors.keys() == {"w"}


def _swap(first: Path, second: Path) -> bool:
    other = first.with_name("other")
    for old, new in ((first, other), (second, first), (other, second)):
        old.rename(new)
    return True


def test_ranks_are_counted_as_by_vllm(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.dumps(json.loads((GOLDEN / "qwen2.json").read_text())["layouts"]["tp=2,pp=2"])

    def derive(folder: str, tp: int = 1, pp: int = 1) -> EngineLayout:
        return from_json(document)

    engines = {"vllm": Engine("vllm", "a recorded one", derive)}
    monkeypatch.setattr("reshard.recipes.engine_layouts.engines.ENGINES", engines)
    order = "note: ranks are counted over pp=2,tp=2, the last axis fastest, not as written"
    for to, is_other in (("tp=2,pp=2", True), ("pp=2,tp=2", False)):
        found = run_here("plan", str(model), "--for", "vllm", "--to", to)
        assert (found.code, order in found.output.splitlines()) == (0, is_other), found
    refused = run_here(
        *("plan", str(model), "--for", "vllm", "--to", "tp=2,pp=2", "--mesh-order", "pp,tp")
    )
    assert refused.code == 2 and "--for vllm with --mesh-order" in refused.errors
    by_file = model.with_name("two.json")
    by_file.write_text(document)
    for to in ("tp=2,pp=2", "pp=2,tp=2"):
        found = run_here("plan", str(model), "--layout", str(by_file), "--to", to)
        assert found.code == 0, found
    assert run_here("plan", str(model), "--layout", str(by_file), "--to", "tp=4").code == 2
