"""The staging folder: a new checkpoint appears whole or not at all.

It is written under another name next to the target, and renamed when it is complete::

    parent/
      llama-tp4/                      the target: the old checkpoint, or nothing
      .llama-tp4.reshard-staging/     the staging folder, on the same file system
        lock                          held by the process that works here
        content/                      the future target
        journal                       which blocks of content are on disk
        previous/                     the old target, between two renames (step 5)

A single-file target, such as `model.pt`, is staged in the same way; step 5 renames that file of
`content` to the target, and discards the rest of the folder.

1. Check the target before anything is written; lock the staging folder.
2. Finish a commit that an earlier run began (see below).
3. Make `content`, then the journal, so that the journal exists only if `content` was made. Without
   a journal, no block is known to be finished, and the rest of the folder is deleted.
4. The caller writes and syncs files in `content`, and records their blocks in the journal.
5. Commit: sync the folders; record in the journal that all is written; give `content` the
   target's name, by a single exchange if the file system supports it, else by moving the old
   target aside first; sync the names; only then delete the old target and the staging folder.

A run killed before the commit record resumes its blocks. If it was killed later, the next run only
has to determine whether the content was already renamed. A rename keeps a folder's inode number,
and the commit record contains that number: the folder that has it is the new checkpoint, under
whichever name it is found.

Several processes share one staging folder: process 0 opens and owns it, and every other process
begins its own journal (`journal.1`, `journal.2`, ...). At the end process 0 reads all journals.
Only this user can access the folder, which has mode 0700; links, and folders of other users, are
refused (`own_files`). If an earlier run's folder was open to others, or is a copy of the folder in
which its journal was begun, staged blocks count only if their bytes have the digests in the
journal.

Process 0 appends the journals that other processes of an earlier run left to its own, so that a
run may go on with another number of processes.
"""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from reshard.checkpoint.conversion.journal import (
    Commit,
    FinishedBlocks,
    Journal,
    JournalRecord,
    read_journal,
)
from reshard.checkpoint.formats.opening import (
    MODEL_FILES,
    OTHER_WEIGHTS,
    has_checkpoint,
    open_checkpoint,
)
from reshard.checkpoint.formats.registry import find_format, is_format_file
from reshard.checkpoint.manifest import MANIFEST_NAME, read_manifest
from reshard.checkpoint.options import RunOptions
from reshard.checkpoint.processes import Processes
from reshard.checkpoint.storage.filesystem import (
    Closing,
    FolderLock,
    check_own_folder,
    is_attribute_file,
    remove_folder,
    sync_folder,
    sync_folders_under,
    translate_os_errors,
)
from reshard.checkpoint.storage.permissions import (
    NO_LIMITS,
    ModeLimits,
    describe_foreign_link,
    restrict_file_mode,
    restrict_modes,
)
from reshard.checkpoint.storage.remote_paths import RemotePath, walk_folder
from reshard.checkpoint.storage.upload_marker import MARKER_FOLDER
from reshard.errors import ReshardError, RunError, UsageError
from reshard.system import exchange_names


