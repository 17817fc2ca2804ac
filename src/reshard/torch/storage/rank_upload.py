"""Upload of a rank's files to an object store while the rank still writes them.

::

    file     |head|..... w .....|tail|head|......... b .........|tail|
    parts    |------A------|------B------|------C------|------D------|

    w and b are written  -->  a part is complete  -->  a thread uploads it, and frees its space

1. The heads are written at the beginning. Missing bytes are counted for every part.
2. Tails contain checksums of the preceding data. A thread iterates over each file's tails, and
   writes a tail as soon as all ranges of its checksums are written.
3. At the end, parts with bytes that are never written are uploaded too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from reshard.checkpoint.blocks.block_io import OpenFiles
from reshard.checkpoint.formats.write_plan import NewFile
from reshard.checkpoint.storage.filesystem import Closing
from reshard.checkpoint.storage.local_files import TargetFile
from reshard.checkpoint.storage.range_checksums import RangeChecksums
from reshard.checkpoint.storage.uploads import PartSender, SentFile, Upload
from reshard.errors import RunError
from reshard.torch.storage.folder_save import make_files

_REQUESTS = 16


class RankUpload(Closing):
    """The upload of the files that a rank alone writes.

    Args:
        upload: of the files; closed with this object.
        files: created in the folder, with their full size and the bytes that are already known.
        folder: the folder in which they are staged.

    Raises RunError for files that cannot be created.
    """

    def __init__(self, upload: Upload, files: Sequence[NewFile], folder: Path) -> None:
        self._upload, self._files, self._folder = upload, tuple(files), folder
        self._numbers = {file.stored.name: number for number, file in enumerate(files)}
        sizes = {file.stored.name: file.stored.size_bytes for file in files}
        # Sparse files, since the space of uploaded parts is released while others are written.
        self.targets: OpenFiles[TargetFile] = OpenFiles(
            lambda name: TargetFile(folder / name, sizes[name], is_sparse=True)
        )
        grid = upload.grid
        self._left = [stop - start for _, start, stop in map(grid.range_of, range(grid.count))]
        self._checksums = RangeChecksums({one.stored.name: one.checked_ranges for one in files})
        self._awaited: dict[tuple[str, int], Future[int]] = {
            (one.stored.name, start): Future() for one in files for start, _ in one.checked_ranges
        }
        self._lock = threading.Lock()
        self._sender = PartSender(self._send, _REQUESTS)
        self._closing = ThreadPoolExecutor(1, "reshard-close")
        make_files(folder, files, is_sparse=True)
        for file in files:
            for start, content in file.known_bytes():
                self.wrote(file.stored.name, start, start + len(content))
        self._closed = self._closing.submit(self._write_closing_bytes)

    def wrote(self, file: str, start_bytes: int, stop_bytes: int) -> None:
        """Record that a range of a file is written, and upload the parts that it completes.

        Raises RunError if a part could not be uploaded, or a range is written twice.
        """
        self._sender.check()
        whole = []
        number = self._numbers[file]
        first = self._upload.grid.parts_of(number).start
        part_bytes = int(self._upload.grid.part_bytes[number])
        with self._lock:
            for part in range(start_bytes // part_bytes, -(-stop_bytes // part_bytes)):
                low, high = part * part_bytes, (part + 1) * part_bytes
                self._left[first + part] -= min(stop_bytes, high) - max(start_bytes, low)
                if self._left[first + part] < 0:
                    raise RunError(
                        f"bytes {start_bytes}:{stop_bytes} of {file} were written twice; expected "
                        "a plan with each box once: is it from a planner of your own?"
                    )
                if not self._left[first + part] and start_bytes < stop_bytes:
                    whole.append(first + part)
        for part in whole:
            self._sender.put(part)

    def contribute(self, file: str, start_bytes: int, checksum: int, seen_bytes: int) -> None:
        """Add a box's contribution to the checksum of the range at `start_bytes`."""
        key = (file, start_bytes)
        if key not in self._awaited:
            return
        self._checksums.contribute(file, start_bytes, checksum, seen_bytes)
        found = self._checksums.of(file, start_bytes)
        # Two threads that write the last boxes of a range may both see its complete checksum.
        with self._lock:
            if found is not None and not self._awaited[key].done():
                self._awaited[key].set_result(found)

    def finish(self) -> None:
        """Wait until everything is written and uploaded.

        Raises RunError if a range was not written, or the store rejects a part.
        """
        for (name, start), future in self._awaited.items():
            if not future.done():
                future.set_exception(
                    RunError(f"the rank did not write {name} from byte {start} on; save again")
                )
        self._closed.result()
        for part, missing_bytes in enumerate(self._left):
            if missing_bytes:
                self._sender.put(part)
        self._sender.finish()

    def _write_closing_bytes(self) -> None:
        for file in self._files:
            name = file.stored.name
            for start, content in file.closing_bytes(partial(self._await_checksum, name)):
                self.targets[name].write(memoryview(bytearray(content)), start)
                self.wrote(name, start, start + len(content))

    def _await_checksum(self, file: str, start_bytes: int, size_bytes: int) -> int:
        return self._awaited[file, start_bytes].result() if size_bytes else 0

    def _send(self, part: int) -> None:
        number, start, stop = self._upload.grid.range_of(part)
        self._upload.send(part, self._folder, None)
        self.targets[self._files[number].stored.name].release(start, stop)

    def close(self) -> None:
        """Stop the threads, and close files and connections. Uploaded parts stay."""
        for future in self._awaited.values():
            future.cancel()
        self._closing.shutdown(cancel_futures=True)
        self._sender.close()
        self.targets.close()
        self._upload.close()


def as_sent(files: Sequence[NewFile]) -> tuple[SentFile, ...]:
    """Return the names and sizes of files for an upload."""
    return tuple(SentFile(file.stored.name, file.stored.size_bytes) for file in files)
