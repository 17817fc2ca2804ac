"""A base and a delta give what the delta was made for, bit for bit, in any cut and format."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.checkpoint_files import Tensor, read_file, small_folder, tensor, tensors, write_file
from checkpoint.faulty_process import FaultyProcesses
from checkpoint.killed_conversion import Case, run_again, write_old
from checkpoint.model_files import COLUMNS, ROWS, contents, write_model
from reshard import checkpoint
from reshard.errors import CheckpointError, DigestError, InterruptedRunError, RunError, UsageError
from selection import choose, keep_alternate

CUTS: list[dict[str, Any]] = [
    {"to": "full"},
    {"to": "full", "format": "torch-dcp"},
    {"to": "3"},
    {"to": "tp=2", "rules": ["*=..."], "replicas": "every"},
    {"to": "2", "format": "torch-dcp"},
]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors before and after: some changed a little or wholly, some are new, gone or others."""
    before = draw(tensors())
    after = {}
    for number, (name, one) in enumerate(before.items()):
        what = draw(st.sampled_from(["same", "little", "all", "gone", "other"]))
        if what == "gone":
            continue
        if what == "other":
            one = tensor("int16", (3, number + 1), 50)
        elif what == "all":
            one = tensor(one.dtype.name, one.shape, 60 + number)
        elif what == "little" and one.bits.size:
            bits = one.bits.copy()
            raw = bits.reshape(-1).view(np.uint8)
            for at in draw(st.lists(st.integers(0, len(raw) - 1), max_size=4)):
                # A bool has one bit.
                raw[at] ^= 1
            one = Tensor(one.dtype, bits)
        after[name] = one
    if draw(st.booleans()):
        after["new"] = tensor("float32", (4, 5), 70)
    return before, after


@settings(max_examples=choose(12, 100))
@given(
    pairs(),
    st.sampled_from(CUTS),
    st.sampled_from(CUTS),
    st.sampled_from([None, *CUTS]),
    st.sampled_from([None, "zstd"]),
    st.sampled_from([64, None]),
)
def test_any_cut_to_any_cut(
    pair: tuple[dict[str, Tensor], dict[str, Tensor]],
    first: dict[str, Any],
    second: dict[str, Any],
    to: dict[str, Any] | None,
    compression: str | None,
    block_bytes: int | None,
) -> None:
    with small_folder(block_bytes) as folder:
        for name, one, cut in (("a", pair[0], first), ("b", pair[1], second)):
            (folder / f"p{name}").mkdir()
            write_file(folder / f"p{name}" / "model.safetensors", one)
            checkpoint.convert(folder / f"p{name}", folder / name, **cut)
        checkpoint.diff(folder / "a", folder / "b", folder / "delta", compression=compression)
        checkpoint.apply(folder / "a", folder / "delta", folder / "out", **(to or {}))
        assert checkpoint.compare(folder / "pb", folder / "out").is_same
        assert not checkpoint.check_digests(folder / "out").damaged
        # The base in another cut, without a manifest, is as good.
        checkpoint.apply(folder / "pa", folder / "delta", folder / "again", to="full")
        assert checkpoint.compare(folder / "pb", folder / "again").is_same


