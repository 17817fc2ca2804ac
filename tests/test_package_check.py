"""The check of built packages covers every extra, and reads the README's quickstart."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import yaml

import reshard

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def with_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def test_every_extra_for_users_is_installed_or_checked() -> None:
    from package_check import BY_METADATA, FOR_DEVELOPMENT, PROGRAMS

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = {*project["optional-dependencies"]}
    assert extras == {*PROGRAMS, *BY_METADATA, *FOR_DEVELOPMENT} - {""}
    for extra, requirements in BY_METADATA.items():
        assert requirements == {*project["optional-dependencies"][extra]}


def test_a_wheel_without_a_licence_or_a_requirement_is_refused() -> None:
    from package_check import find_missing

    good = (
        "License-Expression: Apache-2.0\nLicense-File: LICENSE\nProvides-Extra: vllm\n"
        'Requires-Dist: reshard[torch]; extra == "vllm"\n'
        'Requires-Dist: vllm>=0.30; extra == "vllm"\n'
    )
    assert find_missing(good) == []
    assert find_missing(good.replace("License-File: LICENSE\n", ""))
    assert find_missing(good.replace("0.30", "0.1")) == ["extra 'vllm' does not require vllm>=0.30"]


def test_the_quickstart_is_one_installation_and_commands_with_output() -> None:
    from package_check import read_quickstart

    install, session = read_quickstart((ROOT / "README.md").read_text("utf-8"))
    assert install == ["pip install '.[cli]'"]
    assert [command.split()[:2] for command, _ in session] == [
        ["reshard", name] for name in ("example", "convert", "inspect", "verify")
    ]
    assert all(output for _, output in session)


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert reshard.__version__ == project["version"] == citation["version"]
    assert project["license"] == citation["license"]
    assert f"## {reshard.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_issue_forms_ask_for_the_checkpoint_and_the_versions() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    asked = {}
    for path in forms:
        body = yaml.safe_load(path.read_text("utf-8")).get("body", [])
        asked[path.stem] = {item["attributes"].get("label") for item in body}
    assert asked.pop("config") == set()
    assert len(asked) == 2
    assert all({"reshard inspect", "reshard version --all"} <= labels for labels in asked.values())


def test_hooks_run_the_commands_of_make_lint() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    lint = makefile.partition("\nlint: venv\n")[2].partition("\n\n")[0]
    commands = [line.strip().replace("$(VENV)", ".venv") for line in lint.splitlines()]
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert [hook["entry"] for hook in hooks["hooks"]] == [
        command.removesuffix(" .") for command in commands
    ]
