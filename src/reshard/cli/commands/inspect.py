"""`reshard inspect`: the tensors of a checkpoint, and whether its bytes are intact."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from reshard._validation import check_used
from reshard.checkpoint.options import ConversionRequest, RunOptions
from reshard.cli import output
from reshard.cli.endpoints import open_selected_source, source_options
from reshard.cli.options import as_path, check_picture, json_option, options_of, quiet_option
from reshard.cli.program import DIFFERS, DONE
from reshard.cli.progress import shown_progress
from reshard.errors import UsageError
from reshard.recipes.rank_order import describe_groups
from reshard.text import (
    FoldedName,
    bytes_text,
    count_text,
    fold_names,
    printable,
    rank_text,
    table,
    table_lines,
)

if TYPE_CHECKING:
    from reshard.checkpoint.blocks.tensor_columns import TensorColumns
    from reshard.checkpoint.comparison import DigestReport
    from reshard.checkpoint.contents import Checkpoint, StoredTensor
    from reshard.checkpoint.copy_checks import CopyReport


@click.command()
@click.argument("checkpoint", type=click.Path(), callback=as_path)
@click.option(
    "--digest", is_flag=True, help="Read every byte, and compare digests with the manifest."
)
@click.option(
    "--tensor",
    "patterns",
    multiple=True,
    metavar="GLOB",
    help="Only tensors whose names match. Repeatable.",
)
@options_of(ConversionRequest, "select")
@source_options
@click.option(
    "--picture", "drawn", metavar="NAME", help="Draw which rank holds which part of a tensor."
)
@options_of(RunOptions, "threads")
@click.option(
    "--all",
    "shows_all",
    is_flag=True,
    help="List every tensor, without folding those of layers and experts.",
)
@json_option
@quiet_option
def inspect(
    checkpoint: str,
    digest: bool,
    patterns: tuple[str, ...],
    select: str | None,
    drawn: str | None,
    threads: int | None,
    shows_all: bool,
    as_json: bool,
    quiet: bool,
    **source_cut: Any,
) -> int:
    """List tensors, dtypes, shapes, layouts, ranks and sizes of CHECKPOINT.

    Tensors of layers and experts that differ only in their numbers share a line:
    `model.layers.{0-31}.mlp.up_proj.weight`, with the size of all; --all and --json list each.
    If the files of ranks have no text for a sharding, as those of FSDP2, it is shown by dimensions:
    `dim 0 over 4`.

    CHECKPOINT is a folder, a file, an index file, or a URL. Only headers are read, and samples of
    copies that several ranks hold, if the files have no checksums of them. With --digest
    every byte is read and damaged blocks are listed with their location; the exit code is 1 if
    there are any.

    \b
    Examples:
      reshard inspect llama-3-8b
      reshard inspect llama-tp4 --tensor '*.mlp.*'
      reshard inspect llama-tp4 --picture lm_head.weight
      reshard inspect llama-tp4 --digest

    \b
    Keys of --json:
      path, format, mesh {text, axes, devices}, ranks, metadata
      tensors [{name, dtype, shape, cut, ranks, stored_by, size_bytes, digest}]
      items [{name, rank, size_bytes}] (bytes that are not tensors)
      files [{name, rank, size_bytes}], carried, left_out [{name, reason}]
      unreadable [{name, reason}] (tensors that cannot be read)
      attributes (plain values of the metadata, by name), notes
      values (plain values saved with the tensors, by name)
      totals {tensors, elements, tensor_bytes, files, file_bytes}
      copies (parts that several ranks hold) {parts, unchecked, read_bytes,
        differing [{tensor, part, ranks, found_by}], by_nature (the same), lost}
      digest_check (null without --digest) {read_bytes, without_digest,
        damaged [{tensor, box, expected, found, places, problem}]}
    """
    from reshard.checkpoint.copy_checks import compare_copies

    check_picture(drawn, as_json, quiet)
    check_used("--all", not (shows_all and quiet), "with --quiet nothing is listed")
    check_used(
        f"--threads {threads}",
        threads is None or digest,
        "reading headers takes one thread, and --digest, which reads every byte, takes several",
    )
    opened = open_selected_source(checkpoint, select, **source_cut)
    # Only the tensors that are shown are checked.
    shown = _choose_tensors(opened, patterns)
    copies = compare_copies(shown)
    report = None
    if digest:
        from reshard.checkpoint.comparison import check_digests

        with shown_progress("checking", quiet) as progress:
            report = check_digests(shown, threads=threads, progress=progress)
    drawing = _drawing(opened[drawn]) if drawn is not None else None
    if as_json:
        output.write_json(_as_json(checkpoint, shown, report, copies))
    elif not quiet:
        lines = _as_text(checkpoint, shown, report, copies, drawing, shows_all)
        output.write_pieces(f"{line}\n" for line in lines)
    return DIFFERS if report is not None and report.damaged else DONE


def _choose_tensors(checkpoint: Checkpoint, patterns: tuple[str, ...]) -> Checkpoint:
    """Return the checkpoint with only the tensors that a pattern matches; all without patterns."""
    if not patterns:
        return checkpoint
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in checkpoint.tensors):
            for name in checkpoint.unreadable:
                if fnmatchcase(name, pattern):
                    _ = checkpoint[name]
            raise UsageError(
                f"--tensor {pattern!r} matches none of {len(checkpoint)} tensors, such as "
                f"{next(iter(checkpoint), None)!r}; write a glob for whole names: `*` stands for "
                "any characters"
            )
    tensors = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    unreadable = {
        name: why
        for name, why in checkpoint.unreadable.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    return checkpoint.replace(tensors=tensors, unreadable=unreadable)


def _drawing(tensor: StoredTensor) -> str:
    from reshard.show.text_picture import MIN_WIDTH, picture

    width = max(MIN_WIDTH, min(shutil.get_terminal_size().columns, 100))
    title = f"{printable(tensor.name)}  {_shape_text(tensor)}  {output.cut_text(tensor)}"
    return f"{title}\n{picture(tensor.layout, width, ascii=not output.can_draw_boxes())}"


def _shape_text(tensor: StoredTensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _as_text(
    path: str,
    checkpoint: Checkpoint,
    report: DigestReport | None,
    copies: CopyReport,
    drawing: str | None,
    shows_all: bool,
) -> Iterator[str]:
    from reshard.checkpoint.blocks.tensor_columns import TensorColumns

    mesh = f", over {checkpoint.mesh.text}" if checkpoint.mesh is not None else ""
    ranks = count_text(checkpoint.ranks, "rank")
    totals = _totals(checkpoint)
    yield f"{printable(path)}: {checkpoint.format}{mesh}, {ranks}"
    if checkpoint.mesh is not None and "pp" in checkpoint.mesh.list_long_axes():
        yield f"stages: {describe_groups(checkpoint.mesh, 'pp')}"
    yield ""
    yield from _tensor_lines(TensorColumns.of(checkpoint.tensors), shows_all)
    yield from [
        "",
        table(
            [
                (printable(file.name), file.rank, bytes_text(file.size_bytes))
                for file in checkpoint.files
            ],
            ("file", "rank", "size"),
            "lrr",
        ),
        "",
        f"{count_text(totals['tensors'], 'tensor')}, {count_text(totals['elements'], 'element')}, "
        f"{bytes_text(totals['tensor_bytes'])}, in {count_text(totals['files'], 'file')} of "
        f"{bytes_text(totals['file_bytes'])}",
        *output.listing(
            "unreadable", [f"{name} ({why})" for name, why in checkpoint.unreadable.items()]
        ),
        *output.listing("no tensors, but bytes", checkpoint.items),
        *output.listing("carried along", checkpoint.carried),
        *output.listing("attributes", checkpoint.attributes),
        *output.listing("values", checkpoint.values),
        *output.listing(
            "left out", [f"{name} ({reason})" for name, reason in _list_left_out(checkpoint)]
        ),
        *(f"note: {printable(note)}" for note in _list_notes(checkpoint)),
        *_copy_lines(copies),
    ]
    if drawing is not None:
        yield from ["", drawing]
    if report is not None:
        yield from ["", *_digest_lines(report)]


def _tensor_lines(columns: TensorColumns, shows_all: bool) -> Iterator[str]:
    """Yield a table of the tensors, those of layers and experts folded unless all are asked for."""
    # For equal tensors, everything except the name is formatted once.
    samples = [columns.sample(number) for number in range(len(columns.kinds))]
    kinds = [
        (
            tensor.dtype.name,
            _shape_text(tensor),
            output.cut_text(tensor),
            rank_text(tensor.layout.holders),
        )
        for tensor in samples
    ]
    kind_of = columns.kind.tolist()
    if shows_all:
        folded = [FoldedName(*item, 1) for item in zip(columns.names, kind_of, strict=True)]
    else:
        # Kinds that differ in their places in files alone look the same.
        alike: dict[tuple[str, ...], int] = {}
        first = [alike.setdefault(kind, number) for number, kind in enumerate(kinds)]
        folded = fold_names(columns.names, [first[kind] for kind in kind_of])
    headers = ["dtype", "shape", "sharding", "ranks", "size"]
    rows: list[tuple[str, ...]] = [
        (*kinds[line.kind], bytes_text(line.number * samples[line.kind].size_bytes))
        for line in folded
    ]
    if len(folded) < len(columns.names):
        headers.insert(0, "number")
        rows = [(count_text(line.number), *row) for line, row in zip(folded, rows, strict=True)]
    most = output.name_columns(zip(headers, *rows, strict=True))
    yield from table_lines(
        ((output.name_text(line.text, most), *row) for line, row in zip(folded, rows, strict=True)),
        ("tensor", *headers),
        "l" + "".join("r" if header in ("number", "size") else "l" for header in headers),
    )


def _copy_lines(copies: CopyReport) -> Iterator[str]:
    for difference in copies.differing:
        yield f"copies differ: {printable(str(difference))}"
    yield from (f"note: {printable(note)}" for note in copies.describe())


def _list_left_out(checkpoint: Checkpoint) -> tuple[tuple[str, str], ...]:
    return (*checkpoint.left_out, *checkpoint.unread)


def _list_notes(checkpoint: Checkpoint) -> list[str]:
    from reshard.checkpoint.training.model_sets import describe_model_sets, find_model_sets
    from reshard.checkpoint.training.state import shapes_without_state

    sets = find_model_sets(shapes_without_state(checkpoint))
    return [*checkpoint.notes, *([describe_model_sets(sets)] if sets else [])]


def _digest_lines(report: DigestReport) -> list[str]:
    checked = sum(name not in report.without_digest for name in report.digests)
    lines = []
    for block in report.damaged:
        problem = block.problem or f"its digest is {block.found}, {block.expected} was written"
        lines.append(f"damaged: {block.box} of {printable(block.tensor)}: {printable(problem)}")
        lines += [f"  {printable(place)}" for place in block.places]
    if report.without_digest:
        lines += output.listing("no digest was recorded for", report.without_digest)
    # Without any recorded digest, the absence of damage shows nothing.
    verdict = (
        f"{count_text(len(report.damaged), 'block')} damaged"
        if report.damaged
        else "all as written"
        if checked
        else "nothing to compare with"
    )
    lines.append(
        f"read {bytes_text(report.read_bytes)}, compared the digests of "
        f"{count_text(checked, 'tensor')}: {verdict}"
    )
    return lines


def _tensors_json(checkpoint: Checkpoint, report: DigestReport | None) -> Iterator[dict[str, Any]]:
    from reshard.checkpoint.blocks.tensor_columns import TensorColumns

    columns = TensorColumns.of(checkpoint.tensors)
    # For equal tensors, everything except name and digest is built once.
    kinds = [
        {
            "dtype": tensor.dtype.name,
            "shape": list(tensor.shape),
            "cut": output.cut_text(tensor),
            "ranks": [int(slot) for slot in tensor.layout.holders],
            "stored_by": [int(slot) for slot in tensor.stored_slots],
            "size_bytes": tensor.size_bytes,
        }
        for tensor in map(columns.sample, range(len(columns.kinds)))
    ]
    recorded = columns.digests
    for row, (name, kind) in enumerate(zip(columns.names, columns.kind.tolist(), strict=True)):
        digest = None
        # The digests that were just computed if bytes were read, else those in the manifest.
        if report is not None:
            digest = report.digests.get(name)
        elif recorded is not None and (recorded.known is None or recorded.known[row]):
            digest = recorded.of_tensor(row).hex()
        yield {"name": name, **kinds[kind], "digest": digest}


def _totals(checkpoint: Checkpoint) -> dict[str, int]:
    from reshard.checkpoint.blocks.tensor_columns import shapes_of

    return {
        "tensors": len(checkpoint),
        "elements": sum(map(math.prod, shapes_of(checkpoint.tensors).values())),
        "tensor_bytes": checkpoint.size_bytes,
        "files": len(checkpoint.files),
        "file_bytes": sum(file.size_bytes for file in checkpoint.files),
    }


def _as_json(
    path: str, checkpoint: Checkpoint, report: DigestReport | None, copies: CopyReport
) -> dict[str, Any]:
    return {
        "path": path,
        "format": checkpoint.format,
        "mesh": output.mesh_json(checkpoint.mesh),
        "ranks": checkpoint.ranks,
        "metadata": dict(checkpoint.metadata),
        "tensors": _tensors_json(checkpoint, report),
        "files": [output.file_json(file) for file in checkpoint.files],
        "items": [
            {"name": item.name, "rank": item.rank, "size_bytes": item.size_bytes}
            for item in checkpoint.items.values()
        ],
        "carried": list(checkpoint.carried),
        "attributes": list(checkpoint.attributes),
        "values": list(checkpoint.values),
        "left_out": [{"name": name, "reason": why} for name, why in _list_left_out(checkpoint)],
        "unreadable": [
            {"name": name, "reason": why} for name, why in checkpoint.unreadable.items()
        ],
        "notes": _list_notes(checkpoint),
        "totals": _totals(checkpoint),
        "copies": {
            "parts": copies.parts,
            "unchecked": copies.unchecked,
            "read_bytes": copies.read_bytes,
            "differing": [dataclasses.asdict(difference) for difference in copies.differing],
            "lost": list(copies.lost),
            "by_nature": [dataclasses.asdict(difference) for difference in copies.by_nature],
        },
        "digest_check": report
        and {
            "read_bytes": report.read_bytes,
            "without_digest": list(report.without_digest),
            "damaged": [dataclasses.asdict(block) for block in report.damaged],
        },
    }
