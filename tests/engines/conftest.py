"""Tests that need an engine: each runs in the environment that `make engines` builds for it.

`make test` collects none of them: it replays what they recorded in `tests/golden/engines`. With
RESHARD_ENGINE set to the name of an engine, the tests of this folder are collected; those that
need another engine skip themselves.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("RESHARD_ENGINE") else ["*"]
