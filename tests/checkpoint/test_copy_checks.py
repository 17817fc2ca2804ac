"""Copies that ranks hold of a part are compared in every format, and differing ones refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from checkpoint.checkpoint_files import (
    Tensor,
    rank_files,
    read_file,
    tensor,
    write_file,
    write_ranks,
)
from cli.command_runs import run_here
from reshard import DeviceMesh, checkpoint, spec
from reshard.binding import Binding, FileRange
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.copy_checks import (
    CopyReport,
    compare_copies,
    expect_equal_copies,
    list_read_checksums,
)
from reshard.checkpoint.formats.safetensors.sharded import shard_file_name
from reshard.errors import CoverageError, UsageError
from reshard.layout import Box, Layout

Arrays = Mapping[str, NDArray[np.float32]]


def counted(*shape: int, first: int = 0) -> NDArray[np.float32]:
    return np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape)


def save_ranks(folder: Path, *ranks: Arrays) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, arrays in enumerate(ranks):
        save_file(dict(arrays), folder / f"rank{rank}.safetensors")
    return folder


def open_copies(folder: Path, ranks: int = 2, rule: str = "*=...", **options: object) -> Checkpoint:
    """Open files of ranks that hold copies of one another, by default of every tensor."""
    return checkpoint.open(folder, mesh=f"ep={ranks}", rules=[rule], **options)  # type: ignore[arg-type]


@pytest.fixture
def differing(tmp_path: Path) -> Path:
    """Two ranks whose `w` differs in its last row, and whose `b` is equal."""
    same, other = counted(4, 6), counted(4, 6)
    other[3, 5] += 1
    b = counted(3)
    return save_ranks(tmp_path / "ranks", {"w": same, "b": b}, {"w": other, "b": b})


def test_copies_without_checksums_are_sampled(differing: Path) -> None:
    report = compare_copies(open_copies(differing))
    assert [str(one) for one in report.differing] == [
        "w: rank 0, rank 1 differ in [0:4, 0:6] (by a sample; 1 of 24 sampled elements differ, "
        "by up to 0.04 of the largest)"
    ]
    assert (report.parts, report.by_checksum, report.by_reading, report.unchecked) == (2, 0, 2, 0)
    assert report.read_bytes == 2 * (96 + 12)


def test_the_error_names_ranks_and_the_options(differing: Path) -> None:
    with pytest.raises(CoverageError, match="w: rank 0, rank 1 differ") as caught:
        expect_equal_copies(open_copies(differing))
    assert "--source-mesh ep=2 --source-rule 'w=ep, ...'" in str(caught.value)
    assert "--allow differing-copies" in str(caught.value)


@pytest.mark.parametrize("door", ["convert", "load", "diff", "plan"])
def test_every_entry_point_refuses_differing_copies(
    differing: Path, tmp_path: Path, door: str
) -> None:
    def enter(source: Checkpoint) -> object:
        if door == "convert":
            return checkpoint.convert(source, tmp_path / "out", to="full")
        if door == "load":
            return checkpoint.load(source)
        if door == "diff":
            return checkpoint.diff(source, source, tmp_path / "out.delta")
        return checkpoint.plan_conversion(source, tmp_path / "out", to="full")

    with pytest.raises(CoverageError, match="differing-copies"):
        enter(open_copies(differing))
    assert not (tmp_path / "out").exists()
    enter(open_copies(differing, allow=["differing-copies"]))


def test_copies_of_unselected_tensors_may_differ(differing: Path, tmp_path: Path) -> None:
    source = open_copies(differing)
    checkpoint.convert(source, tmp_path / "out", to="full", exclude=["w"])
    assert list(checkpoint.load(source, exclude=["w"])) == ["b"]


def test_allowed_copies_are_the_lowest_ranks_and_noted(differing: Path, tmp_path: Path) -> None:
    source = open_copies(differing)
    conversion = checkpoint.plan_conversion(
        source, tmp_path / "out", to="full", allow=["differing-copies"]
    )
    assert "copies of 1 tensor differ, which was allowed" in conversion.source.notes[-1]
    checkpoint.run_conversion(conversion)
    written = checkpoint.load(tmp_path / "out")
    np.testing.assert_array_equal(written["w"], counted(4, 6))


def test_a_comparison_lists_differing_copies(differing: Path, tmp_path: Path) -> None:
    whole = {"w": counted(4, 6), "b": counted(3)}
    save_file(whole, tmp_path / "whole.safetensors")
    found = checkpoint.compare(open_copies(differing), tmp_path / "whole.safetensors")
    assert [one.name for one in found.differences] == ["w"]
    assert "rank 0, rank 1 differ" in found.differences[0].problem
    allowed = open_copies(differing, allow=["differing-copies"])
    found = checkpoint.compare(allowed, tmp_path / "whole.safetensors")
    assert found.is_same
    assert "rank 0, rank 1 differ" in found.notes[0]


@pytest.mark.parametrize("at", ["first", "middle", "last"])
def test_a_sample_has_the_first_middle_and_last_bytes(tmp_path: Path, at: str) -> None:
    one, other = counted(64, 1024), counted(64, 1024)
    row = {"first": 0, "middle": 32, "last": 63}[at]
    other[row, 511] += 1
    save_ranks(tmp_path / "ranks", {"w": one}, {"w": other})
    report = compare_copies(open_copies(tmp_path / "ranks"))
    assert report.differing
    assert report.read_bytes == 2 * 3 * 4096


def test_all_finds_a_byte_that_a_sample_does_not(tmp_path: Path) -> None:
    one, other = counted(64, 1024), counted(64, 1024)
    other[7, 5] += 1
    save_ranks(tmp_path / "ranks", {"w": one}, {"w": other})
    source = open_copies(tmp_path / "ranks")
    assert not compare_copies(source).differing
    assert (
        compare_copies(source, "all").differing[0].found_by.startswith("every byte compared; 0 of")
    )
    assert compare_copies(source, "none").parts == 0
    with pytest.raises(CoverageError):
        checkpoint.load(open_copies(tmp_path / "ranks", check_copies="all"))
    with pytest.raises(CoverageError):
        checkpoint.plan_conversion(source, tmp_path / "out", to="full", check_copies="all")


def test_bits_count_and_not_values(tmp_path: Path) -> None:
    zeros, negative = np.zeros(4, np.float32), -np.zeros(4, np.float32)
    save_ranks(tmp_path / "zeros", {"w": zeros}, {"w": negative})
    assert compare_copies(open_copies(tmp_path / "zeros")).differing
    nan = np.full(4, np.nan, np.float32)
    save_ranks(tmp_path / "nan", {"w": nan}, {"w": nan})
    assert not compare_copies(open_copies(tmp_path / "nan")).differing


def test_running_statistics_are_listed_and_not_refused(tmp_path: Path) -> None:
    names = ("bn.running_mean", "bn.running_var")
    ranks = [{name: counted(3, first=rank) for name in names} for rank in range(2)]
    save_ranks(tmp_path / "ranks", *ranks)
    source = open_copies(tmp_path / "ranks")
    report = compare_copies(source)
    assert not report.differing
    assert {one.tensor for one in report.by_nature} == set(names)
    noted = expect_equal_copies(source)
    assert "2 tensors differ by rank, as such state does" in noted.notes[-1]


def test_only_some_ranks_may_hold_copies(tmp_path: Path) -> None:
    """On a mesh of two axes, copies along one of them are compared with one another alone."""
    ranks = [{"w": counted(2, first=10 * (rank // 2))} for rank in range(4)]
    save_ranks(tmp_path / "ranks", *ranks)
    source = checkpoint.open(tmp_path / "ranks", mesh="tp=2,dp=2", rules=["w=tp"])
    report = compare_copies(source)
    assert (report.parts, report.differing) == (2, ())
    with pytest.raises(CoverageError, match=r"rank 0, rank 2 differ in \[0:2\]"):
        expect_equal_copies(checkpoint.open(tmp_path / "ranks", mesh="dp=2,tp=2", rules=["w=tp"]))


def test_a_tensor_without_copies_is_not_read(tmp_path: Path) -> None:
    save_ranks(tmp_path / "ranks", {"w": counted(2)}, {"w": counted(2, first=5)})
    report = compare_copies(open_copies(tmp_path / "ranks", rule="w=ep"))
    assert report == CopyReport()


def test_checksums_decide_without_reading_and_copies_are_not_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        whole = {"w": torch.arange(6.0), "t": torch.arange(6.0).reshape(2, 3).t()}
        torch.save(whole, tmp_path / "ranks" / f"rank{rank}.pt")
    source = open_copies(tmp_path / "ranks")
    report = compare_copies(source)
    assert (report.parts, report.by_checksum, report.read_bytes) == (2, 2, 0)
    assert len(source.checksums) == 4
    assert {one.place.path for one in list_read_checksums(source)} == {"rank0.pt"}
    torch.save({"w": torch.arange(6.0), "t": torch.zeros(3, 2)}, tmp_path / "ranks" / "rank1.pt")
    report = compare_copies(open_copies(tmp_path / "ranks"))
    assert [one.tensor for one in report.differing] == ["t"]


def test_arrays_of_ranks_are_compared_too() -> None:
    held = checkpoint.describe_ranks(
        {0: {"w": counted(4)}, 1: {"w": counted(4, first=1)}}, "dp=2", rules=["w=-"]
    )
    with pytest.raises(CoverageError, match="rank 0, rank 1"):
        checkpoint.load(held)


def test_unknown_words_are_refused(differing: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="check_copies 'some'"):
        open_copies(differing, check_copies="some")
    with pytest.raises(UsageError, match="check_copies 'some'"):
        checkpoint.plan_conversion(differing, tmp_path / "out", to="full", check_copies="some")
    with pytest.raises(UsageError, match="'unknown' cannot be allowed"):
        open_copies(differing, allow=["unknown"])


def test_the_commands_show_differing_copies(differing: Path, tmp_path: Path) -> None:
    source = (str(differing), "--source-mesh", "ep=2", "--source-rule", "*=...")
    shown = run_here("inspect", *source)
    assert "copies differ: w: rank 0, rank 1 differ" in shown.output
    out = str(tmp_path / "out")
    arguments = ("convert", source[0], out, *source[1:], "--to", "full")
    refused = run_here(*arguments)
    assert refused.code == 2
    assert "--allow differing-copies" in refused.errors
    assert run_here(*arguments, "--allow", "differing-copies").code == 0
    verify = ("verify", source[0], out, *source[1:])
    assert run_here(*verify).code == 1
    assert run_here(*verify, "--allow", "differing-copies").code == 0


def test_copies_of_a_read_tensor_are_compared_once(
    differing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_copies(differing)
    with pytest.raises(CoverageError, match="w: rank 0, rank 1 differ"):
        checkpoint.read_tensor(source, "w")
    checkpoint.read_tensor(source, "b")
    monkeypatch.setattr("reshard.checkpoint.copy_checks.compare_copies", None)
    checkpoint.read_tensor(source, "b")


def test_the_suggested_mesh_has_the_axes_of_replicas(tmp_path: Path) -> None:
    """Plain tensors of four ranks, of which two each hold equal parts."""
    for groups, mesh in (((0, 0, 1, 1), "ep=2,dp=2"), ((0, 1, 0, 1), "dp=2,ep=2")):
        folder = tmp_path / mesh
        save_ranks(folder, *({"w": counted(2, first=10 * group)} for group in groups))
        with pytest.raises(
            CoverageError, match=rf"--source-mesh {mesh} --source-rule 'w=ep, \.\.\.'"
        ):
            checkpoint.load(open_copies(folder, 4))
        loaded = checkpoint.load(checkpoint.open(folder, mesh=mesh, rules=["w=ep, ..."]))
        np.testing.assert_array_equal(loaded["w"], [0, 1, 10, 11])


def test_boxes_that_overlap_in_part_are_compared_there(tmp_path: Path) -> None:
    """A rank has rows 0 to 3, another all rows: bare boxes, as ranks of an engine hold them."""
    save_ranks(tmp_path / "ranks", {"w": counted(3, 2)}, {"w": counted(4, 2)})
    opened = [checkpoint.open(tmp_path / "ranks" / f"rank{rank}.safetensors") for rank in range(2)]
    places = {rank: one["w"].file_range(0) for rank, one in enumerate(opened)}
    boxes = [(0, Box((0, 0), (3, 2))), (1, Box((0, 0), (4, 2)))]
    binding = Binding(Layout.from_boxes((4, 2), boxes), places, {})
    files = tuple(one.files[0] for one in opened)
    tensors = {"w": dataclasses.replace(opened[0]["w"], binding=binding)}
    joined = dataclasses.replace(opened[0], tensors=tensors, files=files, identities={})
    assert not compare_copies(joined).differing
    save_ranks(tmp_path / "ranks", {"w": counted(3, 2)}, {"w": counted(4, 2, first=1)})
    joined = dataclasses.replace(joined)
    assert compare_copies(joined).differing[0].part == "[0:3, 0:2]"


@pytest.mark.parametrize("text", ["x@pad2 / y@halo[2,0], -", "x@halo[1,1], -"])
def test_halos_that_are_not_fresh_are_not_compared(tmp_path: Path, text: str) -> None:
    """Nor where a shard has only a halo, whose rows are all that another rank owns."""
    mesh = DeviceMesh.of(x=2, y=2)
    whole = {"w": tensor("float32", (6, 2))}
    write_ranks(tmp_path, whole, mesh, {"w": spec(mesh, text)})
    # Replicas differ in their halos too.
    for number, path in enumerate(sorted(rank_files(tmp_path).values())):
        shard = read_file(path)["w"]
        bits = shard.bits.copy()
        bits[bits == 0xA5A5A5A5] = number
        write_file(path, {"w": Tensor(shard.dtype, bits)}, {"format": "pt"})
    opened = checkpoint.open(tmp_path)
    assert not compare_copies(opened, "all").differing
    assert checkpoint.load(opened)["w"].tobytes() == whole["w"].bits.tobytes()


def test_samples_keep_to_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First windows of all copies come before the others of the largest; the rest is counted."""
    ranks = [{"a": counted(64, 1024), "b": counted(32, 1024), "c": counted(1024)}] * 2
    source = open_copies(save_ranks(tmp_path / "ranks", *ranks))
    for windows, unchecked in ((7, 0), (5, 0), (3, 0), (2, 1)):
        limit = "reshard.checkpoint.copy_checks.MIN_SAMPLE_LIMIT_BYTES"
        monkeypatch.setattr(limit, windows * 2 * 4096)
        report = compare_copies(source)
        assert (report.read_bytes, report.unchecked) == (min(windows, 7) * 2 * 4096, unchecked)
        assert bool(report.describe()) is (unchecked > 0)


