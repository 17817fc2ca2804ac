"""Tests that need an engine: each runs in the environment that `make engines` builds for it.

`make test` collects none of them: it replays what they recorded in `tests/golden/engines`. With
RESHARD_ENGINE set to the name of an engine, the tests of this folder are collected; those that
need another engine skip themselves.
"""

from __future__ import annotations

import os
from pathlib import Path

collect_ignore_glob = [] if os.environ.get("RESHARD_ENGINE") else ["*"]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Take no modules but tests: others are programs of one engine, and need its libraries."""
    is_module = collection_path.suffix == ".py"
    return True if is_module and not collection_path.name.startswith("test_") else None
