"""A notation is one module and one row: what that takes, and what has it then.

The notation here writes each dimension as the mesh axes that cut it, dimensions apart by a bar:
`dp+tp|.`. Its module is this one.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import reshard
from cli.command_runs import run_here
from reshard import notation
from reshard.errors import NotationError
from reshard.notation import Notation, registry

MESH = reshard.DeviceMesh.of(dp=2, tp=4)


def parse_bars(
    text: str, mesh: reshard.DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> reshard.ShardingSpec:
    if mesh is None:
        raise NotationError(f"`{text}` names mesh axes; give a mesh")
    dims = [item.replace(".", "").split("+") for item in text.split("|")]
    return reshard.ShardingSpec(mesh, [[axis for axis in axes if axis] for axes in dims])


def bars_text(sharding: reshard.ShardingSpec) -> str:
    return "|".join("+".join(axis.name for axis in dim.axes) or "." for dim in sharding.dim_specs)


ROW = Notation("bars", __name__, "dp+tp|.", r"^[\w.+]+(?:\|[\w.+]+)+$")


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.NOTATIONS, ROW.name, ROW)


def test_its_texts_are_recognised_and_written() -> None:
    found = notation.read_sharding("tp|dp", MESH, (8, 8))
    assert found.notation is ROW
    assert found.sharding is reshard.spec(MESH, "tp, dp")
    assert ROW.text(reshard.spec(MESH, "dp tp, -")) == "dp+tp|."
    assert notation.read_sharding("bars:dp", MESH).sharding is reshard.spec(MESH, "dp")


def test_its_functions_are_public() -> None:
    # The package makes its lazy names from these when it is imported.
    assert ["parse_bars", "bars_text"] in registry.list_public_names().values()


def test_errors_show_its_example() -> None:
    with pytest.raises(NotationError, match=r"bars:dp\+tp\|\."):
        notation.read_sharding("x", MESH, notation="lama")


def test_the_command_reads_it() -> None:
    words = ["explain", "dp|tp", "dp+tp|.", "--mesh", "dp=2,tp=4", "--shape", "8x8"]
    run = run_here(*words)
    assert run.code == 0, run.errors
    assert "from dp|tp   (bars)" in run.output
