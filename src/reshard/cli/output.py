"""Output of the command: text for people, a JSON object for programs, or a file.

The whole output is written at once, when it is complete. A reader that closes the pipe early
(`| head`) is not an error, since the work was done. Names come from files that may not be trusted:
their control characters are escaped, so that a checkpoint cannot control the terminal.
A file is written completely or not at all; an existing file is replaced only with `--overwrite`.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.errors import UsageError
from reshard.system import sync
from reshard.text import cut_in_the_middle, display_width, printable

if TYPE_CHECKING:
    from reshard.checkpoint.contents import StoredFile, StoredTensor
    from reshard.mesh import DeviceMesh

LINE_WIDTH = 100
MAX_LISTED = 12
MIN_NAME_COLUMNS = 24
_ENCODER = json.JSONEncoder(indent=1)


def prepare_streams() -> None:
    """Escape characters that the encoding of the terminal lacks, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def write(text: str) -> None:
    """Write text and a line end to stdout. Raises `OSError`, except if the reader has left."""
    write_pieces([text, "\n"])


def write_pieces(pieces: Iterable[str]) -> None:
    """Write text to stdout piece by piece, with a single piece in memory. Raises as `write`."""
    # Python sets a standard stream to None if its descriptor was closed.
    if sys.stdout is None:
        return
    try:
        sys.stdout.writelines(pieces)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe, as `head` does.
        return
    except OSError as error:
        # The report of the failure names it.
        error.filename = "standard output"
        raise


def write_json(content: Mapping[str, Any]) -> None:
    """Write a JSON object to stdout.

    Values that are iterators are written as lists. Their items are encoded separately, since
    the text of very many items takes a tenth of the memory of their dicts.
    """
    write_pieces(_encode_pieces(content))


def _encode_pieces(content: Mapping[str, Any]) -> Iterator[str]:
    for number, (key, value) in enumerate(content.items()):
        yield f"{',' if number else '{'}\n {json.dumps(key)}: "
        if isinstance(value, Iterator):
            between = "["
            for item in value:
                yield f"{between}\n  {_indent(_ENCODER.encode(item), '  ')}"
                between = ","
            yield "[]" if between == "[" else "\n ]"
        else:
            yield _indent(_ENCODER.encode(value), " ")
    yield "\n}\n" if content else "{}\n"


def _indent(text: str, by: str) -> str:
    # Line ends within JSON strings are escapes.
    return text.replace("\n", f"\n{by}")


def write_error(text: str) -> None:
    """Write a line to stderr; a closed or broken stream is ignored."""
    if sys.stderr is None:
        return
    with suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def settle_streams() -> None:
    """Discard unread output, so that the interpreter does not write it again at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            with suppress(OSError):
                # The interpreter flushes again at exit: send the rest of the buffer to the null
                # device.
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def can_draw_boxes() -> bool:
    """Return whether stdout has box-drawing characters."""
    try:
        "─│▶…".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def listing(title: str, names: Iterable[str]) -> list[str]:
    """Return a title and names, on a single line if they fit; no lines if there are no names.

    >>> listing("replicated", ["a", "b"])
    ['replicated: a, b']
    """
    names = list(names)
    if not names:
        return []
    # A comma and a blank follow each name: more names do not fit into a line.
    if len(names) <= LINE_WIDTH // 3:
        line = f"{title}: {', '.join(map(printable, names))}"
        if display_width(line) <= LINE_WIDTH:
            return [line]
    # People read the first lines of a long list; programs use --json.
    rest = len(names) - MAX_LISTED
    more = [f"  ... and {rest:,} more, --json lists all"] if rest > 0 else []
    return [f"{title}:", *(f"  {name_text(name)}" for name in names[:MAX_LISTED]), *more]


def noted(notes: Sequence[str]) -> list[str]:
    """Return a line for each note; if there are many, for the first notes only.

    >>> noted(["tied"])
    ['note: tied']
    """
    rest = len(notes) - MAX_LISTED
    more = [f"... and {rest:,} more notes, --json lists all"] if rest > 0 else []
    return [f"note: {printable(note)}" for note in notes[:MAX_LISTED]] + more


def name_text(name: str, max_columns: int | None = LINE_WIDTH - 4) -> str:
    """Return a name, cut in the middle if it is wider; whole if `max_columns` is None.

    >>> len(name_text("model." * 99)), len(name_text("model." * 99, None))
    (96, 594)
    """
    text = printable(name)
    return text if max_columns is None else cut_in_the_middle(text, max_columns, ellipsis())


def ellipsis() -> str:
    """Return the ellipsis that stdout can encode."""
    return "…" if can_draw_boxes() else "..."


def name_columns(others: Iterable[Sequence[str]]) -> int | None:
    """Return the columns that a terminal has for names in the first column of a table.

    `others` are the other columns. Return None if stdout is not a terminal, since programs read
    whole names.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    taken = sum(2 + max(map(display_width, column), default=0) for column in others)
    return max(MIN_NAME_COLUMNS, shutil.get_terminal_size().columns - taken)