class Staging(Closing):
    """A context manager for an unfinished checkpoint folder, owned by this process until exit.

    An exit without `commit` keeps the written files for the next `open` of the same conversion, and
    releases the lock and the descriptors. If several processes share a folder (`open_shared`),
    process 0 owns it, and each of the others has its own journal in it.

    Attributes:
        target: the path that the result gets.
        content: the folder to write the new checkpoint into.
        finished: the blocks that earlier runs recorded; known to the owner alone.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     target = Path(parent) / "checkpoint"
    ...     with Staging(target).open("c0ffee", {"to": "tp=2"}) as staging:
    ...         _ = (staging.content / "weights").write_bytes(b"...")
    ...         staging.journal.append_blocks(np.array([0]), np.array([0]), bytes(16))
    ...         target.exists()
    ...     with Staging(target).open("c0ffee", {"to": "tp=2"}) as staging:
    ...         staging.resumed, staging.finished.blocks.tolist()
    ...         _ = staging.commit()
    ...     os.listdir(parent), os.listdir(target)
    False
    (True, [0])
    (['checkpoint'], ['weights'])
    """

    def __init__(
        self,
        target: Path,
        options: RunOptions | None = None,
        written: Collection[str] | None = None,
        file: str | None = None,
    ) -> None:
        """Describe the staging folder of a target; nothing is looked at yet.

        Args:
            target: the path that the result gets.
            options: of the run: what may be replaced, and whether staged work is discarded.
            written: the files of the new checkpoint. A target that contains other files is refused,
                unless it is None or the options discard others.
            file: the name of the file that becomes the target, if the target is not a folder.
        """
        self._options = options or RunOptions()
        self._written = None if self._options.discard_others else written
        self._file = file
        self.target, self.content = target, target
        self._lock: FolderLock | None = None
        self._journal: Journal | None = None
        self.finished = FinishedBlocks.read(b"")
        self._are_journals_untouched = True

    def check(self) -> Path | None:
        """Return the staging folder that an earlier run left for a valid target, or None.

        Raises UsageError and RunError where the conversion would be refused for its target.
        """
        with translate_os_errors("look at the target", self.target):
            self._check_target()
            root = staging_folder(self.target)
            is_begun = _exists(root)
            if is_begun:
                check_own_folder(root)
            if not is_begun or self._options.restart:
                self._refuse_existing()
            return root if is_begun else None

    def open(self, conversion_id: str, description: Any) -> Staging:
        """Begin or resume a conversion whose result becomes the target.

        `conversion_id` and `description` identify the conversion, as for `Journal.open`.
        A commit that an earlier run could not finish is finished first; if it belongs to this
        conversion, no work is left, and `already_complete` is True.

        Raises `UsageError` for a target that exists and may not be replaced, that is not a
        folder, or whose parent is not a folder. Raises `RunError` if another process works on the
        target, if an earlier run staged another conversion or left files that contradict each
        other, and if the file system refuses an operation.
        """
        with translate_os_errors("look at the target", self.target):
            self._check_target()
            root = staging_folder(self.target)
            if not _exists(root):
                self._refuse_existing()
            self._lock = FolderLock.acquire(root)
            try:
                self._open_locked(self._lock, conversion_id, description)
            except BaseException:
                self._lock.close()
                raise
        return self

    def _open_locked(self, lock: FolderLock, conversion_id: str, description: Any) -> None:
        target, root, options = self.target, lock.folder, self._options
        record = None if options.restart else read_journal(root / "journal")
        with translate_os_errors("finish what an earlier run began", root):
            # Everything was written by an earlier run: only renames and removals are left.
            if record is not None and record.commit is not None:
                self._finish_commit(root, record.commit)
                if record.conversion_id == conversion_id:
                    _remove_root(lock)
                    return
                record = None
            # Without a valid journal, an old target that was moved aside is restored first.
            elif record is None:
                _put_previous_back(target, root)
            # The target is refused below, and the refusal must not leave an empty staging folder.
            # With `restart` the folder may contain staged work, which a refusal keeps.
            is_kept = options.overwrite or options.restart
            if record is None and _exists(target) and not is_kept:
                _remove_root(lock)
        self._refuse_existing()
        with translate_os_errors("prepare the staging folder", root):
            if record is None:
                _discard(root)
                # Made before the journal, so that a journal implies that `content` exists.
                (root / "content").mkdir()
                sync_folder(root)
                sync_folder(root.parent)
        journal = Journal.open(root / "journal", conversion_id, description)
        try:
            with translate_os_errors("look at the staged files", root):
                check_own_folder(root / "content")
        except BaseException as error:
            journal.close()
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise RunError(
                f"the staged files are gone: {root / 'content'}\n"
                "expected the files of the run that the journal next to it records: "
                "--restart starts over"
            ) from error
        self.content, self._journal, self.finished = root / "content", journal, journal.finished

    def join(self, content: Path, journal: Journal | None) -> Staging:
        """Take part as a process other than process 0, with a journal of its own.

        `journal` is None if no work is left.
        """
        # No lock: process 0 owns the folder, and holds the lock for all processes.
        self.content, self._journal = content, journal
        return self

    def _refuse_existing(self, may_replace: bool = False) -> None:
        if _exists(self.target) and not (may_replace or self._options.overwrite):
            raise UsageError(
                f"the target exists: {self.target}\n"
                "expected a name that is free: choose another, or replace it with --overwrite"
            )

    def _check_target(self) -> None:
        """Raise the errors for which a target is refused; links in its path are followed first."""
        # The staging folder must be on the target's file system.
        self.target = self.content = target = Path(os.path.realpath(self.target))
        overwrite, file, written = self._options.overwrite, self._file, self._written
        parent = target.parent
        if file is not None and _exists(target) and not target.is_file():
            raise UsageError(
                f"the target is not a file: {target}\nexpected a file, since {target.suffix} is "
                "the end of a file's name, or a name that is free"
            )
        if file is None and _exists(target) and not target.is_dir():
            raise UsageError(
                f"the target is a file: {target}\nexpected a folder, or a name that is free"
            )
        if os.path.ismount(target):
            raise UsageError(
                f"the target is where a file system is mounted: {target}\n"
                "expected a folder that can be renamed: name one inside it"
            )
        if overwrite and (protected := _find_kept(target)):
            raise UsageError(
                f"the target {target} has {protected} in it, which would be deleted\n"
                "expected a folder for this checkpoint alone: name one inside it"
            )
        if overwrite and written is not None:
            expect_nothing_lost(target, written)
        if not parent.is_dir():
            raise UsageError(
                f"the target's parent is not a folder: {parent}\n"
                "expected it to exist: make it first, or choose another target"
            )
        # Moving a folder also changes its own `..` entry, which needs write permission on it.
        for folder in [parent, target] if overwrite and target.is_dir() else [parent]:
            if not os.access(folder, os.W_OK | os.X_OK):
                raise RunError(
                    f"cannot write to {folder}\n"
                    "expected write permission: change that of the folder, or choose another target"
                )

    def _finish_commit(self, root: Path, commit: Commit) -> None:
        """Rename the committed content to the target, unless it already has that name."""
        target = self.target
        if _has_inode(target, commit.inode):
            # Its new name may not be on the disk yet, and the old target is deleted next.
            sync_folder(target.parent)
            sync_folder(root)
        elif (result := _find_result(root / "content", commit.inode)) is not None:
            self._refuse_existing(commit.replaces)
            _put_in_place(target, root, result)
        else:
            raise RunError(
                f"an earlier run finished its checkpoint, and it is gone: neither {target} nor "
                f"{root / 'content'} is the folder it wrote\n"
                f"expected one of them to be: see what {root} holds, then start over with --restart"
            )

    @property
    def is_owner(self) -> bool:
        """Whether this process owns the folder, and commits or discards it."""
        return self._lock is not None

    @property
    def _own_lock(self) -> FolderLock:
        if self._lock is None:
            raise RunError(f"the staging folder of {self.target} is owned by process 0")
        return self._lock

    @property
    def result(self) -> Path:
        """The path that is renamed to the target: the content, or its only file."""
        return self.content if self._file is None else self.content / self._file

    @property
    def already_complete(self) -> bool:
        """Whether the target is already this conversion's result, so that no work is left."""
        return self._journal is None

    @property
    def resumed(self) -> bool:
        """Whether this run continues a conversion that an earlier run began."""
        return self._journal is not None and self._journal.resumed

    @property
    def is_untouched(self) -> bool:
        """Whether no other user can have changed the files staged by an earlier run.

        This holds if the journal was begun in this very folder, and only this user can access it.
        """
        lock = self._own_lock
        is_same_folder = self.journal.folder_inode == lock.inode
        return self._are_journals_untouched and lock.is_exclusive and is_same_folder

    @property
    def journal(self) -> Journal:
        """The record of finished blocks. Raises `RunError` if no work is left."""
        if self._journal is None:
            raise RunError(
                f"the conversion to {self.target} is complete and has no journal\n"
                "expected a look at `already_complete` first"
            )
        return self._journal

    def expect_names_apart(self, names: Iterable[str]) -> None:
        """Raise RunError if the file system gives two of the names, relative paths, to one file.

        Most disks of Macs ignore the case of letters, and the encoding of accents. If no two names
        differ in these alone, no file is created to find out.
        """
        names = list(names)
        if _find_equal(names, ignores_case=True, ignores_form=True) is None:
            return
        # If a kill leaves it, it is removed like any unfinished journal.
        probe = self.content.parent / "journal.\u00e9.new"
        with translate_os_errors("look whether names differ by case", probe):
            probe.touch()
            ignores_case = os.path.lexists(probe.with_name("JOURNAL.\u00c9.NEW"))
            ignores_form = os.path.lexists(probe.with_name("journal.e\u0301.new"))
            probe.unlink()
        equal = _find_equal(names, ignores_case=ignores_case, ignores_form=ignores_form)
        if equal is not None:
            raise RunError(
                f"{equal[0]!r} and {equal[1]!r} are one file on this file system, which does not "
                f"tell their names apart: {self.target}\n"
                "expected names that differ: choose a target on another disk, another format, or "
                "rename tensors with --rename"
            )

    def commit(self, bits: ModeLimits = NO_LIMITS) -> bool:
        """Give the content the target's name, and delete the previous target.

        `bits` limits the permission bits of its folders and files.

        Returns False if the target's name was missing for a moment, between two renames.
        Every file in `content` must have been synced. If the process is killed during the commit,
        the next `open` finishes it. Raises `RunError`, and keeps the staging folder, if the target
        appeared during the run or the file system refuses an operation.
        """
        journal, lock = self.journal, self._own_lock
        root = lock.folder
        with translate_os_errors("put the new checkpoint in its place", self.target):
            lock.check_in_place()
            if self._file is None:
                restrict_modes(self.content, bits, self.target)
            else:
                restrict_file_mode(self.result, bits, self.target)
            # The names of files must be durable before the commit record.
            sync_folders_under(self.content)
            # Another program may have created the target since `open` checked it.
            if _exists(self.target) and not self._options.overwrite:
                raise RunError(
                    f"the target appeared during the run: {self.target}\n"
                    "expected its name to be free: move it away, or run this again with "
                    "--overwrite to replace it"
                )
            if self._options.overwrite and self._written is not None:
                # Files may have been added to the target since `open` checked it.
                try:
                    expect_nothing_lost(self.target, self._written)
                except UsageError as error:
                    # A `RunError`, since all blocks are written and the staging folder is kept.
                    raise RunError(str(error)) from error
            journal.append_commit(Commit(self.result.stat().st_ino, self._options.overwrite))
            journal.close()
            was_never_missing = _put_in_place(self.target, root, self.result)
        with translate_os_errors(f"delete what is left over ({self.target} is complete)", root):
            _remove_root(lock)
        self._journal = None
        return was_never_missing

    def discard(self) -> None:
        """Delete the staged files; the target stays. Raises `RunError`."""
        if self._journal is not None:
            self._journal.close()
            lock = self._own_lock
            with translate_os_errors("delete the staging folder", lock.folder):
                _put_previous_back(self.target, lock.folder)
                _discard(lock.folder)
                _remove_root(lock)

    def close(self) -> None:
        """Release the lock and the descriptors; the written files stay."""
        # The lock last: then another run may open the journal.
        if self._journal is not None:
            self._journal.close()
        if self._lock is not None:
            self._lock.close()

    def other_records(self) -> Iterator[JournalRecord]:
        """Yield the records of the journals of the processes other than process 0."""
        root = self.content.parent
        with translate_os_errors("look for the journals of the processes", root):
            paths = sorted(root.glob("journal.*"))
        yield from filter(None, map(_read_finished_journal, paths))

    def take_over(self, conversion_id: str) -> None:
        """Append the journals left by other processes of an earlier run to this process's own."""
        journal, root = self.journal, self.content.parent
        with translate_os_errors("take over the journals of an earlier run", root):
            others = sorted(root.glob("journal.*"))
            for path in others:
                record = _read_finished_journal(path)
                if record is not None and record.conversion_id == conversion_id:
                    journal.append_blocks(*record.finished)
                    self._are_journals_untouched &= record.folder_inode == journal.folder_inode
                # By this line all of its valid records are durable in process 0's journal.
                path.unlink()
        if others and (own := read_journal(journal.path)) is not None:
            self.finished = own.finished


