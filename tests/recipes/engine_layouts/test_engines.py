"""The registry of engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from reshard import DeviceMesh
from reshard.errors import UsageError
from reshard.recipes.engine_layouts import EngineLayout, RankLayout
from reshard.recipes.engine_layouts.engines import ENGINES, derive_layout, register_engine


def derive(model: str, tp: int = 1, *, pp: int = 1, dtype: str = "auto") -> EngineLayout:
    mesh = DeviceMesh.of(pp=pp, tp=tp)
    ranks = [RankLayout(rank, {}) for rank in range(mesh.size)]
    return EngineLayout("toy", "1", mesh, {model: ("int8", ())}, ranks)


@pytest.fixture
def toy() -> Iterator[None]:
    register_engine("toy", "for tests", derive)
    yield
    del ENGINES["toy"]


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("sizes", ["tp=2", {"tp": 2}, DeviceMesh.of(tp=2)])
def test_sizes_are_given_in_any_way(sizes: Any) -> None:
    layout = derive_layout("toy", "model", sizes)
    assert layout.mesh.text == "pp=1,tp=2"
    assert [*layout.sources] == ["model"]


@pytest.mark.usefixtures("toy")
def test_unknown_engines_and_options_are_refused() -> None:
    with pytest.raises(UsageError, match="'ep' of a layout of toy; it has tp, pp"):
        derive_layout("toy", "model", "ep=2")
    with pytest.raises(UsageError, match=r"no engine 'tou' is known; it is one of .*toy"):
        derive_layout("tou", "model", "tp=2")
    with pytest.raises(UsageError, match="give a word"):
        register_engine("to y", "", derive)
    with pytest.raises(UsageError, match="give a function"):
        register_engine("toy", "", "module")


def test_functions_are_loaded_by_name() -> None:
    register_engine("late", "", "os.path:basename")
    try:
        with pytest.raises(UsageError, match="'tp' of a layout of late"):
            derive_layout("late", "model", "tp=2")
    finally:
        del ENGINES["late"]


@pytest.mark.parametrize("name", [*ENGINES])
def test_functions_of_known_engines_are_there(name: str) -> None:
    pytest.importorskip("torch")
    assert callable(ENGINES[name]._load())
    assert ENGINES[name].description
