"""The staging folder: what it refuses, what it keeps, what it says."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.checkpoint_files import list_open_files, tensor, write_file
from checkpoint.small_conversion import (
    NEW,
    OLD,
    append_blocks,
    assert_done,
    convert,
    digest,
    digests_of,
    files_in,
    start,
    write_files,
)
from reshard import checkpoint
from reshard.checkpoint.conversion import staging
from reshard.checkpoint.conversion.journal import Commit
from reshard.checkpoint.conversion.staging import Staging, find_others, staging_folder
from reshard.checkpoint.formats.registry import written_names
from reshard.checkpoint.options import RunOptions
from reshard.checkpoint.storage import filesystem
from reshard.errors import RunError, UnmatchedError, UsageError

# No file has it: a number beside the folder's own may be that of a file in it.
NO_INODE = 1 << 62


def test_a_new_target_appears(tmp_path: Path) -> None:
    convert(tmp_path / "checkpoint")
    assert_done(tmp_path / "checkpoint")


def test_a_resumed_run_knows_the_finished_blocks(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with Staging(target).open("new", {}) as work:
        assert (work.resumed, work.already_complete) == (False, False)
        write_files(work.content, {"weights-0": b"new 0"})
        append_blocks(work.journal, [(0, 0, digest(b"new 0"))])
    assert not target.exists()

    with Staging(target).open("new", {}) as work:
        assert (work.resumed, work.already_complete) == (True, False)
        assert digests_of(work.journal.finished) == {(0, 0): digest(b"new 0")}
        assert files_in(work.content) == {"weights-0": b"new 0"}


def test_a_commit_finished_by_recovery_is_reported(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with Staging(target).open("new", {}) as work:
        write_files(work.content, NEW)
        work.journal.append_commit(Commit(work.content.stat().st_ino, replaces=False))

    with Staging(target).open("new", {}) as work:
        assert work.already_complete and not work.resumed
        with pytest.raises(RunError, match="already_complete"):
            _ = work.journal
    assert_done(target)


def test_a_commit_whose_folder_is_gone_is_not_guessed_at(tmp_path: Path) -> None:
    """Swapped, killed, and the new target moved away by hand: what is staged is the old one."""
    target = tmp_path / "checkpoint"
    with Staging(target).open("new", {}) as work:
        write_files(work.content, OLD)
        work.journal.append_commit(Commit(inode=NO_INODE, replaces=True))

    with pytest.raises(RunError, match=r"it is gone(.|\n)*--restart"):
        convert(target, overwrite=True)

    assert files_in(staging_folder(target) / "content") == OLD
    convert(target, restart=True)
    assert_done(target)


def test_staged_files_that_vanished_are_not_resumed(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with Staging(target).open("new", {}) as work:
        append_blocks(work.journal, [(0, 0, bytes(16))])
        work.content.rmdir()
    with pytest.raises(RunError, match=r"staged files are gone(.|\n)*--restart"):
        convert(target)


def test_a_damaged_journal_needs_a_restart(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with Staging(target).open("new", {}) as work:
        path = work.journal.path
    path.write_bytes(b"\0" * 100)
    with pytest.raises(RunError, match=r"damaged(.|\n)*--restart"):
        convert(target)
    convert(target, restart=True)
    assert_done(target)


def test_an_existing_target_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    write_files(tmp_path / "checkpoint", OLD)
    with pytest.raises(UsageError, match=r"the target exists(.|\n)*--overwrite"):
        convert(tmp_path / "checkpoint")
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert files_in(tmp_path / "checkpoint") == OLD


def test_a_refusal_keeps_the_files_staged_by_an_earlier_run(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    write_files(target, OLD)
    with Staging(target, RunOptions(overwrite=True)).open("new", {"identity": "new"}) as work:
        write_files(work.content, {"weights-0": b"new 0"})
        append_blocks(work.journal, [(0, 0, digest(b"new 0"))])
    for restart in (False, True):
        with pytest.raises(UsageError, match="the target exists"):
            convert(target, restart=restart)
    with Staging(target, RunOptions(overwrite=True)).open("new", {"identity": "new"}) as work:
        assert [*digests_of(work.journal.finished)] == [(0, 0)]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_target_that_is_a_file_is_refused(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"data")
    with pytest.raises(UsageError, match="the target is a file"):
        convert(tmp_path / "model.safetensors", overwrite=overwrite)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_missing_parent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"parent is not a folder: .*missing"):
        convert(tmp_path / "missing" / "checkpoint")
    assert os.listdir(tmp_path) == []


def test_a_mounted_target_is_refused() -> None:
    with pytest.raises(UsageError, match="mounted: /"):
        convert(Path("/"), overwrite=True)


@pytest.mark.parametrize("what", ["home", "working", "prefix", "base_prefix"])
@pytest.mark.parametrize("inside", ["", "inside/deeper"])
def test_a_folder_without_a_checkpoint_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, inside: str
) -> None:
    # Folders of this test stand for the user's own.
    target, elsewhere = tmp_path / "precious", tmp_path / "elsewhere"
    kept = target / inside
    kept.mkdir(parents=True)
    elsewhere.mkdir()
    write_files(kept, OLD)
    monkeypatch.setenv("HOME", str(kept if what == "home" else elsewhere))
    monkeypatch.chdir(kept if what == "working" else elsewhere)
    for name in ("prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, str(kept if what == name else elsewhere))
    with pytest.raises(UsageError, match=r"has the (.|\n)*would be deleted\n.*name one inside it"):
        convert(target, overwrite=True)
    assert files_in(kept) == OLD
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "precious"]
    # A new folder inside is one's own.
    convert(kept / "checkpoint", overwrite=True)
    assert files_in(kept / "checkpoint") == NEW


@pytest.mark.parametrize("name", ["notes.txt", "project/main.py", ".hidden"])
def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path, name: str) -> None:
    target = tmp_path / "precious"
    write_files(target, {name: b"mine"})
    first = name.split("/")[0]
    with pytest.raises(UsageError, match=rf"has '{first}' and no checkpoint(.|\n)*name one inside"):
        convert(target, overwrite=True)
    assert files_in(target) == {name: b"mine"}
    assert os.listdir(tmp_path) == ["precious"]


def test_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    target.mkdir()
    convert(target, overwrite=True)
    assert_done(target)


@pytest.mark.parametrize("refused", ["parent", "target"])
def test_a_folder_without_leave_to_write_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    write_files(tmp_path / "checkpoint", OLD)
    folder = tmp_path if refused == "parent" else tmp_path / "checkpoint"
    # The user who runs the tests may be one to whom no permission is ever denied.
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != folder)
    with pytest.raises(RunError, match=f"cannot write to {folder}\n"):
        convert(tmp_path / "checkpoint", overwrite=True)
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_link_to_a_folder_keeps_its_place(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    write_files(tmp_path / "elsewhere" / "checkpoint", OLD)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "checkpoint")
    convert(tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert_done(tmp_path / "elsewhere" / "checkpoint")


def test_a_target_that_appears_during_the_run_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with Staging(target).open("new", {"identity": "new"}) as work:
        for index, (name, data) in enumerate(NEW.items()):
            write_files(work.content, {name: data})
            append_blocks(work.journal, [(index, 0, digest(data))])
        write_files(target, OLD)
        with pytest.raises(RunError, match="appeared during the run"):
            work.commit()
    assert files_in(target) == OLD
    convert(target, overwrite=True)
    assert_done(target)


def test_a_target_that_appears_after_the_commit_record_is_not_replaced_unasked(
    tmp_path: Path,
) -> None:
    target = tmp_path / "checkpoint"
    with Staging(target).open("new", {}) as work:
        write_files(work.content, NEW)
        work.journal.append_commit(Commit(work.content.stat().st_ino, replaces=False))
    write_files(target, OLD)
    with pytest.raises(UsageError, match="the target exists"):
        convert(target)
    assert files_in(target) == OLD
    convert(target, overwrite=True)
    assert_done(target)


def test_discard_leaves_the_target_alone(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    write_files(target, OLD)
    with Staging(target, RunOptions(overwrite=True)).open("new", {}) as work:
        write_files(work.content, NEW)
        work.discard()
    assert files_in(target) == OLD
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.linux_only(reason="names of open files are read from /proc")
def test_everything_is_synced_before_the_next_step_relies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, fdatasync, exchange, rmtree = (
        os.fsync,
        os.fdatasync,
        staging.exchange_names,
        filesystem.shutil.rmtree,
    )

    def name_of(descriptor: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path).as_posix()

    def note(event: Callable[..., str], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            events.append(event(*arguments))
            return real(*arguments)

        return call

    target = tmp_path / "checkpoint"
    write_files(target, OLD)
    monkeypatch.setattr(os, "fsync", note(lambda fd: f"sync {name_of(fd)}", fsync))
    monkeypatch.setattr(os, "fdatasync", note(lambda fd: f"sync {name_of(fd)}", fdatasync))
    monkeypatch.setattr(os, "rename", note(lambda _, new: f"rename to {new.name}", os.rename))
    monkeypatch.setattr(staging, "exchange_names", note(lambda *_: "exchange", exchange))
    monkeypatch.setattr(filesystem.shutil, "rmtree", note(lambda p: f"delete {p.name}", rmtree))
    root = ".checkpoint.reshard-staging"

    with Staging(target, RunOptions(overwrite=True)).open("new", {}) as work:
        assert events[-4:] == [
            "sync .",
            f"sync {root}/journal.new",
            "rename to journal",
            f"sync {root}",
        ]
        write_files(work.content, NEW)
        events.clear()
        work.commit()

    assert events == [
        f"sync {root}/content",
        f"sync {root}/content/inner",
        f"sync {root}/journal",
        "exchange",
        "sync .",
        f"sync {root}",
        "delete content",
    ]


def test_descriptors_and_lock_are_let_go(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with pytest.raises(ZeroDivisionError), Staging(target).open("new", {}):
        raise ZeroDivisionError
    assert list_open_files(tmp_path) == []
    with pytest.raises(RunError):
        Staging(target).open("other", {})
    assert list_open_files(tmp_path) == []
    with Staging(target).open("new", {}) as work:
        work.commit()
    assert list_open_files(tmp_path) == []


def test_the_error_of_a_second_process_names_the_owner_of_the_target(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    holder = start(
        """
        import sys
        from pathlib import Path
        from reshard.checkpoint.conversion.staging import Staging
        with Staging(Path(sys.argv[1])).open("new", {}):
            print("ready", flush=True)
            sys.stdin.read()
        """,
        target,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        for restart in (False, True):
            with pytest.raises(RunError, match=rf"in use by process {holder.pid} on \S+\n"):
                convert(target, restart=restart)
        assert (staging_folder(target) / "journal").exists()
    finally:
        holder.kill()
        holder.communicate()

    with Staging(target).open("new", {}) as work:
        assert work.resumed


@pytest.mark.parametrize(
    ("names", "ignores", "expected"),
    [
        (["w.bin", "W.bin"], "case", "'w.bin' and 'W.bin' are one file"),
        (["a/w", "A/W"], "case", "'a/w' and 'A/W' are one file"),
        (["\u00e9", "e\u0301"], "form", "are one file"),
        (["w", "W"], "form", None),
        (["\u00e9", "e\u0301"], "case", None),
        (["w", "W", "\u00e9", "e\u0301"], "", None),
        (["w", "v"], "case form", None),
    ],
)
def test_names_that_a_file_system_does_not_tell_apart_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    ignores: str,
    expected: str | None,
) -> None:
    """Disks of Macs ignore case and the form of accents; played here by `lexists`."""
    real = os.path.lexists

    def exists(path: Path) -> bool:
        other = os.fspath(path)
        if "case" in ignores:
            other = other.replace("JOURNAL.\u00c9.NEW", "journal.\u00e9.new")
        if "form" in ignores:
            other = other.replace("e\u0301", "\u00e9")
        return real(other)

    with Staging(tmp_path / "checkpoint").open("new", {}) as work:
        before = sorted(os.listdir(work.content.parent))
        with monkeypatch.context() as patch:
            patch.setattr(os.path, "lexists", exists)
            if expected is None:
                work.expect_names_apart(names)
            else:
                with pytest.raises(RunError, match=expected):
                    work.expect_names_apart(names)
        assert sorted(os.listdir(work.content.parent)) == before


WHOLE = {f"layers.{i}.weight": tensor("float32", (8, 4), i) for i in range(2)}
OPTIMIZER = ("exp_avg", "exp_avg_sq")
MODEL_FILES = ("config.json", "tokenizer.json", "README.md", "merges.txt")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_file(folder / "model.safetensors", WHOLE)
    for name in MODEL_FILES:
        (folder / name).write_text("{}")
    return folder


def file(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"precious")

    return make


def link_to_folder(folder: Path) -> None:
    (folder.parent / "evaluations").mkdir(exist_ok=True)
    (folder / "evals").symlink_to("../evaluations")


def link_to_file(folder: Path) -> None:
    (folder / "data.csv").symlink_to("/etc/hostname")


def link_to_vocabulary(folder: Path) -> None:
    (folder / "vocab.json").symlink_to("/etc/hostname")


def large(folder: Path) -> None:
    (folder / "train.parquet").touch()
    os.truncate(folder / "train.parquet", 70_000_000)


def other_tensors(folder: Path) -> None:
    write_file(folder / "extra.safetensors", WHOLE)


# What a copy of the checkpoint does not take along: how it is listed.
LOST: dict[str, Callable[[Path], None]] = {
    ".git/": file(".git/objects/0f"),
    ".gitattributes": file(".gitattributes"),
    ".cache/": file(".cache/mine"),
    "empty/": lambda folder: (folder / "empty").mkdir(),
    "evals (a link to ../evaluations)": link_to_folder,
    "data.csv (a link to /etc/hostname)": link_to_file,
    "vocab.json (a link to /etc/hostname)": link_to_vocabulary,
    "train.parquet": large,
    "optimizer.pt": file("optimizer.pt"),
    "model.gguf": file("model.gguf"),
    "sub/": file("sub/weights.bin"),
    "extra.safetensors": other_tensors,
}


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "another"])
def test_files_that_would_be_lost_are_listed_and_refused(
    model: Path, tmp_path: Path, name: str, in_place: bool
) -> None:
    source = model
    if not in_place:
        source = tmp_path / "source"
        shutil.copytree(model, source)
    LOST[name](model)
    before = sorted(path.relative_to(model) for path in model.rglob("*"))

    with pytest.raises(UsageError) as refused:
        checkpoint.convert(source, model, to=2, overwrite=True)

    assert f"\n  {name}\n" in str(refused.value) and "--discard-others" in str(refused.value)
    assert sorted(path.relative_to(model) for path in model.rglob("*")) == before
    assert not staging_folder(model).exists()

    checkpoint.convert(source, model, to=2, overwrite=True, discard_others=True)
    assert not (model / name.partition(" ")[0]).exists()


@pytest.mark.parametrize("name", ["notes.txt", "train.py", "wandb/run1/log", "eval.json"])
def test_files_that_are_carried_are_lost_to_another_model_alone(model: Path, name: str) -> None:
    source = model.with_name("source")
    shutil.copytree(model, source)
    file(name)(model)
    listed = name.partition("/")[0] + "/" * ("/" in name)
    with pytest.raises(UsageError, match=rf"\n  {listed}\n"):
        checkpoint.convert(source, model, to=2, overwrite=True)
    checkpoint.convert(model, model, to=2, overwrite=True)
    assert (model / name).read_bytes() == b"precious"
    # The manifest lists it from now on: it is part of the checkpoint.
    checkpoint.convert(source, model, to=2, overwrite=True)


@pytest.mark.parametrize("hub_notes", [True, False])
def test_nothing_is_lost_of_an_ordinary_model(model: Path, hub_notes: bool) -> None:
    """Neither in place nor by another one, once or twice, with what `hf download` leaves."""
    source = model.with_name("source")
    shutil.copytree(model, source)
    if hub_notes:
        file(".cache/huggingface/download/config.json.metadata")(model)
    for to in ("full", 2, "full"):
        checkpoint.convert(source, model, to=to, overwrite=True)
    checkpoint.convert(model, model, to=2, overwrite=True)
    checkpoint.convert(model, model, to="full", overwrite=True)
    assert {path.name for path in model.iterdir()} > set(MODEL_FILES)


@pytest.mark.parametrize("keeps_manifest", [True, False])
# `vllm-sharded-state` needs the layout of an engine.
@pytest.mark.parametrize("format", sorted({*written_names()} - {"vllm-sharded-state"}))
def test_every_format_knows_its_files(model: Path, format: str, keeps_manifest: bool) -> None:
    target = model.with_name("out")
    if "deepspeed" in format:
        states = {f"optimizer.state.{a}.{b}": WHOLE[a] for a in WHOLE for b in OPTIMIZER}
        write_file(model / "model.safetensors", WHOLE | states)
    placed: list[dict[str, Any]] = [{"to": "dp=2", "rules": ["*=dp, -"]}, {"to": "dp=2"}]
    for options in [*placed, {"to": "full"}]:
        with contextlib.suppress(UsageError, UnmatchedError):
            checkpoint.convert(model, target, format=format, **options)
            break
    if not keeps_manifest:
        (target / "reshard.manifest.json").unlink()
    assert target.exists() and [*find_others(target, ())] == []


def test_files_that_come_during_the_run(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    checkpoint.convert(model, target, to=2)

    def come(_: object) -> None:
        (target / "precious").touch()

    with pytest.raises(RunError, match=r"\n  precious\n"):
        checkpoint.convert(model, target, to="full", overwrite=True, progress=come)
    assert (target / "precious").exists()
    report = checkpoint.convert(model, target, to="full", overwrite=True, discard_others=True)
    assert report.resumed_bytes > 0 and not (target / "precious").exists()


def test_a_damaged_checkpoint_is_known_by_names(model: Path) -> None:
    (model / "reshard.manifest.json").write_text("{}")
    (model / "precious").touch()
    assert [*find_others(model, ())] == ["precious"]


def test_discarding_others_without_replacing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without overwrite"):
        checkpoint.convert(model, tmp_path / "out", to=2, discard_others=True)
