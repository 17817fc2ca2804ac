"""`recipe derive`, `recipe check --against`, `convert --layout`, with an engine of the test's."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cli.command_runs import run_here, write_model
from reshard import DeviceMesh, checkpoint
from reshard.binding import View
from reshard.layout import Box
from reshard.recipes.engine_layouts import (
    Computed,
    EngineLayout,
    ParameterLayout,
    RankLayout,
    SourcePiece,
)
from reshard.recipes.engine_layouts.engines import ENGINES, register_engine

SHAPES = {
    "layers.0.up.weight": (8, 4),
    "layers.1.up.weight": (8, 4),
    "layers.0.down.weight": (8, 8),
    "decay": (4,),
    "rope": (2,),
}
RULES = ("--rule", "*.up.weight=tp, -", "--rule", "*.down.weight=-, tp", "--rule", "*=...")


def derive(model: str, tp: int = 1) -> EngineLayout:
    """An engine that cuts rows of `up` and of `down`."""
    tensors = checkpoint.open(model).tensors

    def rank(number: int) -> RankLayout:
        parameters = []
        for name, tensor in tensors.items():
            if name.endswith(".weight"):
                rows, columns = tensor.shape[0] // tp, tensor.shape[1]
                box, view = (
                    Box((0, 0), (rows, columns)),
                    View(rows * columns * number, (columns, 1)),
                )
                piece = SourcePiece(box, name, view)
                shape = (rows, columns)
                parameters.append(ParameterLayout.of(name, shape, tensor.dtype, [piece]))
        computed = Computed(Box((0,), (4,)), ("exp", "neg"), ("decay",), View(0, (1,)))
        parameters.append(ParameterLayout.of("A", (4,), "float32", computed=[computed]))
        parameters.append(ParameterLayout.of("cache", (2,), "float32", unfilled=[Box((0,), (2,))]))
        return RankLayout(number, {one.name: one for one in parameters}, ("rope",))

    sources = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return EngineLayout("toy", "1.0", DeviceMesh.of(tp=tp), sources, [rank(i) for i in range(tp)])


@pytest.fixture(autouse=True)
def toy(folder: Path) -> Iterator[None]:
    register_engine("toy", "for tests", derive)
    path = write_model(
        folder / "tiny",
        **{
            name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
            for name, shape in SHAPES.items()
        },
    )
    (path / "config.json").write_text(json.dumps({"model_type": "toy"}))
    yield
    del ENGINES["toy"]


def test_a_layout_is_derived_compared_and_used(folder: Path) -> None:
    derived = run_here("recipe", "derive", "tiny", "layout.json", "--engine", "toy", "--to", "tp=2")
    assert (derived.code, derived.errors) == (0, "")
    lines = derived.output.splitlines()
    assert lines[0].startswith("tiny by toy 1.0 for tp=2: 5 tensors, 2 ranks, in ")
    assert "computed while loading: A (exp, neg)" in lines
    assert "not filled: cache" in lines
    assert "read by no rank: rope" in lines

    compared = run_here(
        "recipe", "check", "tiny", "--to", "tp=2", *RULES, "--against", "layout.json"
    )
    assert (compared.code, compared.errors) == (1, "")
    tail = compared.output.partition("against toy 1.0 for tp=2: 3 tensors alike\n")[2]
    assert tail.splitlines() == [
        "layers.*.down.weight  1 tensor sharded otherwise, on ranks 0,1",
        "    layers.0.down.weight, rank 0",
        "      here  [0:8, 0:4]",
        "      toy  [0:4, 0:8]",
        "not read by toy: rope",
    ]

    converted = run_here("convert", "tiny", "cut", "--layout", "layout.json")
    assert (converted.code, converted.errors) == (0, "")
    assert ", for tp=2: " in converted.output
    cut = checkpoint.open("cut")
    assert cut["layers.0.down.weight"].layout.boxes(1) == (Box((4, 0), (8, 8)),)
    assert run_here("verify", "tiny", "cut").code == 0
    planned = run_here("plan", "tiny", "--layout", "layout.json", "--json").json
    assert planned["mesh"]["text"] == "tp=2"


def test_rules_that_agree_with_the_engine() -> None:
    rules = ("--rule", "*.weight=tp, -", "--rule", "*=...")
    arguments = ("recipe", "check", "tiny", "--to", "tp=2", *rules, "--against", "toy")
    found = run_here(*arguments)
    assert found.code == 0
    assert "against toy 1.0 for tp=2: 4 tensors alike" in found.output
    content = run_here(*arguments, "--json").json["against"]
    assert content["differences"] == []
    assert (content["same"], content["unread"]) == (4, ["rope"])


def test_differences_as_json() -> None:
    arguments = ("recipe", "check", "tiny", "--to", "tp=2", *RULES, "--against", "toy", "--json")
    (one,) = run_here(*arguments).json["against"]["differences"]
    assert one["tensors"] == ["layers.0.down.weight"]
    assert one["ranks"] == [0, 1]
    assert one["example"] == {"rank": 0, "here": "[0:8, 0:4]", "engine": "[0:4, 0:8]"}


def test_json_of_derive_has_the_keys_that_help_lists() -> None:
    content = run_here(
        "recipe", "derive", "tiny", "x.json", "--engine", "toy", "--to", "tp=2", "--json"
    ).json
    text = run_here("recipe", "derive", "--help").output
    listed = text.partition("Keys of --json:")[2].partition("\n\n")[0]
    for key in content:
        assert key in listed.replace(",", " ").split(), key
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1]


def test_examples_of_derive_are_commands() -> None:
    text = run_here("recipe", "derive", "--help").output
    assert all(len(line) <= 100 for line in text.splitlines())
    examples = text.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert len(examples) == 3
    for line in examples:
        arguments = [
            {"llama-3-8b": "tiny", "vllm": "toy"}.get(word, word) for word in shlex.split(line)[1:]
        ]
        rules = RULES if "check" in arguments else ()
        assert run_here(*arguments, *rules).code in (0, 1), line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("derive", "tiny", "x.json", "--engine", "tou", "--to", "tp=2"),
            "no engine 'tou' is known",
        ),
        (("derive", "tiny", "x.json", "--engine", "toy", "--to", "pp=2"), "the axis 'pp' of a lay"),
        (
            ("derive", "tiny", "x.json", "--engine", "toy", "--to", "2"),
            "cannot read '2' in the mesh",
        ),
        (
            ("derive", "tiny", "tiny", "--engine", "toy", "--to", "tp=2"),
            "tiny is a folder; give a f",
        ),
        (("derive", "none", "x.json", "--engine", "toy", "--to", "tp=2"), "no checkpoint at none"),
        (("check", "tiny", "--to", "tp=4", *RULES, "--against", "two.json"), "give --to tp=2"),
        (
            ("check", "tiny", "--to", "tp=2", *RULES, "--against", "no.json"),
            "cannot read the layout",
        ),
    ],
)
def test_mistakes_are_answered(arguments: tuple[str, ...], message: str) -> None:
    run_here("recipe", "derive", "tiny", "two.json", "--engine", "toy", "--to", "tp=2")
    found = run_here("recipe", *arguments)
    assert (found.code, found.output) == (2, "")
    assert message in found.errors


def test_a_layout_file_is_not_replaced_unasked() -> None:
    arguments = ("recipe", "derive", "tiny", "x.json", "--engine", "toy", "--to", "tp=2")
    assert run_here(*arguments).code == 0
    assert run_here(*arguments).code == 2
    assert run_here(*arguments, "--overwrite").code == 0


def test_layouts_of_other_models_are_named() -> None:
    """Tensors that the layout has not are told, and are a difference."""
    run_here("recipe", "derive", "tiny", "x.json", "--engine", "toy", "--to", "tp=2")
    rules = ("--rule", "*=...")
    found = run_here("recipe", "check", "model", "--to", "tp=2", *rules, "--against", "x.json")
    assert found.code == 1
    assert "not in its layout, which is of another checkpoint:" in found.output
    assert run_here("convert", "model", "cut", "--layout", "x.json").code == 2


def test_neither_a_mesh_nor_a_layout() -> None:
    found = run_here("convert", "tiny", "cut", "--recipe", "llama")
    assert found.code == 2
    assert "a recipe without `to`, the mesh to shard over" in found.errors
