"""`reshard version` shows what a report of a problem needs, and imports no framework for it."""

from __future__ import annotations

import platform
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import reshard
from cli.command_runs import run_alone, run_here
from reshard.cli.commands.version import PACKAGES

ROOT = Path(__file__).parents[3]


def test_the_version_alone_is_one_line() -> None:
    assert run_here("version").output == run_here("--version").output
    assert run_here("version", "--json").json["packages"] == {}


def test_all_versions_are_those_installed(folder: Path) -> None:
    lines = run_here("version", "--all").output.splitlines()
    assert lines[0] == f"reshard {reshard.__version__}"
    assert lines[1].startswith(f"Python {platform.python_version()} ")
    assert lines[2] == platform.platform()
    assert f"numpy {version('numpy')}" in lines
    content = run_here("version", "--all", "--json").json
    assert content["packages"]["torch"] == version("torch")
    assert "vllm" in content["not_installed"]
    assert {*content["packages"], *content["not_installed"]} == {*PACKAGES}
    code = (
        "import sys; from reshard.cli import main; main()\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'jax', 'scipy')))"
    )
    assert run_alone("version", "--all", cwd=folder, code=code).code == 0


def test_packages_of_every_extra_are_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    names = {
        re.match(r"[\w-]+", text)[0]  # type: ignore[index]
        for extra in extras.keys() - {"test", "site", "soak"}
        for text in extras[extra]
    }
    assert names - {"reshard"} <= {*PACKAGES}
