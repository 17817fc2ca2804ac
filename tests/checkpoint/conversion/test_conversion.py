"""Conversions: every shard of the target is what the oracle says, whatever the cuts."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.checkpoint_files import (
    MANIFEST,
    Cut,
    Tensor,
    check_shards,
    cuts,
    rank_files,
    read_file,
    read_metadata,
    read_ranks,
    small_folder,
    split_file,
    tensor,
    tensors,
    write_file,
    write_ranks,
)
from checkpoint.model_files import write_model
from reshard import DeviceMesh, checkpoint, spec
from reshard.errors import UnmatchedError, UsageError
from reshard.layout import Layout
from reshard.recipes import strategies
from reshard.recipes.rules import Rule
from selection import keep_covering


def convert(source: Path, target: Path, cut: Cut, replicas: str = "every") -> None:
    mesh, specs = cut
    rules = [Rule(name, str(spec) or "...") for name, spec in specs.items()]
    checkpoint.convert(
        source, target, to=mesh, rules=[*rules, "*=..."], replicas=replicas, threads=2
    )


@st.composite
def journeys(draw: st.DrawFn) -> tuple[dict[str, Tensor], Cut, Cut]:
    whole = draw(tensors())
    return whole, draw(cuts(whole)), draw(cuts(whole))


@given(journeys(), st.sampled_from([16, 64, 1000, 4 << 20]), st.sampled_from(["once", "every"]))
def test_whole_to_n_ranks_to_m_ranks_to_whole(
    journey: tuple[dict[str, Tensor], Cut, Cut], block_bytes: int, replicas: str
) -> None:
    whole, first, second = journey
    with small_folder(block_bytes) as folder:
        write_file(folder / "model.safetensors", whole)
        convert(folder / "model.safetensors", folder / "n", first, replicas)
        check_shards(folder / "n", whole, first[1], replicas)
        convert(folder / "n", folder / "m", second)
        check_shards(folder / "m", whole, second[1])
        checkpoint.convert(folder / "m", folder / "full", to="full")
        assert read_file(folder / "full" / "model.safetensors") == whole
        digests = [
            {name: t.digest.tensor for name, t in checkpoint.open(folder / place).tensors.items()}
            for place in ("n", "m", "full")
        ]
        assert digests[0] == digests[1] == digests[2]


@given(journeys(), st.sampled_from([16, 64, 1000]))
def test_shards_with_rubbish_in_their_padding(
    journey: tuple[dict[str, Tensor], Cut, Cut], block_bytes: int
) -> None:
    whole, (mesh, specs), second = journey
    with small_folder(block_bytes) as folder:
        write_ranks(folder / "n", whole, mesh, specs)
        convert(folder / "n", folder / "m", second)
        check_shards(folder / "m", whole, second[1])


# What a conversion leaves behind


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    write_file(folder / "model.safetensors", WHOLE, {"format": "pt", "trained by": "us"})
    (folder / "config.json").write_text('{"model_type": "unknown"}')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights")
    (folder / ".gitattributes").write_text("")
    return folder


WHOLE = {
    "small": tensor("bfloat16", (3, 5), 1),
    "page": tensor("float32", (32, 32), 2),
    "scalar": tensor("int64", (), 3),
    "pages": tensor("float64", (4, 256), 4),
    "empty": tensor("float16", (0, 7), 5),
    "odd": tensor("uint8", (4097,), 6),
}


def tensors_in_order(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and place in the file of every tensor, in the order of the file."""
    entries, data = split_file(path.read_bytes())
    begin = path.stat().st_size - len(data)
    entries.pop("__metadata__", None)
    found = [(name, *entry["data_offsets"]) for name, entry in entries.items()]
    return sorted(
        ((name, b - a, begin + a) for name, a, b in found), key=lambda item: (item[2], item[1])
    )


