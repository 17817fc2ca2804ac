"""From what vLLM's ranks hold back to the model: by recorded layouts, element by element."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import reshard
from checkpoint.engines.test_conversion import recorded, write_checkpoint
from cli.command_runs import run_here
from reshard import DeviceMesh, checkpoint
from reshard.binding import View
from reshard.checkpoint.conversion.engine_states import LAYOUT_NAME, as_model
from reshard.checkpoint.conversion.run import run_conversion
from reshard.checkpoint.engines.conversion import plan_for_vllm
from reshard.errors import RecipeError, UsageError
from reshard.layout import Box
from reshard.plans.serialization import to_json
from reshard.recipes.engine_layouts import EngineLayout, ParameterLayout, RankLayout, SourcePiece

# Families whose parameters are copies of the model's tensors.
COPIED = [("llama-8", "tp=2"), ("qwen3-moe", "tp=2"), ("gpt-oss", "tp=2")]


def write_state(tmp_path: Path, family: str, text: str) -> tuple[Path, dict[str, Any]]:
    """What vLLM's ranks hold of a model of random values, and these."""
    layout = recorded(family, text)
    arrays = write_checkpoint(tmp_path / "model", layout)
    run_conversion(plan_for_vllm(tmp_path / "model", tmp_path / "state", layout))
    return tmp_path / "state", arrays


def expect_same(folder: Path, arrays: dict[str, Any]) -> None:
    found = checkpoint.open(folder)
    assert {*found} <= {*arrays}
    for name in found:
        assert np.array_equal(checkpoint.read_tensor(found, name), arrays[name]), name


@pytest.mark.parametrize(("family", "text"), COPIED)
def test_back_to_whole_tensors(tmp_path: Path, family: str, text: str) -> None:
    state, arrays = write_state(tmp_path, family, text)
    report = checkpoint.convert(state, tmp_path / "whole", to="full")
    expect_same(tmp_path / "whole", arrays)
    absent = {*arrays} - {*checkpoint.open(tmp_path / "whole")}
    assert bool(absent) == any("are on no rank" in note for note in report.notes)
    assert absent <= {*recorded(family, text).unread}
    assert not (tmp_path / "whole" / LAYOUT_NAME).exists()


@pytest.mark.parametrize(("family", "text"), COPIED)
def test_an_engine_state_is_converted_to_another_sharding(
    tmp_path: Path, family: str, text: str
) -> None:
    state, arrays = write_state(tmp_path, family, text)
    checkpoint.convert(state, tmp_path / "tp", to="tp=3", rules=["*=tp, ..."])
    expect_same(tmp_path / "tp", arrays)


def test_load_takes_the_model_as_a_conversion_does(tmp_path: Path) -> None:
    state, arrays = write_state(tmp_path, "llama-8", "tp=2")
    checkpoint.convert(state, tmp_path / "tp", to="tp=3", rules=["*=tp, ..."])
    cut = checkpoint.open(tmp_path / "tp")
    for rank in range(3):
        found = checkpoint.load(state, to="tp=3", rules=["*=tp, ..."], rank=rank)
        assert {*found} == {*cut} <= {*arrays}
        for name, array in found.items():
            box = cut[name].layout.boxes(rank)[0]
            inside = tuple(map(slice, box.start, box.stop))
            assert np.array_equal(array, arrays[name][inside]), name


def test_by_a_layout_that_is_given(tmp_path: Path) -> None:
    state, arrays = write_state(tmp_path, "llama-8", "tp=2")
    (state / LAYOUT_NAME).rename(tmp_path / "layout.json")
    (state / "reshard.manifest.json").unlink()
    # Without a layout the tensors are those of the ranks.
    checkpoint.convert(state, tmp_path / "ranks", to="full")
    assert all(name.startswith("rank-") for name in checkpoint.open(tmp_path / "ranks"))
    given = tmp_path / "layout.json"
    checkpoint.convert(state, tmp_path / "whole", to="full", source_layout=given)
    expect_same(tmp_path / "whole", arrays)


