"""Planning a conversion of any kind from plain arguments, such as those that JSON can say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from reshard.checkpoint import (
    Checkpoint,
    Conversion,
    open_checkpoint,
    plan_application,
    plan_conversion,
    plan_for_pretrained,
)


def plan_any(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    opening: Mapping[str, Any] | None = None,
    deltas: list[str] | None = None,
    is_pretrained: bool = False,
    **options: Any,
) -> Conversion:
    """The plan of `plan_conversion`, of `plan_for_pretrained`, or with `deltas` applied.

    `opening` are arguments of `open_checkpoint`.
    """
    given: str | os.PathLike[str] | Checkpoint = source
    if opening:
        given = open_checkpoint(source, **opening)
    if deltas is not None:
        return plan_application(given, deltas, target, **options)
    plan = plan_for_pretrained if is_pretrained else plan_conversion
    return plan(given, target, **options)
