"""Checks of tensors against a model class, whichever judge found the differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reshard.checkpoint.architectures import checking
from reshard.checkpoint.architectures.checking import check_architecture, check_sharded_model
from reshard.checkpoint.architectures.records import TensorDifferences
from reshard.dtypes import dtype
from reshard.errors import CheckpointError

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
FOUND = TensorDifferences(
    "Llama",
    missing=(("up.weight", (3, 4)),),
    unknown=("foo.weight", "model.layers.2.eh_proj.weight", "layers.0.rotary_emb.inv_freq"),
)


def check_names(
    monkeypatch: pytest.MonkeyPatch, found: TensorDifferences | None, **arguments: object
) -> tuple[str, ...]:
    recorded = None if found is None else (found, True)
    monkeypatch.setattr(checking, "find_recorded_differences", lambda config, shapes: recorded)
    monkeypatch.setattr(checking, "find_spec", lambda name: None)
    names = ("foo.weight", "model.layers.2.eh_proj.weight", "layers.0.rotary_emb.inv_freq", "x")
    shapes, types = dict.fromkeys(names, (2,)), dict.fromkeys(names, dtype("float32"))
    return check_architecture(shapes, types, CONFIG, Path("run"), **arguments)  # type: ignore[arg-type]


def test_differences_are_an_error_that_names_them_and_the_judge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = (
        r"tensors of run are not those that Llama loads for the model type 'llama'. 1 tensor "
        r"missing: up.weight \[3, 4\]; 1 tensor unknown: foo.weight. Nothing was written; give .* "
        "--allow incomplete; .* --allow unknown"
    )
    with pytest.raises(CheckpointError, match=expected):
        check_names(monkeypatch, FOUND)


def test_each_kind_is_allowed_by_its_name_and_the_notes_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CheckpointError, match="1 tensor unknown"):
        check_names(monkeypatch, FOUND, allow=["incomplete"])
    with pytest.raises(CheckpointError, match="1 tensor missing"):
        check_names(monkeypatch, FOUND, allow=["unknown"])
    assert check_names(monkeypatch, FOUND, allow=["unknown", "incomplete"]) == (
        "names and shapes checked: Llama loads 1 tensor and ignores 2 others (first: "
        "model.layers.2.eh_proj.weight)",
        "allowed as incomplete: 1 tensor missing: up.weight [3, 4]",
        "allowed as unknown: 1 tensor unknown: foo.weight",
    )


def test_tensors_that_the_user_left_out_are_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = check_names(monkeypatch, FOUND, allow=["unknown"], left_out=["up.weight"])
    assert not any("incomplete" in note for note in notes)


def test_another_shape_cannot_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = TensorDifferences("Llama", misshapen=(("x", (2,), (3,)),))
    with pytest.raises(CheckpointError, match=r"1 tensor of another shape: x \[2\], expected \[3"):
        check_names(monkeypatch, found, allow=["unknown", "incomplete"])


def test_an_architecture_that_no_judge_knows_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (note,) = check_names(monkeypatch, None)
    assert note.startswith("the tensors were not checked against an architecture: no record is of")
    assert "transformers is not installed" in note


SMALL = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 4, "vocab_size": 9}
SMALL |= {"intermediate_size": 8, "max_position_embeddings": 5, "num_attention_heads": 2}


def small() -> dict[str, tuple[int, ...]]:
    """Return a BERT without a head, as its first files were saved."""
    at = "encoder.layer.0"
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.position_ids": (1, 5),
        "embeddings.word_embeddings.weight": (9, 4),
        "embeddings.position_embeddings.weight": (5, 4),
        "embeddings.token_type_embeddings.weight": (2, 4),
        f"{at}.intermediate.dense.weight": (8, 4),
        f"{at}.intermediate.dense.bias": (8,),
        f"{at}.output.dense.weight": (4, 8),
        f"{at}.output.dense.bias": (4,),
    }
    attention = [f"{at}.attention.self.{name}" for name in ("query", "key", "value")]
    for module in (*attention, f"{at}.attention.output.dense", "pooler.dense"):
        shapes |= {f"{module}.weight": (4, 4), f"{module}.bias": (4,)}
    for module in ("embeddings", f"{at}.attention.output", f"{at}.output"):
        shapes |= {f"{module}.LayerNorm.{kind}": (4,) for kind in ("weight", "bias")}
    return shapes


def check_small(shapes: dict[str, tuple[int, ...]], **arguments: Any) -> tuple[str, ...]:
    types = dict.fromkeys(shapes, dtype("float32"))
    return check_sharded_model(shapes, types, SMALL, Path("run"), **arguments)


def test_a_recipe_accepts_any_class_where_the_config_names_none() -> None:
    (note,) = check_small(small())
    assert "BertModel of transformers" in note and "loads 23 tensors and ignores 1" in note


def test_a_recipe_accepts_rows_that_pad_the_vocabulary() -> None:
    padded = {**small(), "embeddings.word_embeddings.weight": (16, 4)}
    check_small(padded)
    with pytest.raises(CheckpointError, match=r"of another shape: embeddings.word_.* \[16, 5\]"):
        check_small({**padded, "embeddings.word_embeddings.weight": (16, 5)})


def test_a_recipe_refuses_what_the_architecture_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "find_spec", lambda name: None)
    shapes = {**small(), "wq": (4,)}
    del shapes["pooler.dense.bias"]
    with pytest.raises(CheckpointError, match=r"1 tensor missing: pooler.* 1 tensor unknown: wq"):
        check_small(shapes)
    with pytest.raises(CheckpointError, match="1 tensor missing: pooler"):
        check_small(shapes, is_meant=lambda name: name == "wq")
    notes = check_small(shapes, allow=["incomplete", "unknown"])
    assert len(notes) == 3 and notes[2] == "allowed as unknown: 1 tensor unknown: wq"
    shapes = {**small(), "pooler.dense.bias": (3,)}
    with pytest.raises(CheckpointError, match=r"\[3\], expected \[4\].*, or --allow unknown"):
        check_small(shapes)
    assert "allowed as unknown: 1 tensor of another" in check_small(shapes, allow=["unknown"])[1]


def test_a_recipe_of_an_architecture_without_record_is_noted() -> None:
    config = {"model_type": "unheard-of"}
    (note,) = check_sharded_model({}, {}, config, Path("run"))
    assert "no record is of the model type 'unheard-of'" in note and "--for hf" in note