def test_back_to_a_model_folder(tmp_path: Path) -> None:
    """`--for hf` takes the ranks' state apart too, by the layout beside it or a given one."""
    state, arrays = write_state(tmp_path, "llama-8", "tp=2")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "other", "tie_word_embeddings": False}))
    run_conversion(checkpoint.plan_for_pretrained(state, tmp_path / "hf", config=config))
    expect_same(tmp_path / "hf", arrays)
    assert (tmp_path / "hf" / "config.json").exists()
    assert checkpoint.compare_pretrained(state, tmp_path / "hf", config=config).is_same
    (state / LAYOUT_NAME).rename(tmp_path / "layout.json")
    (state / "reshard.manifest.json").unlink()
    layout = tmp_path / "layout.json"
    planned = checkpoint.plan_for_pretrained(
        state, tmp_path / "again", config=config, source_layout=layout
    )
    # A run does not continue one that read another layout.
    assert planned.resolved["source_layout"]
    given = ("--source-layout", layout)
    whole = tmp_path / "hf"
    assert run_here("verify", state, whole, "--for", "hf", "--config", config, *given).code == 0
    assert run_here("verify", state, whole, *given).code == 0
    assert run_here("verify", state, whole).code == 1


def test_the_same_format_keeps_the_ranks(tmp_path: Path) -> None:
    state, _ = write_state(tmp_path, "llama-8", "tp=2")
    checkpoint.convert(state, tmp_path / "again", to="full", format="vllm-sharded-state")
    assert {*checkpoint.open(tmp_path / "again")} == {*checkpoint.open(state)}


@pytest.mark.parametrize("family", ["mamba2", "granite-hybrid"])
def test_computed_parameters_are_refused(tmp_path: Path, family: str) -> None:
    state, _ = write_state(tmp_path, family, "tp=2")
    with pytest.raises(RecipeError, match=r"is made of it by to float32, exp, neg"):
        checkpoint.convert(state, tmp_path / "whole", to="full")
    assert not (tmp_path / "whole").exists()


def test_the_layout_of_another_model_or_other_ranks_is_refused(tmp_path: Path) -> None:
    state, _ = write_state(tmp_path, "llama-8", "tp=2")
    other = tmp_path / "other.json"
    other.write_text(to_json(recorded("qwen3-moe", "tp=2")))
    with pytest.raises(RecipeError, match="or the layout is of another model"):
        checkpoint.convert(state, tmp_path / "t", to="full", source_layout=other)
    layout = recorded("llama-8", "tp=2")
    found = checkpoint.open(state)
    ranks = {n: tensor for n, tensor in found.tensors.items() if n.startswith("rank-0")}
    with pytest.raises(RecipeError, match="has the files of rank-0"):
        as_model(dataclasses.replace(found, tensors=ranks), layout)
    with pytest.raises(RecipeError, match="format safetensors"):
        as_model(checkpoint.open(tmp_path / "model"), layout)


def test_weights_that_were_repacked(tmp_path: Path) -> None:
    state, _ = write_state(tmp_path, "llama-8", "tp=2")
    layout = recorded("llama-8", "tp=2")
    found = checkpoint.open(state)
    name = next(one for one in found if "qkv_proj.weight" in one)
    other = next(one for one in found.tensors.values() if one.shape != found[name].shape)
    changed = {**found.tensors, name: dataclasses.replace(other, name=name)}
    with pytest.raises(RecipeError, match="changed after loading"):
        as_model(dataclasses.replace(found, tensors=changed), layout)


@pytest.mark.parametrize("content", ["", "{}", "[", "null"])
def test_a_layout_that_is_damaged(tmp_path: Path, content: str) -> None:
    state, _ = write_state(tmp_path, "llama-8", "tp=2")
    damaged = shutil.copytree(state, tmp_path / "damaged")
    (damaged / LAYOUT_NAME).write_text(content)
    with pytest.raises(RecipeError):
        checkpoint.convert(damaged, tmp_path / "t", to="full")


QUERIES, HIDDEN = 8, 4
TENSORS = {
    "q": np.arange(QUERIES * HIDDEN, dtype=np.float32).reshape(QUERIES, HIDDEN),
    "k": np.arange(2 * HIDDEN, dtype=np.float32).reshape(2, HIDDEN),
    "norm": np.arange(3, dtype=np.float32),
}


