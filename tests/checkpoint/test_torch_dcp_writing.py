"""Distributed checkpoints that reshard writes, read by PyTorch, `zipfile` and reshard."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.checkpoint_files import (
    Cut,
    Tensor,
    cuts,
    read_file,
    small_folder,
    tensor,
    tensors,
    write_file,
)
from checkpoint.faulty_process import FaultyProcesses
from checkpoint.formats.torch_dcp.test_reader import DTYPES, FIXTURES, as_torch, bits_of, edit
from checkpoint.model_files import COLUMNS, ROWS, contents, write_model
from live_processes import expect_all_end_well, run_ranks
from reshard import checkpoint
from reshard.checkpoint.conversion.run import run_conversion
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.cli import main
from reshard.errors import CheckpointError, DigestError, RecipeError, UsageError
from reshard.recipes.rules import Rule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402
from torch.distributed.tensor import Replicate, Shard  # noqa: E402

from checkpoint import torch_checkpoints  # noqa: E402
from selection import choose  # noqa: E402

WHOLE = {
    "w": tensor("float32", (7, 6), 1),
    "h": tensor("bfloat16", (5, 4, 3), 2),
    "b": tensor("float16", (10,), 3),
    "q": tensor("float8_e4m3fn", (9, 2), 4),
    "i": tensor("int64", (3, 3), 5),
    "m": tensor("bool", (6,), 6),
    "s": tensor("float64", (), 7),
    "e": tensor("float32", (0, 3), 8),
}


def as_bytes(value: Any) -> bytes:
    flat = value.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def empty_like(whole: Tensor) -> Any:
    return torch.empty(whole.shape, dtype=getattr(torch, whole.dtype.name))


def read_by_torch(folder: Path, wholes: dict[str, Tensor]) -> dict[str, bytes]:
    state = {name: empty_like(whole) for name, whole in wholes.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return {name: as_bytes(value) for name, value in state.items()}


def bytes_of(wholes: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: whole.bits.tobytes() for name, whole in wholes.items()}


def check_archives(folder: Path) -> int:
    """Every checksum of every archive is right, by Python's `zipfile`; answers how many."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        content = (folder / info.relative_path).read_bytes()
        archive = content[info.offset : info.offset + info.length]
        assert zipfile.ZipFile(io.BytesIO(archive)).testzip() is None
    return len(metadata.storage_data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_file(tmp_path / "model.safetensors", WHOLE)
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize(
    ("to", "rules"),
    [
        ("full", []),
        ("3", []),
        ("tp=1", ["s=...", "*=tp, ..."]),
        ("tp=2", ["s=...", "*=tp, ..."]),
        ("tp=8", ["s=...", "*=tp, ..."]),
        ("tp=2,dp=2", ["w=tp, dp", "h=tp / dp, -, -", "b=dp tp", "i=-, dp"]),
        ("tp=2", ["w=tp@stride2, -", "b=tp@blocks[4,6]"]),
        ("tp=2", ["w=tp@pad8, -", "b=tp@pad16"]),
        ("tp=2", ["w=tp@halo[1,1], -"]),
        ("tp=3", ["w=tp@windows[0:3,2:5,5:7], -"]),
        ("tp=2", ["w=tp@windows[0:3,0:7], -"]),
        ("tp=4", ["w=-, tp@heads2", "b=tp@sizes[0,7,0,3]"]),
    ],
)
def test_torch_reads_what_we_write(
    tmp_path: Path, model: Path, to: str, rules: list[str], small_blocks: int
) -> None:
    made = tmp_path / "made"
    checkpoint.convert(
        model, made, to=to, rules=[*rules, "*=..."] if rules else [], format="torch-dcp"
    )
    assert read_by_torch(made, WHOLE) == bytes_of(WHOLE)
    assert check_archives(made) >= len(WHOLE)
    assert checkpoint.compare(model, made).is_same
    assert not checkpoint.check_digests(made).damaged
    checkpoint.convert(made, tmp_path / "full", to="full")
    assert read_file(tmp_path / "full" / "model.safetensors") == WHOLE


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_torch_reads_it_at_any_world_size(tmp_path: Path, model: Path, ranks: int) -> None:
    made = tmp_path / "made"
    checkpoint.convert(model, made, to="tp=3", rules=["[wi]=tp, -", "*=..."], format="torch-dcp")
    for rank in range(ranks):
        with torch_checkpoints.standing_for(rank, ranks):
            mesh = torch_checkpoints.mesh_of(ranks)
            placements = {"w": [Shard(1)], "i": [Shard(0)], "h": [Replicate()]}
            state = {
                name: torch_checkpoints.cut(empty_like(WHOLE[name]), mesh, placement)
                for name, placement in placements.items()
            }
            torch_checkpoints.load(made, state, ranks, rank)
            for name, placement in placements.items():
                expected = torch_checkpoints.cut(as_torch(WHOLE[name]), mesh, placement)
                assert as_bytes(state[name].to_local()) == as_bytes(expected.to_local())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_type_of_torch(tmp_path: Path, dtype: str) -> None:
    whole = {"w": tensor(dtype, (5, 3)), "x": tensor(dtype, (70, 70))}
    state = {name: as_torch(one) for name, one in whole.items()}
    torch_checkpoints.save(tmp_path / "dcp", 1, lambda rank: state)
    checkpoint.convert(
        tmp_path / "dcp", tmp_path / "made", to="tp=2", rules=["*=tp, -"], format="torch-dcp"
    )
    assert read_by_torch(tmp_path / "made", whole) == bytes_of(whole)
    assert bits_of(tmp_path / "made") == whole
    check_archives(tmp_path / "made")


def test_large_storages_begin_on_pages(tmp_path: Path) -> None:
    write_file(tmp_path / "m.safetensors", {"a": WHOLE["w"], "big": tensor("float32", (128, 64))})
    checkpoint.convert(
        tmp_path / "m.safetensors", tmp_path / "made", to="tp=2", rules=["*=tp, -"],
        format="torch-dcp",
    )  # fmt: skip
    made = open_checkpoint(tmp_path / "made")
    assert [made["big"].file_range(rank).start_bytes % 4096 for rank in (0, 1)] == [0, 0]
    assert [made["a"].file_range(rank).start_bytes % 64 for rank in (0, 1)] == [0, 0]


NESTED = {
    "model": {"w": torch.arange(24.0).reshape(6, 4)},
    "optimizer": {"groups": [{"lr": 0.5, "name": "all"}], "step": torch.tensor(9)},
    "epoch": 3,
}


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    def state(rank: int) -> dict[str, Any]:
        mesh = torch_checkpoints.mesh_of(3)
        cut = torch_checkpoints.cut(NESTED["model"]["w"], mesh, [Shard(0)])
        return {**NESTED, "model": {"w": cut}}

    torch_checkpoints.save(tmp_path / "nested", 3, state)
    return tmp_path / "nested"


def test_what_is_no_tensor_is_kept(tmp_path: Path, nested: Path) -> None:
    made = tmp_path / "made"
    conversion = checkpoint.plan_conversion(
        nested, made, to="tp=2", rules=["model.w=-, tp", "*=..."], format="torch-dcp"
    )
    assert conversion.losses == ()
    run_conversion(conversion)
    # PyTorch's own program puts the nested state together again.
    dcp_to_torch_save(made, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=False)
    assert found["optimizer"]["groups"] == NESTED["optimizer"]["groups"]
    assert found["epoch"] == 3
    assert torch.equal(found["optimizer"]["step"], NESTED["optimizer"]["step"])
    assert torch.equal(found["model"]["w"], NESTED["model"]["w"])
    # And byte for byte.
    for name, item in open_checkpoint(nested).items.items():
        other = open_checkpoint(made).items[name]
        assert stored(nested, item) == stored(made, other)
    assert checkpoint.compare(nested, made).is_same


def test_a_flipped_byte_of_what_is_no_tensor_is_noticed(tmp_path: Path, nested: Path) -> None:
    made, again = tmp_path / "made", tmp_path / "again"
    checkpoint.convert(nested, made, to="full", format="torch-dcp")
    item = open_checkpoint(made).items["epoch"]
    flip(made / item.place.path, item.place.start_bytes + 100)
    assert [block.tensor for block in checkpoint.check_digests(made).damaged] == ["epoch"]
    (difference,) = checkpoint.compare(nested, made).differences
    assert (difference.name, difference.problem) == ("epoch", "is no tensor, and has other bytes")
    with pytest.raises(DigestError, match="'epoch'"):
        checkpoint.convert(made, again, to="full", format="torch-dcp")
    assert not again.exists()


def test_transformed_bytes_stay_as_they_are(tmp_path: Path, nested: Path) -> None:
    def transform(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "epoch":
                info.transform_descriptors = ["stream.zstd"]

    edit(nested, transform)
    checkpoint.convert(nested, tmp_path / "made", to="full", format="torch-dcp")
    metadata = pickle.loads((tmp_path / "made" / ".metadata").read_bytes())
    found = {index.fqn: info.transform_descriptors for index, info in metadata.storage_data.items()}
    assert found.pop("epoch") == ["stream.zstd"]
    assert {*found.values()} == {None}
    before, after = (open_checkpoint(path).items["epoch"] for path in (nested, tmp_path / "made"))
    assert stored(nested, before) == stored(tmp_path / "made", after)


def test_a_megatron_checkpoint_recut(tmp_path: Path) -> None:
    source = FIXTURES / "megatron_torch_dist"
    if not source.exists():
        pytest.skip("the fixtures beside the repository are not there")
    made = tmp_path / "made"
    checkpoint.convert(source, made, to="tp=4", rules=["w=-, tp", "*=..."], format="torch-dcp")
    state = {"w": torch.zeros(8, 8)}
    dcp.load(state, checkpoint_id=made, no_dist=True)
    halves = [torch.arange(32.0).view(4, 8) + 100 * rank for rank in (0, 1)]
    assert torch.equal(state["w"], torch.cat(halves))
    # What `common.pt` has beside tensors is a pickled item, as PyTorch saves values.
    assert checkpoint.compare(source, made).is_same
    checkpoint.convert(source, tmp_path / "again", to="tp=2", rules=["*=..."], format="torch-dist")
    common = torch.load(tmp_path / "again" / "common.pt", weights_only=False)
    assert common["cfg"] == {"a": 1}


def test_what_eight_ranks_of_torch_saved_for_three(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        mesh = torch_checkpoints.mesh_of(2, 4, names=("dp", "tp"))
        return {
            "w": torch_checkpoints.cut(as_torch(WHOLE["w"]), mesh, [Shard(0), Shard(1)]),
            "h": torch_checkpoints.cut(as_torch(WHOLE["h"]), mesh, [Shard(0), Shard(0)]),
            "b": torch_checkpoints.cut(as_torch(WHOLE["b"]), mesh, [Replicate(), Shard(0)]),
        }

    torch_checkpoints.save(tmp_path / "dcp", 8, state)
    rules = ["w=tp, -", "h=-, -, tp", "b=tp"]
    checkpoint.convert(
        tmp_path / "dcp",
        tmp_path / "made",
        to="tp=3",
        rules=[*rules, "*=..."] if rules else [],
        format="torch-dcp",
    )
    wholes = {name: WHOLE[name] for name in "whb"}
    assert read_by_torch(tmp_path / "made", wholes) == bytes_of(wholes)
    assert open_checkpoint(tmp_path / "made").ranks == 3


def test_a_checkpoint_of_nothing(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {})
    checkpoint.convert(
        tmp_path / "model.safetensors", tmp_path / "made", to="full", format="torch-dcp"
    )
    assert len(open_checkpoint(tmp_path / "made")) == 0
    assert dcp.FileSystemReader(tmp_path / "made").read_metadata().state_dict_metadata == {}


def stored(folder: Path, item: Any) -> bytes:
    content = (folder / item.place.path).read_bytes()
    return content[item.place.start_bytes : item.place.start_bytes + item.size_bytes]


@pytest.mark.parametrize("format_name", ["safetensors", "sharded-safetensors"])
def test_what_cannot_be_kept_is_said_before_anything_is_written(
    tmp_path: Path, nested: Path, format_name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    to = "full" if format_name == "safetensors" else "dp=2"
    assert main(["plan", str(nested), "--to", to, "--json"]) == 0
    notes = json.loads(capfd.readouterr().out)["notes"]
    lost = ", ".join(open_checkpoint(nested).items)
    assert "epoch" in lost and "optimizer" in lost
    assert any(lost in note and "--format torch-dcp" in note for note in notes)
    assert main(["convert", str(nested), str(tmp_path / "made"), "--to", to]) == 0
    assert lost in capfd.readouterr().err


def test_whole_tensors_without_a_nested_state(tmp_path: Path, model: Path) -> None:
    made = tmp_path / "made"
    code = main(["convert", str(model), str(made), "--to", "full", "--format", "torch-dcp"])
    assert code == 0
    assert sorted(path.name for path in made.iterdir()) == [
        ".metadata", "__0_0.distcp", "reshard.manifest.json",
    ]  # fmt: skip
    dcp_to_torch_save(made, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt")
    assert {name: as_bytes(value) for name, value in found.items()} == bytes_of(WHOLE)


@settings(max_examples=choose(10, 40))
@given(st.data(), st.sampled_from([16, 64, 1000, 4 << 20]))
def test_any_cut_to_any_other(data: st.DataObject, block_bytes: int) -> None:
    whole = data.draw(tensors())
    first, second = data.draw(cuts(whole)), data.draw(cuts(whole))
    with small_folder(block_bytes) as folder:
        write_file(folder / "model.safetensors", whole)
        convert(folder / "model.safetensors", folder / "n", first)
        convert(folder / "n", folder / "m", second)
        assert bits_of(folder / "m") == whole
        # Without our manifest, what PyTorch sees says the same.
        (folder / "m" / "reshard.manifest.json").unlink()
        checkpoint.convert(folder / "m", folder / "full", to="full", threads=2)
        assert read_file(folder / "full" / "model.safetensors") == whole
        check_archives(folder / "m")


def convert(source: Path, target: Path, cut: Cut) -> None:
    mesh, specs = cut
    rules = [Rule(name, str(spec) or "...") for name, spec in specs.items()]
    checkpoint.convert(
        source,
        target,
        to=mesh,
        rules=[*rules, "*=..."] if rules else [],
        format="torch-dcp",
        threads=2,
    )


# Damage


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("strided", [False, True])
def test_a_flipped_byte_that_torch_saved_is_noticed(tmp_path: Path, strided: bool) -> None:
    data = torch.arange(4000.0).reshape(40, 100)
    state = {"w": data.t().contiguous().t() if strided else data, "v": torch.ones(3)}
    torch_checkpoints.save(tmp_path / "dcp", 1, lambda rank: state)
    place = open_checkpoint(tmp_path / "dcp")["w"].file_range(0)
    flip(tmp_path / "dcp" / place.path, place.start_bytes + 777)
    with pytest.raises(DigestError, match=r"__0_0\.distcp bytes .*of tensor 'w'"):
        checkpoint.convert(tmp_path / "dcp", tmp_path / "made", to="full")
    assert not (tmp_path / "made").exists()
    report = checkpoint.check_digests(tmp_path / "dcp")
    assert [block.tensor for block in report.damaged] == ["w"]
    assert main(["inspect", str(tmp_path / "dcp"), "--digest", "--quiet"]) == 1


def test_a_flipped_byte_that_we_wrote_is_found(tmp_path: Path, model: Path) -> None:
    made = tmp_path / "made"
    checkpoint.convert(model, made, to="tp=2", rules=["w=tp, -", "*=..."], format="torch-dcp")
    place = open_checkpoint(made)["w"].file_range(1)
    flip(made / place.path, place.start_bytes + 5)
    assert [block.tensor for block in checkpoint.check_digests(made).damaged] == ["w"]
    with pytest.raises(DigestError, match="'w'"):
        checkpoint.convert(made, tmp_path / "full", to="full")


def test_checksums_that_torch_did_not_compute_are_not_checked(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch_checkpoints.save(tmp_path / "dcp", 1, lambda rank: {"w": torch.ones(5)})
    finally:
        torch.serialization.set_crc32_options(True)
    checkpoint.convert(tmp_path / "dcp", tmp_path / "made", to="full")
    assert bits_of(tmp_path / "dcp")["w"].bits.view("float32").tolist() == [1.0] * 5


def test_a_second_save_by_torch_is_told_from_ours(tmp_path: Path, model: Path) -> None:
    made = tmp_path / "made"
    checkpoint.convert(model, made, to="tp=2", rules=["w=tp, -", "*=..."], format="torch-dcp")
    torch_checkpoints.save(made, 1, lambda rank: {"w": torch.zeros(7, 6)})
    with pytest.raises(CheckpointError, match=r"If that was meant, delete .*manifest\.json"):
        open_checkpoint(made)
    (made / "reshard.manifest.json").unlink()
    opened = open_checkpoint(made)
    assert list(opened) == ["w"]
    assert opened.left_out == (("__1_0.distcp", "not a file of this checkpoint"),)


def test_what_the_format_cannot_hold_is_refused(tmp_path: Path, model: Path) -> None:
    for arguments, error in [
        ({"to": "tp=2", "replicas": "every"}, UsageError),
        ({"to": "full", "most_file_bytes": 100}, UsageError),
        ({"to": "tp=2", "rules": ["w=tp, - | partial(sum: tp)"]}, Exception),
    ]:
        with pytest.raises(error):
            checkpoint.plan_conversion(model, tmp_path / "made", format="torch-dcp", **arguments)
    write_file(tmp_path / "many.safetensors", {"w": tensor("uint8", (110_000,))})
    with pytest.raises(RecipeError, match=r"'w'.*boxes"):
        checkpoint.plan_conversion(
            tmp_path / "many.safetensors", tmp_path / "made", to="tp=2", rules=["w=tp@cyclic1"],
            format="torch-dcp",
        )  # fmt: skip


# Kills


def test_killed_and_run_again(tmp_path: Path, processes: FaultyProcesses) -> None:
    checkpoint.convert(
        write_model(tmp_path / "whole"), tmp_path / "rows", format="torch-dcp", **ROWS
    )
    # As PyTorch leaves it, so that checksums of what was read before the kill matter too.
    (tmp_path / "rows" / "reshard.manifest.json").unlink()

    def run(target: Path, **options: Any) -> Any:
        return processes.convert(
            tmp_path / "rows", target, format="torch-dcp", sync_bytes=256 * 1024, **COLUMNS,
            **options,
        )  # fmt: skip

    calls = len(run(tmp_path / "undisturbed").calls)
    expected = contents(tmp_path / "undisturbed")
    assert expected is not None
    resumed = []
    kills = choose(4, 10)
    for number in range(kills):
        target = tmp_path / f"made {number}"
        run(target, kill_at=number * (calls - 2) // kills)
        again = run(target)
        assert again.error is None
        resumed.append(again.resumed_bytes)
        assert contents(target) == expected
        check_archives(target)
    assert any(resumed)


def test_two_processes_of_torch_save_and_load(tmp_path: Path) -> None:
    script = Path(__file__).with_name("saving_and_loading_process.py")
    expect_all_end_well(run_ranks(str(script), 2, tmp_path / "d"))