def step(folder: Path, number: int, **more: str) -> Path:
    """A state of a model after some steps, each of which changes some numbers."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 1 << 16, (300, 200), dtype=np.uint16)
    for one in range(number):
        bits.reshape(-1)[np.random.default_rng(one + 1).integers(0, bits.size, 500)] ^= 3
    folder.mkdir(parents=True)
    bf16 = tensor("bfloat16", (1,)).dtype
    state = {"w": Tensor(bf16, bits), "k": tensor("float32", (90, 90), 3)}
    if number > 1:
        state["late"] = tensor("int8", (number,), number)
    write_file(folder / "model.safetensors", state, {"step": str(number)})
    for name, text in more.items():
        (folder / f"{name}.json").write_text(text)
    return folder


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    folders = [
        step(tmp_path / "s0", 0, config="{}", same="1", gone="2"),
        step(tmp_path / "s1", 1, config='{"a": 1}', same="1"),
        step(tmp_path / "s2", 2, config='{"a": 1}', same="1", new="3"),
        step(tmp_path / "s3", 3, config='{"a": 2}', same="1", new="3"),
    ]
    for number in range(3):
        checkpoint.diff(folders[number], folders[number + 1], tmp_path / f"d{number}")
    return folders


def beside(folder: Path) -> dict[str, str]:
    return {
        path.name: path.read_text() for path in folder.glob("*.json") if "manifest" not in path.name
    }


def test_files_other_than_tensors(tmp_path: Path, steps: list[Path]) -> None:
    checkpoint.apply(steps[0], tmp_path / "d0", tmp_path / "out")
    assert beside(tmp_path / "out") == {"config.json": '{"a": 1}', "same.json": "1"}
    assert checkpoint.open(tmp_path / "out").metadata["step"] == "1"


@pytest.mark.parametrize("to", [{}, {"to": "2", "format": "torch-dcp"}])
def test_deltas_are_applied_in_order(tmp_path: Path, steps: list[Path], to: dict[str, Any]) -> None:
    deltas = [tmp_path / f"d{number}" for number in range(3)]
    checkpoint.apply(steps[0], deltas, tmp_path / "out", **to)
    assert checkpoint.compare(steps[3], tmp_path / "out").is_same
    assert beside(tmp_path / "out") == beside(steps[3])


def test_a_chain_with_a_gap(tmp_path: Path, steps: list[Path]) -> None:
    with pytest.raises(CheckpointError, match=r"tensor 'late' is not in .*d0, unlike"):
        checkpoint.apply(steps[0], [tmp_path / "d0", tmp_path / "d2"], tmp_path / "out")
    with pytest.raises(DigestError, match=r"'w' in .*d0 has another digest than in .*d0"):
        checkpoint.apply(steps[0], [tmp_path / "d0", tmp_path / "d0"], tmp_path / "out")


@pytest.mark.parametrize("has_manifest", [False, True])
def test_the_wrong_base_is_refused_by_name(
    tmp_path: Path, steps: list[Path], has_manifest: bool
) -> None:
    base = steps[1]
    if has_manifest:
        base = tmp_path / "known"
        checkpoint.convert(steps[1], base, to="full")
    with pytest.raises(DigestError, match=r"tensor 'w'.* another digest than in the base of .*d0"):
        checkpoint.apply(base, tmp_path / "d0", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.reshard-staging").exists()


def test_a_base_that_is_damaged_where_nothing_changed(tmp_path: Path, steps: list[Path]) -> None:
    path = steps[0] / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[checkpoint.open(steps[0])["k"].file_range(0).start_bytes + 5] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(DigestError, match=r"tensor 'k'.*The delta is for another state of"):
        checkpoint.apply(steps[0], tmp_path / "d0", tmp_path / "out")


def test_other_names_types_and_shapes(tmp_path: Path, steps: list[Path]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for state, told in (
        ({"w": tensor("bfloat16", (300, 200))}, "tensor 'k' is not in"),
        (
            {"w": tensor("float16", (300, 200)), "k": tensor("float32", (90, 90))},
            "tensor 'w' is float16",
        ),
        (
            {"w": tensor("bfloat16", (300, 200)), "k": tensor("float32", (90, 9))},
            r"'k' is float32 \[90, 9\]",
        ),
    ):
        write_file(other / "model.safetensors", state)
        with pytest.raises(CheckpointError, match=told):
            checkpoint.apply(other, tmp_path / "d0", tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"to": "full", "dtype": "fp32"}, "dtype='fp32' while a delta is applied"),
        ({"to": "full", "rename": ["w=v"]}, "while a delta is applied"),
        ({"rules": ["*=..."]}, "rules without `to`"),
    ],
)
def test_other_elements_and_names_are_refused(
    tmp_path: Path, steps: list[Path], arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        checkpoint.apply(steps[0], tmp_path / "d0", tmp_path / "out", **arguments)


def test_some_of_the_tensors(tmp_path: Path, steps: list[Path]) -> None:
    checkpoint.apply(steps[0], tmp_path / "d0", tmp_path / "out", to="full", include=["w"])
    found = checkpoint.open(tmp_path / "out")
    assert [*found] == ["w"]
    ours, theirs = (checkpoint.read_tensor(one, "w") for one in (found, checkpoint.open(steps[1])))
    assert ours.tobytes() == theirs.tobytes()


def test_a_delta_inside_the_target(tmp_path: Path, steps: list[Path]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "d0").rename(tmp_path / "out" / "d0")
    with pytest.raises(UsageError, match="is inside the target"):
        checkpoint.apply(steps[0], tmp_path / "out" / "d0", tmp_path / "out", overwrite=True)


def test_items_of_distributed_checkpoints(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(100, 40, generator=generator)
    for number in range(2):
        state = {"w": weights + number * 1e-3, "step": number, "lr": 0.1, "n": [number, {"a": 1}]}
        if number:
            state["late"] = "text"
        with pytest.warns(UserWarning, match="single process"):
            dcp.save(state, checkpoint_id=tmp_path / f"s{number}", no_dist=True)
    checkpoint.diff(tmp_path / "s0", tmp_path / "s1", tmp_path / "delta", compression="zstd")
    checkpoint.apply(tmp_path / "s0", tmp_path / "delta", tmp_path / "out")
    assert checkpoint.compare(tmp_path / "s1", tmp_path / "out").is_same
    found = {"w": torch.zeros(100, 40), "step": -1, "lr": 0.0, "n": [-1, {"a": 0}], "late": ""}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert (found["step"], found["lr"], found["n"], found["late"]) == (
        1,
        0.1,
        [1, {"a": 1}],
        "text",
    )


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, processes: FaultyProcesses) -> Case:
    """A base in shards of rows, and a delta, become shards of columns."""
    folder = tmp_path_factory.mktemp("case")
    whole = write_model(folder / "whole")
    checkpoint.convert(whole, folder / "rows", **ROWS)
    path = whole / "model.safetensors"
    content = bytearray(path.read_bytes())
    for at in range(len(content) - 4_000_000, len(content), 997):
        content[at] ^= 1
    path.write_bytes(bytes(content))
    checkpoint.diff(folder / "rows", whole, folder / "delta")
    made = Case(folder, processes, folder / "rows", deltas=[str(folder / "delta")], **COLUMNS)
    assert checkpoint.compare(whole, folder / "undisturbed").is_same
    return made


@pytest.mark.parametrize(
    ("has_old", "kill"),
    keep_alternate(
        (False, True), range(12), "the same kill with or without an old target is a default case"
    ),
)
def test_killed_and_run_again(case: Case, tmp_path: Path, has_old: bool, kill: int) -> None:
    target = tmp_path / "target"
    if has_old:
        write_old(target)
    old = contents(target)
    calls = len(case.calls(has_old, 4))
    case.run(target, has_old, kill_at=kill * (calls - 1) // 11)
    run_again(case, target, has_old, old)


def test_another_delta_does_not_go_on(
    tmp_path: Path, steps: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an unfinished run left belongs to its delta."""
    from reshard.checkpoint.conversion import run

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run._ConversionRun, "finish", stop)
        with pytest.raises(InterruptedRunError):
            checkpoint.apply(steps[0], tmp_path / "d0", tmp_path / "out")
    checkpoint.diff(steps[0], steps[2], tmp_path / "other")
    with pytest.raises(RunError, match="start over with --restart"):
        checkpoint.apply(steps[0], tmp_path / "other", tmp_path / "out")
    checkpoint.apply(steps[0], tmp_path / "other", tmp_path / "out", restart=True)
    assert checkpoint.compare(steps[2], tmp_path / "out").is_same
    assert json.loads((tmp_path / "out" / "reshard.manifest.json").read_text())["carried"]
    assert "out" in os.listdir(tmp_path)


@pytest.mark.parametrize("stored", ["once", "every"])
def test_copies_stay_as_they_are_in_the_base(steps: list[Path], stored: str) -> None:
    folder = steps[0].parent
    cut = {"to": "tp=3", "rules": ["w=tp, -", "*=..."]}
    checkpoint.convert(steps[1], folder / "cut", **cut, replicas=stored)
    checkpoint.apply(folder / "cut", folder / "d1", folder / "out")
    files = sorted((folder / "out").glob("*.safetensors"))
    assert sum("k" in read_file(path) for path in files) == (3 if stored == "every" else 1)
    other = {"once": "every", "every": "once"}[stored]
    plan = checkpoint.plan_application(
        folder / "cut", folder / "d1", folder / "new", replicas=other
    )
    assert plan.write_plan.copy_bytes == (2 * 4 * 90 * 90 if other == "every" else 0)
    with pytest.raises(UsageError, match="a limit for files"):
        checkpoint.apply(folder / "cut", folder / "d1", folder / "new", most_file_bytes=100)