def cut_text(tensor: StoredTensor) -> str:
    """Return how a tensor is sharded.

    The result is the text of its sharding, `whole`, `dim 0 over 4` for a box on each of four ranks,
    or `boxes` for other layouts without a text.
    """
    if tensor.spec:
        return tensor.spec
    from reshard.layout import grid_text

    layout = tensor.layout
    if all(layout.local_shape(slot) == layout.shape for slot in layout.holders):
        return "whole"
    return grid_text(layout) or "boxes"


def mesh_json(mesh: DeviceMesh | None) -> dict[str, Any] | None:
    """Return a mesh for `--json`: keys `text`, `axes`, `devices`."""
    if mesh is None:
        return None
    return {
        "text": mesh.text,
        "axes": dict(zip(mesh.axis_names, mesh.shape, strict=True)),
        "devices": [int(device) for device in mesh.devices],
    }


def file_json(file: StoredFile) -> dict[str, Any]:
    """Return a tensor file for `--json`: keys `name`, `rank`, `size_bytes`."""
    return {"name": file.name, "rank": file.rank, "size_bytes": file.size_bytes}


def check_place(path: Path, overwrite: bool, what: str, example: str) -> None:
    """Check that a file can be written at `path`, before any work is done.

    `what` is a word for the file in errors, `example` a file name to suggest.

    Raises:
        UsageError: the path is a folder or an existing file, or its folder does not exist.
        RunError: the system does not permit access to the path.
    """
    from reshard.checkpoint.storage.filesystem import translate_os_errors

    with translate_os_errors(f"look at the {what}", path):
        if path.is_dir():
            raise UsageError(f"{path} is a folder; give a file for the {what}: {path}/{example}")
        if not path.parent.is_dir():
            raise UsageError(f"{path.parent} is not a folder; create it first, or write elsewhere")
        if not overwrite and os.path.lexists(path):
            raise _refuse_existing(path)


def write_whole(path: Path, text: str, overwrite: bool, what: str) -> None:
    """Write a file at a path that `check_place` has accepted.

    Raises:
        UsageError: the file was created in the meantime, and `overwrite` is not set.
        RunError: the system fails to write the file.
    """
    from reshard.checkpoint.storage.filesystem import translate_os_errors
    from reshard.checkpoint.storage.permissions import common_mode_bits, restrict_mode

    # In the same folder, since a rename works only within a file system.
    draft = path.with_name(f".reshard-{what}.{os.getpid()}")
    with translate_os_errors(f"write the {what}", path):
        try:
            replaced = common_mode_bits([path])
            with open(draft, "x", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                sync(file.fileno())
            # A report that replaces a private file stays private.
            restrict_mode(draft, replaced)
            _put_in_place(draft, path, overwrite)
        finally:
            # A rename moves the draft; a link or a failure leaves it.
            draft.unlink(missing_ok=True)


def _put_in_place(draft: Path, path: Path, overwrite: bool) -> None:
    if not overwrite:
        # A link fails if the file exists; a rename would replace it.
        try:
            os.link(draft, path)
        except FileExistsError:
            raise _refuse_existing(path) from None
        except OSError:
            # Some file systems do not support links: check, then rename.
            if os.path.lexists(path):
                raise _refuse_existing(path) from None
        else:
            return
    os.replace(draft, path)


def _refuse_existing(path: Path) -> UsageError:
    return UsageError(f"{path} exists; give --overwrite to replace it, or another name")
