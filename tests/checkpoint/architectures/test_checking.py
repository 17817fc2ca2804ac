"""Checks of tensors against a model class, whichever judge found the differences."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.checkpoint_files import Tensor, tensor
from reshard.checkpoint.architectures import checking
from reshard.checkpoint.architectures.checking import check_architecture
from reshard.checkpoint.architectures.differences import TensorDifferences
from reshard.checkpoint.architectures.records import RecordedDifferences
from reshard.errors import CheckpointError

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
FOUND = TensorDifferences(
    "Llama",
    missing=(("up.weight", (3, 4)),),
    unknown=("foo.weight", "model.layers.2.eh_proj.weight", "layers.0.rotary_emb.inv_freq"),
)


def check(
    monkeypatch: pytest.MonkeyPatch, found: TensorDifferences | None, **arguments: object
) -> tuple[str, ...]:
    recorded = None if found is None else RecordedDifferences(found, is_exact=True)
    monkeypatch.setattr(checking, "find_recorded_differences", lambda config, shapes: recorded)
    monkeypatch.setattr(checking, "find_spec", lambda name: None)
    names = ("foo.weight", "model.layers.2.eh_proj.weight", "layers.0.rotary_emb.inv_freq", "x")
    tensors: dict[str, Tensor] = {name: tensor("float32", (2,)) for name in names}
    return check_architecture(tensors, CONFIG, Path("run"), **arguments)  # type: ignore[arg-type]


def test_differences_are_an_error_that_names_them_and_the_judge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = (
        r"tensors of run are not those that Llama loads for the model type 'llama'. 1 tensor "
        r"missing: up.weight \[3, 4\]; 1 tensor unknown: foo.weight. Nothing was written; give .* "
        "--allow incomplete; .* --allow unknown"
    )
    with pytest.raises(CheckpointError, match=expected):
        check(monkeypatch, FOUND)


def test_each_kind_is_allowed_by_its_name_and_the_notes_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CheckpointError, match="1 tensor unknown"):
        check(monkeypatch, FOUND, allow=["incomplete"])
    with pytest.raises(CheckpointError, match="1 tensor missing"):
        check(monkeypatch, FOUND, allow=["unknown"])
    assert check(monkeypatch, FOUND, allow=["unknown", "incomplete"]) == (
        "names and shapes checked: Llama loads 1 tensor and ignores 2 others (first: "
        "model.layers.2.eh_proj.weight)",
        "allowed as incomplete: 1 tensor missing: up.weight [3, 4]",
        "allowed as unknown: 1 tensor unknown: foo.weight",
    )


def test_tensors_that_the_user_left_out_are_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = check(monkeypatch, FOUND, allow=["unknown"], left_out=["up.weight"])
    assert not any("incomplete" in note for note in notes)


def test_another_shape_cannot_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = TensorDifferences("Llama", misshapen=(("x", (2,), (3,)),))
    with pytest.raises(CheckpointError, match=r"1 tensor of another shape: x \[2\], expected \[3"):
        check(monkeypatch, found, allow=["unknown", "incomplete"])


def test_an_architecture_that_no_judge_knows_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (note,) = check(monkeypatch, None)
    assert note.startswith("the tensors were not checked against an architecture: no record is of")
    assert "transformers is not installed" in note
