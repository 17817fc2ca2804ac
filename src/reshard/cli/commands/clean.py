"""`reshard clean`: the remains of unfinished conversions to an address."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reshard.checkpoint.options import RunOptions
from reshard.cli import output
from reshard.cli.options import as_path as as_text
from reshard.cli.options import json_option, options_of
from reshard.cli.program import DONE
from reshard.errors import UsageError
from reshard.text import bytes_text, count_text, duration_text, printable, table

if TYPE_CHECKING:
    from reshard.checkpoint.storage.remote_paths import RemotePath
    from reshard.checkpoint.storage.uploads import OrphanedUpload


@click.command()
@click.argument("url", callback=as_text)
@click.option("--yes", is_flag=True, help="Remove what is listed.")
@options_of(RunOptions, "staging")
@json_option
def clean(url: str, yes: bool, staging: str | None, as_json: bool) -> int:
    """List what unfinished conversions left at a URL.

    Lists, at URL and below it, what conversions that did not complete have left: uploads with their
    parts, and the markers by which the same command would continue. With --yes they are removed,
    together with the files staged for them on this machine; nothing else is removed. Conversions
    that are still running are listed too: check the age.

    \b
    Examples:
      reshard clean s3://bucket/models
      reshard clean s3://bucket/models/llama --yes

    \b
    Keys of --json:
      url, removed, uploads [{target, conversion, size_bytes, files, age_s, half_visible, staged}]
    """
    from reshard.checkpoint.conversion.uploads import find_staged, remove_staged
    from reshard.checkpoint.storage.remote_paths import RemotePath, as_path
    from reshard.checkpoint.storage.uploads import find_orphaned_uploads, remove_orphaned_uploads

    folder = as_path(url)
    if not isinstance(folder, RemotePath):
        raise UsageError(
            f"{url} is a path of this machine; an interrupted conversion left a hidden "
            "folder next to its target, which the same command with --restart discards"
        )
    orphans = find_orphaned_uploads(folder)
    staged = {item.target: find_staged(item.target, staging) for item in orphans}
    if yes:
        remove_orphaned_uploads(orphans)
        for item in orphans:
            if not item.is_half_visible:
                remove_staged(item.target, staging)
    if as_json:
        uploads = [_as_json(item, staged[item.target]) for item in orphans]
        output.write_json({"url": str(folder), "removed": yes, "uploads": uploads})
    else:
        output.write("\n".join(_as_text(folder, orphans, staged, yes)))
    return DONE


def _as_text(
    folder: RemotePath,
    orphans: list[OrphanedUpload],
    staged: dict[RemotePath, list[Path]],
    is_removed: bool,
) -> list[str]:
    if not orphans:
        return [f"nothing is left of conversions to {printable(str(folder))}"]
    rows = [
        (
            printable(str(item.target)),
            bytes_text(item.size_bytes),
            count_text(len(item.uploads)),
            duration_text(_age_s(item)),
            "partly visible" if item.is_half_visible else "",
            printable(", ".join(map(str, staged[item.target]))),
        )
        for item in orphans
    ]
    lines = [
        table(rows, ("target", "parts", "files", "begun ago", "", "staged here"), "lrrrll"),
        "",
    ]
    is_half = any(item.is_half_visible for item in orphans)
    if is_half:
        lines.append(
            "partly visible targets are kept: run the same command again to complete them, or "
            "delete the folder with the store's own tools"
        )
    if not all(item.is_half_visible for item in orphans):
        lines.append(
            "removed" if is_removed else "nothing was removed; --yes removes what is listed"
        )
    return lines


def _age_s(item: OrphanedUpload) -> float:
    return max(time.time() - item.began_s, 0.0)


def _as_json(item: OrphanedUpload, staged: list[Path]) -> dict[str, Any]:
    return {
        "target": str(item.target),
        "conversion": item.conversion_id,
        "size_bytes": item.size_bytes,
        "files": len(item.uploads),
        "age_s": _age_s(item),
        "half_visible": item.is_half_visible,
        "staged": str(staged[0]) if staged else None,
    }
