"""The conda recipe, made of pyproject.toml: `python tools/conda_recipe.py` writes it anew.

Conda has no extras. The package has the command, and so what the extra `cli` brings; what the other
extras bring is left to the environment, within the versions that they ask for.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "packaging" / "conda" / "recipe.yaml"
# Where conda-forge has another name than the Python Package Index.
CONDA_NAMES = {"torch": "pytorch", "xxhash": "python-xxhash", "zlib-ng": "python-zlib-ng"}
# Extras for users, which are neither in the package nor made of others alone.
LEFT_TO_THE_ENVIRONMENT = ("planning", "spmd", "s3", "gcs", "azure", "hf", "torch", "jax", "vllm")

TEMPLATE = """\
# Made of pyproject.toml by tools/conda_recipe.py: `rattler-build build --recipe packaging/conda`.
schema_version: 1

package:
  name: {name}
  version: "{version}"

source:
  path: ../..

build:
  noarch: python
  script: ${{{{ PYTHON }}}} -m pip install . --no-deps --no-build-isolation -vv
  python:
    entry_points:
{entry_points}

requirements:
  host:
    - python {python}
    - pip
{host}
  run:
    - python {python}
{run}
  run_constraints:
{constraints}

tests:
  - python:
      imports:
        - reshard
        - reshard.checkpoint
      pip_check: true
  - script:
      - reshard --help
      - reshard inspect --help

about:
  summary: {summary}
  license: {license}
  license_file: LICENSE
"""


def recipe_text(project: Mapping[str, Any]) -> str:
    """The recipe for what `pyproject.toml` says."""
    about, extras = project["project"], project["project"]["optional-dependencies"]
    run = conda_requirements([*about["dependencies"], *flat_extra("cli", extras)])
    optional = [text for extra in LEFT_TO_THE_ENVIRONMENT for text in flat_extra(extra, extras)]
    constraints = [text for text in conda_requirements(optional) if text not in run]
    scripts = [f"{name} = {place}" for name, place in about["scripts"].items()]
    return TEMPLATE.format(
        name=about["name"],
        version=about["version"],
        python=about["requires-python"],
        entry_points=_items(scripts, 6),
        host=_items(conda_requirements(project["build-system"]["requires"]), 4),
        run=_items(run, 4),
        constraints=_items(constraints, 4),
        summary=about["description"],
        license=about["license"],
    )


def flat_extra(extra: str, extras: Mapping[str, Sequence[str]]) -> list[str]:
    """The requirements of an extra, with those of the extras that it is made of."""
    found: list[str] = []
    for text in extras[extra]:
        own = re.fullmatch(r"reshard\[([\w,]+)\]", text)
        if own is None:
            found.append(text)
            continue
        for other in own[1].split(","):
            found += flat_extra(other, extras)
    return found


def conda_requirements(requirements: Sequence[str]) -> list[str]:
    """The same in conda's words, each once, in alphabetical order: `python-xxhash >=3.4`."""
    found = set()
    for text in requirements:
        match = re.fullmatch(r"([\w-]+)(>=[\d.]+)", text)
        if match is None:
            raise ValueError(f"{text!r} is no `name>=version`, which is all that is read here")
        found.add(f"{CONDA_NAMES.get(match[1], match[1])} {match[2]}")
    return sorted(found)


def _items(texts: Sequence[str], indent: int) -> str:
    return "\n".join(f"{' ' * indent}- {text}" for text in texts)


if __name__ == "__main__":
    made = recipe_text(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8")))
    RECIPE.parent.mkdir(parents=True, exist_ok=True)
    RECIPE.write_text(made, encoding="utf-8")