def staging_folder(target: Path) -> Path:
    """Return the staging folder of the checkpoint `target`.

    >>> staging_folder(Path("models/llama-tp4")).as_posix()
    'models/.llama-tp4.reshard-staging'
    """
    return target.with_name(f".{target.name}.reshard-staging")


def _find_equal(
    names: Iterable[str], *, ignores_case: bool, ignores_form: bool
) -> tuple[str, str] | None:
    """Return the first two names that are equal but for case or the form of accents, or None."""
    first: dict[str, str] = {}
    for name in names:
        key = name
        if ignores_form and not name.isascii():
            key = unicodedata.normalize("NFD", key)
        if ignores_case:
            key = key.casefold()
        other = first.setdefault(key, name)
        if other != name:
            return other, name
    return None


def _exists(path: Path) -> bool:
    """Return whether a path exists, also as a broken link.

    Raises OSError if that cannot be determined; `os.path.lexists` would return False.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _find_kept(target: Path) -> str | None:
    """Return a protected folder that the target is or contains, or None."""
    protected = {
        "the user's home folder": os.path.expanduser("~"),
        "the working folder": os.curdir,
        "the Python that runs": sys.prefix,
        "the Python that this environment is of": sys.base_prefix,
    }
    for what, folder in protected.items():
        if Path(os.path.realpath(folder)).is_relative_to(target):
            return what
    names = sorted(os.listdir(target)) if target.is_dir() else []
    return f"{names[0]!r} and no checkpoint" if names and not has_checkpoint(target) else None


def _find_result(content: Path, inode: int) -> Path | None:
    """Return the content, or the file in it, that was committed; None if neither is there."""
    files = sorted(content.iterdir()) if content.is_dir() else []
    return next((path for path in (content, *files) if _has_inode(path, inode)), None)


def _has_inode(path: Path, inode: int) -> bool:
    try:
        return os.stat(path, follow_symlinks=False).st_ino == inode
    except FileNotFoundError:
        return False


def _put_in_place(target: Path, root: Path, result: Path) -> bool:
    """Give the result the target's name; False if the name was missing for a moment."""
    was_never_missing = True
    previous = root / "previous"
    # Renaming a file replaces an existing file atomically.
    if not _exists(target) or target.is_file():
        os.rename(result, target)
    # Otherwise by two renames. A kill between them leaves no target; the next run finds the content
    # by its inode number and continues from here.
    elif not exchange_names(result, target):
        was_never_missing = False
        _remove(previous)
        os.rename(target, previous)
        try:
            os.rename(result, target)
        except OSError:
            os.rename(previous, target)
            raise
    # The new name must be durable before any part of the old target is deleted.
    sync_folder(target.parent)
    sync_folder(root)
    return was_never_missing


