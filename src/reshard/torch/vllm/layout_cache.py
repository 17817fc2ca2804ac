"""Layouts of engines, kept in files: what was traced once needs no engine again.

    $RESHARD_CACHE/layouts/vllm-0.32.0/0f3c....json

The folder is `$RESHARD_CACHE`, else `reshard` in `$XDG_CACHE_HOME` or `~/.cache`. A file's name is
a digest of all that the layout follows from beside the engine: the configuration, the parallelism,
the names, types and shapes of the checkpoint, and how layouts are traced.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.errors import ReshardError
from reshard.plans.serialization import from_json, to_json
from reshard.recipes.engine_layouts import EngineLayout

# One more where the tracer says something else of the same loader.
TRACING = 1


def cache_folder() -> Path:
    """Where layouts are kept, whether or not it is there."""
    if chosen := os.environ.get("RESHARD_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "reshard"


def request_digest(request: Mapping[str, Any]) -> str:
    """The digest of what a layout follows from, beside the engine.

    >>> request_digest({"tp": 2, "pp": 1}) == request_digest({"pp": 1, "tp": 2})
    True
    """
    text = json.dumps([TRACING, request], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:40]


class LayoutCache:
    """The kept layouts of one engine.

    Args:
        engine: its name.
        folder: where files are; `cache_folder()` when None.
    """

    def __init__(self, engine: str, folder: str | os.PathLike[str] | None = None) -> None:
        self.engine = engine
        self.folder = (cache_folder() if folder is None else Path(folder)) / "layouts"

    def path(self, version: str, digest: str) -> Path:
        """The file of a layout."""
        return self.folder / f"{self.engine}-{version}" / f"{digest}.json"

    def read(self, version: str, digest: str) -> EngineLayout | None:
        """The layout that is kept, or None; a file that cannot be read is none."""
        try:
            found = from_json(self.path(version, digest).read_text())
        except (OSError, ReshardError):
            return None
        return found if isinstance(found, EngineLayout) else None

    def versions(self, digest: str) -> list[str]:
        """The versions of the engine for which a layout is kept, the newest last."""
        start = f"{self.engine}-"
        found = [path.parent.name for path in self.folder.glob(f"{start}*/{digest}.json")]
        return sorted((name.removeprefix(start) for name in found), key=_version_key)

    def write(self, layout: EngineLayout, digest: str) -> None:
        """Keep a layout. Where the folder cannot be written to, it is not kept."""
        path = self.path(layout.version, digest)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another process may read it, or write the same.
            handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
            with os.fdopen(handle, "w") as file:
                file.write(to_json(layout))
            os.replace(name, path)


def _version_key(version: str) -> list[tuple[int, int | str]]:
    """Numbers behind the words that stand for what comes before a release, as `rc` does."""
    parts = re.findall(r"\d+|[a-z]+", version)
    keys = [(2, int(part)) if part.isdigit() else (_rank_word(part), part) for part in parts]
    return [*keys, (1, "")]


def _rank_word(word: str) -> int:
    return 3 if word == "post" else 0
