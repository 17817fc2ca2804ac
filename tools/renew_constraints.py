"""Write the versions that the environments of `make` install, for the Python that runs this.

`make constraints` runs it with each Python: `tools/constraints/python3.11.txt` has the newest
versions that pip resolves for that Python, and `--oldest` writes `tools/constraints/oldest.txt`,
with each package that the metadata names at its lowest version, without jax. Nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tools" / "constraints"
# Extras for users whose packages the tests use, and what the tests need besides.
USER_EXTRAS = ("checkpoint", "cli", "planning", "spmd", "s3", "hf", "torch")
NEWEST = (".[test,site]", "build", "twine")
TEST_TOOLS = (
    *("flask", "flask-cors", "hypothesis", "ml_dtypes", "moto[s3]", "pytest", "pytest-xdist"),
    *("safetensors", "setuptools", "tensorstore"),
)


def lowest_versions() -> list[str]:
    """Return a requirement for each package of the metadata, at the version it starts from."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *(line for name in USER_EXTRAS for line in extras[name])]
    floors = [re.fullmatch(r"([\w.-]+)>=([\d.]+)", line) for line in named]
    return [f"{floor[1]}=={floor[2]}.*" for floor in floors if floor]


def resolve(requirements: list[str]) -> list[str]:
    """Return a line for each package that pip would install."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--dry-run", "--ignore-installed", "--report", "-"]
    run = subprocess.run(
        [*command, *options, *requirements], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    packages = [found["metadata"] for found in json.loads(run.stdout)["install"]]
    # A local version names a build, such as `+cpu`: without it each build satisfies the line.
    return sorted(
        f"{package['name'].lower()}=={package['version'].partition('+')[0]}"
        for package in packages
        if package["name"] != "reshard"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--oldest", action="store_true", help="write oldest.txt")
    oldest = parser.parse_args().oldest
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    path = FOLDER / ("oldest.txt" if oldest else f"python{version}.txt")
    lines = resolve([*lowest_versions(), *TEST_TOOLS] if oldest else [*NEWEST])
    title = "The lowest versions of the metadata" if oldest else "The newest versions"
    FOLDER.mkdir(exist_ok=True)
    path.write_text(
        f"# {title} for Python {version}, by `make constraints`.\n" + "\n".join(lines) + "\n"
    )
    print(f"{path.relative_to(ROOT)}: {len(lines)} packages")


if __name__ == "__main__":
    main()