DAMAGE = "written from one tensor"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A model of two ranks, each of whose files has all of the norm, and its steps."""
    whole = {"w": counted(4, 6), "norm": counted(8), "step": counted(2)}
    save_file(whole, tmp_path / "whole.safetensors")
    checkpoint.convert(
        tmp_path / "whole.safetensors", tmp_path / "cut", to="tp=2", rules=["w=tp, -", "*=..."]
    )
    return tmp_path / "cut"


def damage(folder: Path, rank: int, name: str) -> None:
    file = folder / shard_file_name(rank)
    content = bytearray(file.read_bytes())
    place = next(
        file_range
        for file_range in list_positions(checkpoint.open(folder), name)
        if file_range.path == file.name
    )
    content[place.start_bytes] ^= 1
    file.write_bytes(content)


def list_positions(opened: Checkpoint, name: str) -> list[FileRange]:
    tensor = opened[name]
    return [tensor.file_range(slot, 0, 0) for slot in tensor.stored_slots]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["norm", "step"])
def test_a_copy_that_reshard_wrote_and_that_changed_is_found_by_every_door(
    shards: Path, tmp_path: Path, rank: int, name: str
) -> None:
    whole, other = tmp_path / "whole.safetensors", tmp_path / "other"
    checkpoint.convert(shards, other, to="tp=2", rules=["*=..."])
    assert checkpoint.compare(whole, shards).is_same
    assert not checkpoint.check_digests(shards).damaged
    damage(shards, rank, name)
    assert name in {one.name for one in checkpoint.compare(whole, shards).differences}
    assert name in {one.tensor for one in checkpoint.check_digests(shards).damaged}
    doors = [
        lambda: checkpoint.plan_conversion(shards, tmp_path / "new", to="full"),
        lambda: checkpoint.load(shards),
        lambda: checkpoint.load(shards, to="tp=2", rules=["*=..."], rank=1 - rank),
        lambda: checkpoint.diff(shards, other, tmp_path / "delta"),
    ]
    for enter in doors:
        with pytest.raises(CoverageError, match=f"{name}: rank 0, rank 1 differ.*{DAMAGE}"):
            enter()
    opened = checkpoint.open(shards, allow=["differing-copies"])
    assert checkpoint.compare(whole, opened).is_same == (rank == 1)


def test_a_copy_that_changed_is_found_in_files_with_checksums_of_their_own(tmp_path: Path) -> None:
    """The checksum is still that of the bytes that were written."""
    whole, target = tmp_path / "whole.safetensors", tmp_path / "ranks"
    save_file({"w": counted(4, 6), "norm": counted(8)}, whole)
    checkpoint.convert(whole, target, to="tp=2", rules=["w=tp, -", "*=..."], format="rank-files")
    [first, second] = list_positions(checkpoint.open(target), "norm")
    content = bytearray((target / second.path).read_bytes())
    assert first.path != second.path
    content[second.start_bytes] ^= 1
    (target / second.path).write_bytes(content)
    assert [one.name for one in checkpoint.compare(whole, target).differences] == ["norm"]
    assert [one.tensor for one in checkpoint.check_digests(target).damaged] == ["norm"]


def test_a_comparison_reads_every_byte_of_copies_that_reshard_wrote(tmp_path: Path) -> None:
    save_file({"w": counted(64, 1024)}, tmp_path / "whole.safetensors")
    checkpoint.convert(tmp_path / "whole.safetensors", tmp_path / "cut", to="tp=2", rules=["*=..."])
    opened = checkpoint.open(tmp_path / "cut")
    assert compare_copies(opened).read_bytes == 2 * 3 * 4096
    assert compare_copies(opened, reads_recorded=True).read_bytes == 2 * 64 * 4096
    file = tmp_path / "cut" / shard_file_name(1)
    content = bytearray(file.read_bytes())
    content[-3 * 4096] ^= 1
    file.write_bytes(content)
    assert not compare_copies(checkpoint.open(tmp_path / "cut")).differing
    assert not checkpoint.compare(tmp_path / "whole.safetensors", tmp_path / "cut").is_same
    [damaged] = checkpoint.check_digests(tmp_path / "cut").damaged
    assert damaged.problem.startswith("rank 0, rank 1 differ in [0:64, 0:1024] (every byte")
    assert damaged.places[0].startswith(f"{file.name} from byte ")