def _remove(path: Path) -> None:
    """Delete a folder with its contents, or a file, if it exists."""
    if path.is_file():
        path.unlink()
    else:
        remove_folder(path)


def _put_previous_back(target: Path, root: Path) -> None:
    """Move the old target back if a commit was killed between its two renames."""
    previous = root / "previous"
    if _exists(previous) and not _exists(target):
        os.rename(previous, target)
        sync_folder(target.parent)
        sync_folder(root)


def _discard(root: Path) -> None:
    """Delete all but the lock in the staging folder, the journal first: it refers to the rest."""
    (root / "journal").unlink(missing_ok=True)
    sync_folder(root)
    for name in ("content", "previous"):
        _remove(root / name)
    _remove_other_journals(root)


def _remove_other_journals(root: Path) -> None:
    """Remove unfinished journals, and the journals of processes other than process 0."""
    for path in root.glob("journal.*"):
        path.unlink(missing_ok=True)


def _read_finished_journal(path: Path) -> JournalRecord | None:
    """Return the record of another process's journal, or None for an unfinished journal."""
    # A `.new` journal was not renamed: its head may be torn.
    return None if path.name.endswith(".new") else read_journal(path)


def _remove_root(lock: FolderLock) -> None:
    """Remove the staging folder; the journal last, as it records that the target is complete."""
    for name in ("content", "previous"):
        _remove(lock.folder / name)
    _remove_other_journals(lock.folder)
    (lock.folder / "journal").unlink(missing_ok=True)
    lock.remove_folder()


