"""The conda recipe that is committed says what pyproject.toml says."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(autouse=True)
def with_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def test_the_recipe_is_what_pyproject_makes() -> None:
    from conda_recipe import RECIPE, recipe_text

    assert RECIPE.read_text("utf-8") == recipe_text(PROJECT), "python tools/conda_recipe.py"


def test_the_recipe_has_what_the_command_needs() -> None:
    from conda_recipe import RECIPE

    recipe = yaml.safe_load(RECIPE.read_text("utf-8"))
    needed = {text.split()[0] for text in recipe["requirements"]["run"]}
    assert needed == {
        *("python", "numpy", "click", "rich", "ml_dtypes", "python-xxhash", "python-zlib-ng"),
        "zstandard",
    }
    left = {text.split()[0] for text in recipe["requirements"]["run_constraints"]}
    assert {"pytorch", "jax", "scipy", "obstore", "boto3"} <= left
    assert not left & needed
    assert recipe["build"]["python"]["entry_points"] == ["reshard = reshard.cli:main"]
    assert recipe["package"] == {"name": "reshard", "version": PROJECT["project"]["version"]}


def test_a_requirement_that_cannot_be_said_is_an_error() -> None:
    from conda_recipe import conda_requirements

    assert conda_requirements(["xxhash>=3.4", "click>=8.1", "xxhash>=3.4"]) == [
        "click >=8.1",
        "python-xxhash >=3.4",
    ]
    with pytest.raises(ValueError, match=r"torch==2\.13\.0"):
        conda_requirements(["torch==2.13.0"])
