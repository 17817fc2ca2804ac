"""Sources of commands, where options say how they are cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from reshard.checkpoint.contents import CHECK_COPIES
from reshard.errors import UsageError

if TYPE_CHECKING:
    from reshard.checkpoint.contents import Checkpoint


def open_selected_source(path: str, select: str | None, **source_cut: Any) -> Checkpoint:
    """Open the checkpoint at a path, or the model of it that `--select` names.

    Raises:
        UsageError: rules or a recipe without a mesh; a prefix that no tensor has.
    """
    from reshard.checkpoint.formats.opening import open_checkpoint

    source = open_source(path, **source_cut) if source_cut else path
    opened = open_checkpoint(source) if isinstance(source, str) else source
    if select is None:
        return opened
    from reshard.checkpoint.conversion.source_selection import select_from
    from reshard.checkpoint.naming.selection import TensorSelection

    return select_from(opened, TensorSelection(select=select))


def open_source(
    path: str,
    source_mesh: str | None = None,
    source_rules: tuple[str, ...] = (),
    source_recipe: str | None = None,
    check_copies: str = CHECK_COPIES[0],
    allow: Iterable[str] = (),
) -> str | Checkpoint:
    """Open the checkpoint at a path as the options specify; return the path if they do not.

    Raises:
        UsageError: rules or a recipe without a mesh.
    """
    from reshard.checkpoint.formats.opening import open_checkpoint

    if source_mesh is None:
        if source_rules or source_recipe is not None:
            given = "--source-rule" if source_rules else "--source-recipe"
            raise UsageError(f"{given} without --source-mesh; give the mesh of the ranks: tp=2")
        if check_copies == CHECK_COPIES[0] and not allow:
            return path
    return open_checkpoint(
        path,
        mesh=source_mesh,
        rules=source_rules,
        recipe=source_recipe,
        check_copies=check_copies,
        allow=allow,
    )