@contextmanager
def open_shared(
    processes: Processes, staging: Staging, conversion_id: str, description: Any
) -> Iterator[Staging]:
    """Open the staging folder of a conversion in all processes together.

    Process 0 raises the errors of `Staging.open`; the other processes raise RunError with the same
    message.
    """
    # The other processes wait until process 0 sends an error or the path of the content.
    if processes.rank > 0:
        message, place, complete = processes.share(None)
        if message is not None:
            raise RunError(f"process 0 could not begin: {message}")
        content, journal = Path(place), None
        if not complete:
            path = content.parent / f"journal.{processes.rank}"
            journal = Journal.open(path, conversion_id, description)
        with staging.join(content, journal):
            yield staging
        return
    try:
        staging.open(conversion_id, description)
    except ReshardError as error:
        # The other processes wait in `share`, and would not learn of the error otherwise.
        processes.share((str(error), "", False))
        raise
    with staging:
        # Old journals are read before the other processes begin journals of the same names.
        if not staging.already_complete:
            staging.take_over(conversion_id)
        processes.share((None, str(staging.content), staging.already_complete))
        yield staging


_MAX_LISTED = 12
# Files that programs recreate: notes on downloads, compiled modules, settings of folder views.
_CACHES = (".cache/huggingface", "__pycache__", ".DS_Store")


