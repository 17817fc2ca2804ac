"""Files with an engine's layout, as `reshard recipe derive` writes them."""

from __future__ import annotations

import os
from pathlib import Path

from reshard.errors import RecipeError, ReshardError
from reshard.plans.documents.serialization import from_json
from reshard.recipes.engine_layouts.engine_layout import EngineLayout


def read_layout_file(path: str | os.PathLike[str]) -> EngineLayout:
    """The engine's layout in a file.

    Raises RecipeError for a file that is not there, or has something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"cannot read the layout file {os.fspath(path)}: {error.strerror or error}; "
            "`reshard recipe derive` writes one"
        ) from error
    except ValueError:
        text = ""
    try:
        layout = from_json(text)
    except ReshardError as error:
        raise RecipeError(f"the layout file {os.fspath(path)}: {error}") from error
    if not isinstance(layout, EngineLayout):
        raise RecipeError(
            f"{os.fspath(path)} has a {type(layout).__name__}, no layout of an engine; `reshard "
            "recipe derive` writes one"
        )
    return layout