@pytest.mark.parametrize("to", ["full", "dp=2", "3"])
def test_whole_pages_come_first_and_begin_on_pages(source: Path, to: str) -> None:
    target = source.parent / "target"
    checkpoint.convert(source, target, to=to)
    for path in target.glob("*.safetensors"):
        found = tensors_in_order(path)
        whole = [size % 4096 == 0 for _, size, _ in found]
        assert whole == sorted(whole, reverse=True)
        assert all(at % 4096 == 0 for _, size, at in found if size % 4096 == 0)
        assert found[0][2] % 4096 == 0


@pytest.mark.parametrize("to", ["full", "dp=2", "3"])
def test_metadata_and_small_files_are_kept(source: Path, to: str) -> None:
    target = source.parent / "target"
    report = checkpoint.convert(source, target, to=to)
    for path in target.glob("*.safetensors"):
        metadata = read_metadata(path)
        assert (metadata["format"], metadata["trained by"]) == ("pt", "us")
    others = {
        path.relative_to(target).as_posix(): path.read_bytes()
        for path in target.rglob("*")
        if path.is_file() and path.suffix != ".safetensors" and path.name != MANIFEST
    }
    assert others == {
        name: (source / name).read_bytes() for name in ("config.json", "1_Pooling/config.json")
    }
    assert ("pytorch_model.bin", "weights in another format") in checkpoint.open(source).left_out
    said = [note for note in report.notes if note.startswith("other files that are not copied")]
    assert len(said) == 1
    assert "pytorch_model.bin (weights in another format)" in said[0]
    assert sorted(os.listdir(source.parent)) == ["source", "target"]


def test_the_marks_of_the_convention_do_not_outlive_it(source: Path) -> None:
    checkpoint.convert(source, source.parent / "cut", to="tp=2", rules=["page=tp, -", "*=..."])
    checkpoint.convert(source.parent / "cut", source.parent / "full", to="full")
    metadata = read_metadata(source.parent / "full" / "model.safetensors")
    assert metadata == {"format": "pt", "trained by": "us"}


def test_a_number_of_ranks_gets_whole_tensors_in_turn(source: Path) -> None:
    target = source.parent / "target"
    checkpoint.convert(source, target, to=3)
    order = list(checkpoint.open(source))
    stored = read_ranks(target)
    assert {rank: set(found) for rank, found in stored.items()} == {
        rank: set(order[rank::3]) for rank in range(3)
    }
    assert {name: t for found in stored.values() for name, t in found.items()} == WHOLE
    checkpoint.convert(target, source.parent / "full", to="full")
    assert read_file(source.parent / "full" / "model.safetensors") == WHOLE


