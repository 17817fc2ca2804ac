"""The checkpoints that Orbax saved, unpacked once."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.formats.orbax.orbax_states import extract


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded checkpoints, one folder each; not to be changed."""
    return extract(tmp_path_factory.mktemp("orbax"))
