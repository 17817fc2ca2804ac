"""Which tensors are taken, and by which names."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard import checkpoint
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.naming.selection import TensorSelection, by_new_names, move_path
from reshard.errors import RecipeError, UsageError

NAMES = ("model.layers.0.w1", "model.layers.1.w1", "model.layers.1.w2", "model.norm", "step")


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    write_file(
        tmp_path / "model.safetensors",
        {name: tensor("float32", (4, 2), seed) for seed, name in enumerate(NAMES)},
    )
    return checkpoint.open(tmp_path / "model.safetensors")


def test_globs_take_and_leave_out(source: Checkpoint) -> None:
    chosen = checkpoint.select(source, include=["model.*"], exclude=["*.w2", "*.norm"])
    assert [*chosen] == ["model.layers.0.w1", "model.layers.1.w1"]
    assert chosen.notes[-1] == (
        "3 tensors left out by --include and --exclude (first: model.layers.1.w2)"
    )
    assert checkpoint.select(source) is source
    several = checkpoint.select(source, include=["step", "*.w[12]"])
    assert [*several] == [name for name in NAMES if name != "model.norm"]


def test_names_change_and_bytes_stay(source: Checkpoint) -> None:
    chosen = checkpoint.select(
        source, strip_prefix=["model."], rename=["layers.*.w1=model.layers.*.gate", "norm=n"]
    )
    assert [*chosen] == ["model.layers.0.gate", "model.layers.1.gate", "layers.1.w2", "n", "step"]
    for old, new in zip(NAMES, chosen, strict=True):
        assert chosen[new].name == new
        assert chosen[new].binding == source[old].binding
        found = checkpoint.read_tensor(chosen, new)
        assert (found == checkpoint.read_tensor(source, old)).all() or found.tobytes()


def test_one_model_is_selected(source: Checkpoint) -> None:
    chosen = checkpoint.select(source, select="model", exclude=["*.w2"])
    assert [*chosen] == ["layers.0.w1", "layers.1.w1", "norm"]
    assert chosen.notes[-1].startswith(
        "2 tensors left out by --select model, --include and --exclude (first: model.layers.1.w2)"
    )
    deeper = checkpoint.select(source, select="model.layers.", strip_prefix=["0."])
    assert [*deeper] == ["w1", "1.w1", "1.w2"]
    assert TensorSelection(select="ema", rename=["*.w=*.v"]).new_name("ema.a.w") == "a.v"
    assert TensorSelection(select="ema").new_name("ema_other.w") is None
    assert TensorSelection(select="ema").to_json() == {"select": "ema"}


@pytest.mark.parametrize(
    ("rename", "name", "becomes"),
    [
        ("a.*.b.*=x.*.y.*", "a.1.b.2", "x.1.y.2"),
        ("*.layers.*.w=layers.{2}.{1}.w", "decoder.layers.3.w", "layers.3.decoder.w"),
        ("*.w={1}.{1}", "a.w", "a.a"),
        ("*=model.*", "w", "model.w"),
        ("a.*=b", "a.anything.at.all", "b"),
        ("a.[0]*=b*", "a.[0].w", "b.w"),
        ("a=b", "aa", "aa"),
    ],
)
def test_renamings(rename: str, name: str, becomes: str) -> None:
    assert TensorSelection(rename=[rename]).new_name(name) == becomes


def test_the_first_renaming_counts() -> None:
    chosen = TensorSelection(rename=["a.*=first.*", "*=second.*"])
    assert [chosen.new_name(name) for name in ("a.w", "b.w")] == ["first.w", "second.b.w"]


def test_prefixes_go_one_after_another() -> None:
    chosen = TensorSelection(strip_prefix=["state.", "module."])
    names = ("state.module.w", "module.w", "state.w", "module.state.w")
    assert [chosen.new_name(name) for name in names] == ["w", "w", "w", "state.w"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"include": ["modle.*"]}, r"--include 'modle\.\*' matches none of 5 names.*'model"),
        ({"exclude": ["x"]}, "--exclude 'x' matches none"),
        ({"strip_prefix": ["module."]}, r"--strip-prefix 'module\.' matches none.*a prefix is"),
        ({"rename": ["layers.*=a.*"]}, r"--rename 'layers\.\*=a\.\*' matches none"),
        ({"exclude": ["*"]}, "no tensor is left of 5 tensors"),
        ({"rename": ["nothing"]}, "cannot read the renaming 'nothing'; write pattern=name"),
        ({"rename": ["a=b=c"]}, "cannot read the renaming"),
        ({"rename": ["=b"]}, "cannot read the renaming"),
        ({"rename": ["a.*=*.*"]}, r"has 2 `\*` in the new name, and its pattern has 1"),
        ({"rename": ["a=*"]}, r"has 1 `\*` in the new name, and its pattern has no `\*`"),
        ({"rename": ["a.*={2}"]}, r"has \{2\} in the new name.*numbers from \{1\} to \{1\}"),
        ({"rename": ["*.*=*.{2}"]}, r"has `\*` and numbers"),
        ({"include": "model.*"}, r"include 'model\.\*'; give a list"),
        ({"rename": [3]}, "rename has 3; expected a text"),
        ({"select": "ema"}, r"--select 'ema': no tensor .* begins with 'ema\.'; names .* 'model'"),
        ({"select": "step"}, "--select 'step': no tensor"),
        ({"select": "."}, r"select '\.'; give the prefix"),
        ({"select": ["model"]}, r"select \['model'\]; give the prefix"),
    ],
)
def test_what_cannot_be_meant(source: Checkpoint, options: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        checkpoint.select(source, **options)


def test_two_things_of_one_name(source: Checkpoint) -> None:
    says = r"'model\.layers\.0\.w1' and 'model\.layers\.1\.w1' in .* would both be 'w'; leave one"
    with pytest.raises(RecipeError, match=says):
        checkpoint.select(source, rename=["model.layers.*.w1=w"])
    with pytest.raises(RecipeError, match="would have an empty name"):
        checkpoint.select(source, strip_prefix=["step"])


@pytest.mark.parametrize(
    ("path", "name", "moved"),
    [
        (("model", "layers.0.w"), "layers.0.w", ("layers.0.w",)),
        (("model", "layers", 0, "w"), "layers.0.w", ("layers", 0, "w")),
        (("model", "layers", 0, "w1"), "model.layers.0.gate", ("model", "layers", 0, "gate")),
        (("model", "w"), "other.w", ("other", "w")),
        (("a", "b", "c"), "x", ("x",)),
        (("a", "b", "c"), "a.x.c", ("a", "x", "c")),
    ],
)
def test_paths_follow_names(path: tuple, name: str, moved: tuple) -> None:
    assert move_path(path, name) == moved
    assert ".".join(map(str, moved)) == name


def test_everything_follows_names(source: Checkpoint) -> None:
    held = Checkpoint(
        source.folder,
        source.format,
        source.tensors,
        source.files,
        values={"step_size": 3, "lost": 4},
        paths={"model.norm": ("model", "norm"), "lost": ("lost",)},
    )
    new = {"model.norm": "norm", "lost": None, "step_size": "size"}
    found = by_new_names(held, new)
    assert (found.values, found.paths) == ({"size": 3}, {"norm": ("norm",)})
    assert "norm" in found.tensors
