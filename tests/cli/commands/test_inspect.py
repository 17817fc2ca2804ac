"""`reshard inspect`: layers are folded, and shards without a text are shown by dimensions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import reshard
from cli.command_runs import run_here, write_model
from reshard.cli.output import cut_text
from reshard.layout import Layout


def test_layers_share_a_line_with_the_size_of_all(folder: Path) -> None:
    tensors = {f"model.layers.{n}.up.weight": np.zeros((4, 8), np.float32) for n in range(32)}
    write_model(folder / "deep", **tensors, norm=np.zeros(8, np.float32))
    lines = run_here("inspect", "deep").output.splitlines()
    assert lines[2].split() == ["tensor", "number", "dtype", "shape", "sharding", "ranks", "size"]
    assert lines[4].split() == [
        *("model.layers.{0-31}.up.weight", "32", "float32", "4x8", "whole", "0", "4.10", "kB")
    ]
    assert lines[5].split()[:2] == ["norm", "1"]
    everything = run_here("inspect", "deep", "--all").output
    assert "{" not in everything
    assert all(f"{name} " in everything for name in tensors)
    assert len(run_here("inspect", "deep", "--json").json["tensors"]) == 33


def test_layers_of_other_shapes_or_ranks_are_other_lines(folder: Path) -> None:
    tensors = {f"h.{n}.w": np.zeros((4, 8 + 8 * (n > 1)), np.float32) for n in range(4)}
    write_model(folder / "deep", **tensors)
    output = run_here("inspect", "deep").output
    assert "h.{0,1}.w" in output
    assert "h.{2,3}.w" in output


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        ("x, -", (8, 6), "dim 0 over 4"),
        ("-, x", (8, 6), "dim 1 over 3"),
        ("x, -", (3, 6), "dim 0 over 3"),
        ("x, y", (8, 6), "dim 0 over 4, dim 1 over 2"),
        ("y, -", (8, 6), "dim 0 over 2, 4 copies"),
        ("-, -", (8, 6), "whole"),
        ("x@cyclic1, -", (8, 6), "boxes"),
    ],
)
def test_shards_without_a_text(spec: str, shape: tuple[int, ...], expected: str) -> None:
    mesh = reshard.DeviceMesh.of(x=4, y=2) if "y" in spec else reshard.DeviceMesh.of(x=4)
    sharding = reshard.spec(mesh, spec)
    tensor = type("Tensor", (), {"spec": None, "layout": sharding.layout(shape)})()
    assert cut_text(tensor) == expected


def test_boxes_and_flat_ranges_are_boxes() -> None:
    flat = Layout.flat_ranges((4, 6), {0: (0, 7), 1: (7, 24)})
    tensor = type("Tensor", (), {"spec": None, "layout": flat})()
    assert cut_text(tensor) == "boxes"
