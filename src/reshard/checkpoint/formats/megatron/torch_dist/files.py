"""Names of the format `torch_dist` and of its files, and the backend that one of them names."""

from __future__ import annotations

import json
from pathlib import Path

FORMAT_NAME = "torch-dist"
BACKEND = "torch_dist"
CONFIG_NAME = "metadata.json"
COMMON_NAME = "common.pt"
_LARGEST_CONFIG_BYTES = 1 << 20


def backend_of(folder: Path) -> str | None:
    """The backend that `metadata.json` names; None where there is none of Megatron's."""
    path = folder / CONFIG_NAME
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_LARGEST_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    backend = content.get("sharded_backend") if isinstance(content, dict) else None
    return backend if isinstance(backend, str) else None