def expect_nothing_lost(target: Path, written: Collection[str]) -> None:
    """Raise UsageError if replacing a folder would delete files outside of its checkpoint.

    Args:
        target: the folder or its address; it need not exist.
        written: the files of the new checkpoint, relative to the folder.
    """
    others = [*find_others(target, written)]
    if not others:
        return
    more = len(others) - _MAX_LISTED
    listed = "\n".join(f"  {name}" for name in others[:_MAX_LISTED])
    listed += f"\n  and {more} more" if more > 0 else ""
    raise UsageError(
        f"replacing {target} would delete what is no part of the checkpoint there:\n{listed}\n"
        "expected a folder for the checkpoint alone: move these away, choose another target, or "
        "delete them with --discard-others (discard_others=True)"
    )


def find_others(target: Path, written: Collection[str]) -> Iterator[str]:
    """List the files of a folder that are not part of its checkpoint; folders end with `/`.

    Args:
        target: the folder, which need not exist.
        written: files that are rewritten, relative to the folder.
    """
    if not target.is_dir():
        return
    own = {*written, *_list_checkpoint_files(target)}
    # Every folder that contains any of these files.
    within = {parent.as_posix() for name in own for parent in Path(name).parents}
    for parent, folders, files in walk_folder(target):
        inner = parent.relative_to(target).as_posix()
        prefix = "" if inner == "." else f"{inner}/"
        entered = []
        for name in folders:
            relative = prefix + name
            if (parent / name).is_symlink():
                if relative not in own:
                    yield f"{relative} (a link to {os.readlink(parent / name)})"
            elif relative in within:
                entered.append(name)
            elif relative == ".cache":
                # `hf download --local-dir` keeps notes there.
                if any(path.name != "huggingface" for path in (parent / name).iterdir()):
                    yield f"{relative}/"
            elif not _is_cache(target, relative):
                yield f"{relative}/"
        # Assigned in place: `walk_folder` enters only the folders that remain in its list.
        folders[:] = entered
        for name in files:
            relative = prefix + name
            if relative not in own and not _is_cache(target, relative):
                path = parent / name
                yield relative + (f" (a link to {os.readlink(path)})" if path.is_symlink() else "")


def _is_cache(target: Path, relative: str) -> bool:
    """Return whether a name belongs to a cache, or to the markers of uploads."""
    is_marker = isinstance(target, RemotePath) and relative == MARKER_FOLDER
    name = relative.rpartition("/")[2]
    return is_marker or name in _CACHES or is_attribute_file(name)


def _list_checkpoint_files(target: Path) -> Iterator[str]:
    """List the files of the checkpoint in a folder, even if the checkpoint is damaged."""
    yield MANIFEST_NAME
    try:
        checkpoint = open_checkpoint(target)
        manifest = read_manifest(target)
    except ReshardError:
        yield from _list_model_files(target)
        yield from _list_by_name(target, is_checkpoint_file)
        return
    format = find_format(checkpoint.format)
    yield from (file.name for file in checkpoint.files)
    yield from format.own_files(checkpoint) if format is not None else ()
    # This adds files such as an index, which neither of the two lists above contains.
    yield from _list_by_name(target, is_checkpoint_file, but=dict(checkpoint.left_out))
    if manifest is not None:
        yield from manifest.carried
        return
    yield from _list_model_files(target)
    if format is not None and format.carries_weights:
        yield from (name for name in checkpoint.carried if name.endswith(OTHER_WEIGHTS))


def is_checkpoint_file(name: str) -> bool:
    """Return whether a file is named like a checkpoint file, of any format.

    >>> is_checkpoint_file("model.safetensors"), is_checkpoint_file("config.json")
    (True, False)
    """
    last = name.rpartition("/")[2]
    return last in (MANIFEST_NAME, ".metadata") or is_format_file(last)


def _list_by_name(
    target: Path, is_own: Callable[[str], bool], but: Collection[str] = ()
) -> Iterator[str]:
    """List the files with such a name, relative to the folder."""
    for parent, _, files in walk_folder(target):
        for name in files:
            relative = (parent / name).relative_to(target).as_posix()
            if relative not in but and is_own(relative):
                yield relative


def _list_model_files(target: Path) -> Iterator[str]:
    """List the other files of models; the targets of links are not in the folder."""
    for name in _list_by_name(
        target, lambda name: any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)
    ):
        if describe_foreign_link(target / name, target) is None:
            yield name
