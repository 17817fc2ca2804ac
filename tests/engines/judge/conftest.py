"""Nothing here is a test, and most of it is for the environment of one engine."""

from __future__ import annotations

collect_ignore_glob = ["*"]
