"""Sources of commands: the options that describe how a source is sharded, and opening it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from reshard.checkpoint.contents import CHECK_COPIES
from reshard.cli.options import Command
from reshard.errors import UsageError
from reshard.recipes.overrides import DIFFERING_COPIES

if TYPE_CHECKING:
    from reshard.checkpoint.contents import Checkpoint


check_copies_option = click.option(
    "--check-copies",
    type=click.Choice(CHECK_COPIES),
    default=CHECK_COPIES[0],
    show_default=True,
    help="Compare the copies that several ranks hold of a part: by checksums in the files and "
    "samples of at most 1 % of the bytes, every byte, or not at all.",
)
allow_copies_option = click.option(
    "--allow",
    multiple=True,
    type=click.Choice([DIFFERING_COPIES]),
    help="Accept copies that differ: those of the lowest rank are read.",
)
_OPTIONS = (
    click.option(
        "--source-mesh",
        metavar="MESH",
        help="The mesh that wrote the source, where its files lack an axis, such as for plain "
        "tensors in one file per rank: tp=2.",
    ),
    click.option(
        "--source-rule",
        "source_rules",
        multiple=True,
        metavar="GLOB=SPEC",
        help="How --source-mesh sharded the tensors: '*.weight=tp, -'. Repeatable; the first rule "
        "that matches applies.",
    ),
    click.option(
        "--source-recipe",
        metavar="NAME|FILE|auto",
        help="Instead of --source-rule: the rules of a recipe.",
    ),
    check_copies_option,
)


def source_options(command: Command) -> Command:
    """Add the options of `open_source`: how the source is sharded, and how copies are compared."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


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
    from reshard.checkpoint.naming.selection import TensorSelection, select_from

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