def test_a_strategy_of_ones_own(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of flattened tensors, as FSDP and ZeRO have them: several boxes a rank."""
    monkeypatch.setattr(strategies, "_strategies", {})

    def flat(tensors: strategies.Tensors, ranks: int, *_: object) -> dict[str, Layout]:
        layouts = {}
        for name, (_, shape) in tensors.items():
            edges = [math.prod(shape) * rank // ranks for rank in range(ranks + 1)]
            cut = dict(enumerate(itertools.pairwise(edges)))
            layouts[name] = Layout.flat_ranges(shape, cut, slots=ranks)
        return layouts

    strategies.register_strategy("flat", flat)
    checkpoint.convert(source, source.parent / "flat", to=3, strategy="flat")
    stored = read_ranks(source.parent / "flat")
    for name in ("page", "odd", "small"):
        flattened = [stored[rank][name].bits.ravel() for rank in range(3)]
        assert np.concatenate(flattened).tobytes() == WHOLE[name].bits.tobytes()
    assert checkpoint.compare(source, source.parent / "flat").is_same
    checkpoint.convert(source.parent / "flat", source.parent / "cut", to=4, strategy="flat")
    assert checkpoint.compare(source, source.parent / "cut").is_same


def test_more_ranks_than_tensors(source: Path) -> None:
    checkpoint.convert(source, source.parent / "target", to=20)
    assert sorted(rank_files(source.parent / "target")) == list(range(len(WHOLE)))
    assert checkpoint.compare(source, source.parent / "target").is_same


@pytest.mark.parametrize("limit", [1, 5000, 10_000, 10**9])
def test_a_limit_for_files(source: Path, limit: int) -> None:
    target = source.parent / "target"
    checkpoint.convert(source, target, to="full", most_file_bytes=limit)
    files = sorted(path.name for path in target.glob("*.safetensors"))
    found = {file: read_file(target / file) for file in files}
    assert {name: t for tensors in found.values() for name, t in tensors.items()} == WHOLE
    for held in found.values():
        assert sum(t.size_bytes for t in held.values()) <= limit or len(held) == 1
    if limit == 10**9:
        assert files == ["model.safetensors"]
        assert not (target / "model.safetensors.index.json").exists()
        return
    many = len(files)
    assert files == [f"model-{n:05d}-of-{many:05d}.safetensors" for n in range(1, many + 1)]
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.size_bytes for t in WHOLE.values())
    assert index["weight_map"] == {
        name: file for file, tensors in found.items() for name in tensors
    }
    assert checkpoint.compare(source, target).is_same
    (target / MANIFEST).unlink()
    assert checkpoint.compare(source, target).is_same


def test_an_existing_target_is_replaced_only_with_overwrite(source: Path) -> None:
    target = source.parent / "target"
    checkpoint.convert(source, target, to="tp=4", rules=["page=tp, -", "*=..."])
    before = {path.name: path.read_bytes() for path in target.glob("*.*")}
    with pytest.raises(UsageError, match="overwrite"):
        checkpoint.convert(source, target, to="dp=2")
    assert {path.name: path.read_bytes() for path in target.glob("*.*")} == before
    checkpoint.convert(source, target, to="full", overwrite=True)
    assert [path.name for path in target.glob("*.safetensors")] == ["model.safetensors"]
    assert checkpoint.compare(source, target).is_same
    assert sorted(os.listdir(source.parent)) == ["source", "target"]


def test_a_checkpoint_converted_onto_itself(source: Path) -> None:
    checkpoint.convert(source, source.parent / "copy", to="full")
    rows = {"to": "tp=2", "rules": ["page=tp, -", "*=..."], "overwrite": True}
    with pytest.raises(UsageError, match=r"\.gitattributes\n  pytorch_model\.bin\n"):
        checkpoint.convert(source, source, **rows)
    checkpoint.convert(source, source, **rows, discard_others=True)
    assert checkpoint.open(source).format == "sharded-safetensors"
    assert checkpoint.compare(source, source.parent / "copy").is_same


def test_tensors_no_rule_matches_and_rules_that_match_none(source: Path) -> None:
    target, rules = source.parent / "target", ["page*=tp, -", "absent=tp"]
    with pytest.raises(UnmatchedError, match="no rule given matches 4 of 6 tensors: small, sc"):
        checkpoint.convert(source, target, to="tp=2", rules=rules)
    with pytest.raises(UsageError, match="'all' cannot be allowed; choose from incomplete"):
        checkpoint.convert(source, target, to="tp=2", allow=["all"])
    plan = checkpoint.plan_conversion(source, target, to="tp=2", rules=rules, allow=["unknown"])
    assert set(plan.unknown) == {"small", "scalar", "empty", "odd"}
    assert [rule.pattern for rule in plan.unused_rules] == ["absent"]
    assert os.listdir(source.parent) == ["source"], "planning writes nothing"


@pytest.mark.parametrize(
    ("to", "rules"),
    [
        ("tp=2,dp=2", ["p*=tp, -"]),
        ("tp=4", ["p*=-, tp@heads2", "odd=tp@cyclic1"]),
        ("tp=4", ["p*=tp@heads2, -", "small=-, tp@pad"]),
    ],
)
@pytest.mark.parametrize("replicas", ["once", "every"])
def test_a_run_reads_and_writes_the_planned_bytes(
    source: Path, to: str, rules: list[str], replicas: str
) -> None:
    """Every element is read from one shard, however often it is stored."""
    cut, full = source.parent / "cut", source.parent / "full"
    size = sum(t.size_bytes for t in WHOLE.values())
    plan = checkpoint.plan_conversion(
        source, cut, to=to, rules=[*rules, "*=..."], replicas=replicas
    )
    report = checkpoint.run_conversion(plan)
    assert report.read_bytes == size == sum(plan.read_bytes_by_rank.values())
    written = sum(path.stat().st_size for path in cut.glob("*.safetensors"))
    assert sum(plan.write_bytes_by_rank.values()) == written
    back = checkpoint.plan_conversion(cut, full, to="full")
    assert sum(back.read_bytes_by_rank.values()) == size
    report = checkpoint.run_conversion(back)
    # A shard's padding within rows is read with them, and small copies that lie in between.
    padding = sum(
        shard.size_bytes for found in read_ranks(cut).values() for shard in found.values()
    )
    slack = max(0, padding - size) if "pad" in str(rules) or replicas == "every" else 0
    assert size <= report.read_bytes <= size + slack
    assert report.written_bytes == (full / "model.safetensors").stat().st_size
    assert checkpoint.compare(source, full).is_same


def test_sizes_have_their_former_names_for_a_version(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"w": tensor("float32", (4, 4), 1)})
    plan = checkpoint.plan_conversion(tmp_path / "model.safetensors", tmp_path / "o", to="full")
    size = plan.workspace_size(1 << 20)
    with pytest.warns(DeprecationWarning, match="workspace_bytes_of is now workspace_size"):
        assert plan.workspace_bytes_of(1 << 20) == size.size_bytes
    with pytest.warns(DeprecationWarning, match="batch_bytes is now workspace_size"):
        assert plan.batch_bytes(1 << 20) == size.batch_bytes
    with (
        pytest.warns(DeprecationWarning, match="new_workspace is now"),
        plan.new_workspace() as own,
    ):
        assert own.span_bytes == size.span_bytes


def test_folders_and_notes_on_files_have_their_former_names_for_a_version(tmp_path: Path) -> None:
    source = tmp_path / "s"
    source.mkdir()
    write_file(source / "model.safetensors", {"w": tensor("float32", (4, 4), 1)})
    (source / "config.json").write_text("{}")
    plan = checkpoint.plan_conversion(source, tmp_path / "o.safetensors", to="full")
    with pytest.warns(DeprecationWarning, match="folders is now source.folder and target"):
        assert plan.folders == (source, tmp_path / "o.safetensors")
    with pytest.warns(DeprecationWarning, match="uncopied are in plan_notes"):
        (note,) = plan.uncopied
    assert "config.json" in note and note in plan.plan_notes


@pytest.mark.parametrize(
    ("shape", "rule"),
    keep_covering(
        1,
        itertools.product(
            [(1, 3000), (3000, 1), (3, 700), (2, 3, 500), (1, 1, 1, 999)],
            ["tp, ...", "..., tp", "..., tp@cyclic7", "..., tp@pad64"],
        ),
        "a shape and a rule that are in other pairs",
    ),
)
def test_rows_larger_than_a_block(
    tmp_path: Path, small_blocks: int, shape: tuple[int, ...], rule: str
) -> None:
    whole = {"w": tensor("float32", shape, 1)}
    mesh = DeviceMesh.of(tp=3)
    write_file(tmp_path / "model.safetensors", whole)
    plan = checkpoint.plan_conversion(
        tmp_path / "model.safetensors", tmp_path / "cut", to=mesh, rules=[f"w={rule}"]
    )
    assert plan.workspace_bytes < 5 * 4096, "a row need not fit into memory"
    checkpoint.run_conversion(plan, threads=2)
    check_shards(tmp_path / "cut", whole, {"w": spec(mesh, rule, ndim=len(shape))})
    checkpoint.convert(tmp_path / "cut", tmp_path / "full", to="full", threads=2)
    assert read_file(tmp_path / "full" / "model.safetensors") == whole


def test_padding_wider_than_the_tensor(tmp_path: Path) -> None:
    """The rows of a shard may be longer than those of the tensor, and than its blocks."""
    # The memory that writes `padded` has held all of `before`.
    whole = {"before": tensor("float32", (64, 128), 1), "padded": tensor("float32", (64, 3), 2)}
    mesh = DeviceMesh.of(tp=2)
    texts = {"before": "-, tp", "padded": "-, tp@pad64"}
    write_file(tmp_path / "model.safetensors", whole)
    rules = [f"{name}={text}" for name, text in texts.items()]
    source, cut = tmp_path / "model.safetensors", tmp_path / "cut"
    checkpoint.convert(source, cut, to=mesh, rules=[*rules, "*=..."], threads=1)
    check_shards(cut, whole, {name: spec(mesh, text) for name, text in texts.items()})
    checkpoint.convert(cut, tmp_path / "full", to="full", threads=1)
    assert read_file(tmp_path / "full" / "model.safetensors") == whole


def test_blocks_of_the_real_size(tmp_path: Path) -> None:
    whole = {
        "rows": tensor("float32", (5, 1_500_000), 1),
        "columns": tensor("bfloat16", (3_000_001, 3), 2),
        "pages": tensor("float32", (1024, 2048), 3),
    }
    mesh = DeviceMesh.of(tp=3)
    rules = {"rows": "-, tp", "columns": "tp@stride2, -", "pages": "tp, -"}
    write_file(tmp_path / "model.safetensors", whole)
    checkpoint.convert(
        tmp_path / "model.safetensors",
        tmp_path / "cut",
        to=mesh,
        rules=[f"{name}={text}" for name, text in rules.items()],
    )
    stored = read_ranks(tmp_path / "cut")
    columns = np.concatenate([stored[rank]["rows"].bits for rank in range(3)], axis=1)
    assert Tensor(whole["rows"].dtype, columns) == whole["rows"]
    pages = np.concatenate([stored[rank]["pages"].bits for rank in range(3)])
    assert Tensor(whole["pages"].dtype, pages) == whole["pages"]
    checkpoint.convert(tmp_path / "cut", tmp_path / "full", to="full")
    assert read_file(tmp_path / "full" / "model.safetensors") == whole


@pytest.mark.parametrize(
    ("source_format", "name", "target_format"),
    [
        ("torch-dcp", "pytorch_model.bin", "torch-pickle"),
        ("torch-dcp", "pytorch_model.bin/notes", "torch-pickle"),
        ("safetensors", "iter_0000000", "megatron-legacy"),
        # Files that the format adds after all tensors.
        ("safetensors", "metadata.json", "torch-dist"),
        ("safetensors", "metadata.json/notes", "torch-dist"),
        ("safetensors", "_sharding", "orbax"),
        ("safetensors", "d", "orbax"),
    ],
)
def test_another_file_does_not_replace_one_of_the_target(
    source_format: str, name: str, target_format: str, tmp_path: Path
) -> None:
    """A file of that name in the source that is no part of its checkpoint."""
    whole = write_model(tmp_path / "whole", layers=1)
    source, target = tmp_path / "source", tmp_path / "target"
    # Orbax has no arrays without elements.
    checkpoint.convert(whole, source, to="full", format=source_format, exclude=["*.bias"])
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_bytes(b"other")
    to = "tp=1" if target_format == "megatron-legacy" else "full"
    report = checkpoint.convert(source, target, to=to, format=target_format)
    assert [note for note in report.notes if f"{name} (the target's own file has" in note]
    assert checkpoint.compare(source, target).is_same
    assert not (target / name).is_file() or (target / name).read_bytes() != b"other"
