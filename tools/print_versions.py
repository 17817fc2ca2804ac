"""Print the versions that tests run with, on one line: `make test` does."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("numpy", "torch", "jax")


def find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


if __name__ == "__main__":
    found = ", ".join(f"{package} {find_version(package)}" for package in PACKAGES)
    print(f"Python {platform.python_version()}, {found}")
