"""The files of `tools/constraints` fit the metadata: each command of `make` sets up from them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tools" / "constraints"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [
    line.rpartition(" ")[2]
    for line in PROJECT["classifiers"]
    if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", line)
]


def read_pins(name: str) -> dict[str, str]:
    lines = (FOLDER / name).read_text().splitlines()
    pins = [line.partition("==") for line in lines if not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, _, version in pins}


@pytest.mark.parametrize("name", [*(f"python{python}.txt" for python in PYTHONS), "oldest.txt"])
def test_constraints_name_packages_and_versions_alone(name: str) -> None:
    lines = (FOLDER / name).read_text().splitlines()
    assert lines[0].startswith("# ")
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines[1:])


@pytest.mark.parametrize("python", PYTHONS)
def test_each_python_of_the_metadata_has_constraints_for_the_tests(python: str) -> None:
    pins = read_pins(f"python{python}.txt")
    for line in PROJECT["optional-dependencies"]["test"]:
        package = re.match(r"[\w.-]+", line)
        assert package
        name = re.sub(r"[-_.]+", "-", package[0]).lower()
        exact = line.partition("==")[2]
        assert name == "reshard" or pins[name] == (exact or pins[name])


def test_the_oldest_versions_are_those_of_the_metadata() -> None:
    pins = read_pins("oldest.txt")
    extras = PROJECT["optional-dependencies"]
    names = ["checkpoint", "cli", "planning", "spmd", "s3", "hf", "torch"]
    for line in [*PROJECT["dependencies"], *(line for name in names for line in extras[name])]:
        if floor := re.fullmatch(r"([\w.-]+)>=([\d.]+)", line):
            version = pins[re.sub(r"[-_.]+", "-", floor[1]).lower()]
            assert f"{version}.".startswith(f"{floor[2]}."), line
    assert "jax" not in pins