def engine(ranks: int = 4) -> EngineLayout:
    """Queries over all ranks, each of two key heads on half of them; the norm is not read."""
    rows = QUERIES // ranks

    def rank(number: int) -> RankLayout:
        head = number * 2 // ranks
        pieces = [
            SourcePiece(
                Box((0, 0), (rows, HIDDEN)), "q", View(rows * HIDDEN * number, (HIDDEN, 1))
            ),
            SourcePiece(Box((rows, 0), (rows + 1, HIDDEN)), "k", View(HIDDEN * head, (HIDDEN, 1))),
        ]
        one = ParameterLayout.of("qk", (rows + 1, HIDDEN), "float32", pieces)
        return RankLayout(number, {"qk": one}, ("norm",))

    sources = {name: (str(array.dtype), array.shape) for name, array in TENSORS.items()}
    return EngineLayout("toy", "1", DeviceMesh.of(tp=ranks), sources, [*map(rank, range(ranks))])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def test_ranks_hold_what_the_engine_reads(model: Path, tmp_path: Path) -> None:
    report = checkpoint.convert(model, tmp_path / "cut", layout=engine(), replicas="every")
    assert report.tensors == 3
    cut = checkpoint.open(tmp_path / "cut")
    assert cut.mesh is DeviceMesh.of(tp=4)
    assert [cut["q"].layout.boxes(rank)[0].start[0] for rank in range(4)] == [0, 2, 4, 6]
    assert [cut["k"].layout.boxes(rank)[0].start[0] for rank in range(4)] == [0, 0, 1, 1]
    assert cut["norm"].layout.holders == (0,)
    assert checkpoint.compare(model, tmp_path / "cut").is_same


def test_a_layout_file_does_the_same(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    path.write_text(reshard.to_json(engine()))
    planned = checkpoint.plan_conversion(model, tmp_path / "cut", layout=path, to="tp=4")
    assert any("not wholly, read by toy" in note for note in planned.notes)
    other = checkpoint.plan_conversion(model, tmp_path / "cut", layout=engine(2))
    assert other.resolved["layout"] != planned.resolved["layout"]


def test_a_part_that_no_rank_reads_is_kept(model: Path, tmp_path: Path) -> None:
    """A vocabulary of which an engine leaves out the end."""
    layout = engine(2)
    piece = SourcePiece(Box((0,), (2,)), "norm", View(0, (1,)))
    short = ParameterLayout.of("norm", (2,), "float32", [piece])
    ranks = [
        dataclasses.replace(layout.ranks[0], parameters={**layout.ranks[0].parameters}),
        *(
            dataclasses.replace(one, parameters={**one.parameters, "norm": short}, unread=())
            for one in layout.ranks[1:]
        ),
    ]
    layout = dataclasses.replace(layout, ranks=ranks)
    checkpoint.convert(model, tmp_path / "cut", layout=layout)
    cut = checkpoint.open(tmp_path / "cut")
    assert cut["norm"].layout.holders == (0, 1)
    assert checkpoint.compare(model, tmp_path / "cut").is_same


def test_layouts_of_other_checkpoints_are_refused(model: Path, tmp_path: Path) -> None:
    layout = engine()
    cases = {
        "are not in the layout": {k: v for k, v in layout.sources.items() if k != "norm"},
        "has 1 tensors .first: 'more'": {**layout.sources, "more": ("float32", (1,))},
        "'norm' has shape .3. in": {**layout.sources, "norm": ("float32", (4,))},
    }
    for message, sources in cases.items():
        ranks = [dataclasses.replace(one, unread=()) for one in layout.ranks]
        other = dataclasses.replace(layout, sources=sources, ranks=ranks)
        with pytest.raises(RecipeError, match=message):
            checkpoint.plan_conversion(model, tmp_path / "cut", layout=other)


def test_arguments_that_contradict_each_other(model: Path, tmp_path: Path) -> None:
    def plan(**arguments: object) -> object:
        return checkpoint.plan_conversion(model, tmp_path / "cut", **arguments)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match="cannot go together with rules"):
        plan(layout=engine(), rules=["*=..."])
    with pytest.raises(UsageError, match="cannot go together with a recipe"):
        plan(layout=engine(), recipe="llama")
    with pytest.raises(UsageError, match="with a layout for tp=4"):
        plan(layout=engine(), to="tp=2")
    with pytest.raises(RecipeError, match="cannot read the layout file"):
        plan(layout=tmp_path / "missing.json")
    (tmp_path / "wrong.json").write_text(reshard.to_json(reshard.Layout.replicated((2,), 2)))
    with pytest.raises(RecipeError, match="has a Layout, not an engine's layout"):
        plan(layout=tmp_path / "wrong.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="is not JSON"):
        plan(layout=tmp_path / "binary.json")
