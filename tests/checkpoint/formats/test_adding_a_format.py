"""A format added from outside, by the public protocol alone: a folder of `.npy` files."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from checkpoint.checkpoint_files import MANIFEST, Tensor, tensor, write_file
from reshard import checkpoint
from reshard.binding import Binding, FileRange
from reshard.checkpoint import (
    Capability,
    Checkpoint,
    CheckpointFormat,
    Listing,
    NewCheckpoint,
    NewFile,
    StoredFile,
    StoredTensor,
    WritePlan,
)
from reshard.checkpoint.formats import registry
from reshard.cli.program import program
from reshard.dtypes import dtype
from reshard.errors import CheckpointError, FormatError, UsageError
from reshard.layout import Layout

MAGIC = b"\x93NUMPY\x01\x00"
WHOLE = {
    "layers.0.weight": tensor("float32", (6, 4), 1),
    "layers.0.bias": tensor("int16", (7,), 2),
    "step": tensor("int64", (), 3),
    "unused": tensor("float64", (0, 3), 4),
}


class ArrayFolder(CheckpointFormat):
    """Every tensor whole, in a file `name.npy` of NumPy."""

    name = "npy"
    evidence = "files ending in `.npy`"
    suffixes = (".npy",)
    capabilities = frozenset({Capability.WHOLE})

    def detect(self, listing: Listing) -> bool:
        """Whether it is a folder with such files."""
        return any(name.endswith(".npy") for name in listing.names)

    def open(self, path: Path) -> Checkpoint:
        """The arrays of a folder."""
        tensors, files = {}, []
        for file in sorted(path.glob("*.npy")):
            head = file.read_bytes()[:4096]
            if not head.startswith(MAGIC):
                raise FormatError(f"{file} is no array of NumPy 1.0; save it with np.save")
            size = int.from_bytes(head[8:10], "little")
            said = ast.literal_eval(head[10 : 10 + size].decode())
            address = FileRange(file.name, 10 + size)
            binding = Binding(Layout.whole(said["shape"], [0], 1), {0: address}, {})
            element = dtype(np.dtype(said["descr"]))
            tensors[file.stem] = StoredTensor(file.stem, element, binding)
            files.append(StoredFile(file.name, file.stat().st_size, 0))
        return Checkpoint(path, self.name, tensors, tuple(files))

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """One file a tensor."""
        tensors, files = {}, []
        for name, planned in new.tensors.items():
            shape = planned.layout.shape
            said = {"descr": planned.dtype.numpy.str, "fortran_order": False, "shape": shape}
            text = repr(said).encode()
            text += b" " * (-len(text) - 11 % 64) + b"\n"
            content = MAGIC + len(text).to_bytes(2, "little") + text
            tensor_bytes = planned.dtype.itemsize_bytes * int(np.prod(shape, dtype=int))
            stored = StoredFile(f"{name}.npy", len(content) + tensor_bytes, 0)
            files.append(NewFile(stored, content))
            binding = Binding(planned.layout, {0: FileRange(stored.name, len(content))}, {})
            tensors[name] = StoredTensor(name, planned.dtype, binding)
        return WritePlan(self.name, new.mesh, tensors, tuple(files))


class ReadOnly(ArrayFolder):
    """The same, that cannot be written."""

    name = "npy-read-only"
    capabilities = frozenset()


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The format, for one test."""
    monkeypatch.setattr(registry, "_registered", [])
    checkpoint.register_format(ArrayFolder())
    return


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write_file(tmp_path / "model.safetensors", WHOLE)
    return tmp_path / "model.safetensors"


def same_bits(array: np.ndarray, expected: Tensor) -> bool:
    return array.tobytes() == expected.bits.tobytes()


def test_an_added_format_is_opened_and_converted(
    whole: Path, tmp_path: Path, small_blocks: int
) -> None:
    checkpoint.convert(whole, tmp_path / "arrays", to="full", format="npy")
    for name, expected in WHOLE.items():
        array = np.load(tmp_path / "arrays" / f"{name}.npy")
        assert array.shape == expected.shape
        assert same_bits(array, expected)
    opened = checkpoint.open(tmp_path / "arrays")
    assert opened.format == "npy"
    assert all(found.digest is not None for found in opened.tensors.values())
    assert not checkpoint.check_digests(opened).damaged
    checkpoint.convert(opened, tmp_path / "cut", to="tp=2", rules=["*.weight=tp, -", "*=..."])
    checkpoint.convert(tmp_path / "cut", tmp_path / "dcp", to="dp=3", format="torch-dcp")
    for name in ("cut", "dcp"):
        assert checkpoint.compare(whole, tmp_path / name).is_same


def test_arrays_of_another_program_are_opened(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    np.save(tmp_path / "w.npy", array)
    (tmp_path / "config.json").write_text("{}")
    opened = checkpoint.open(tmp_path)
    assert opened.carried == ("config.json",)
    assert checkpoint.read_tensor(opened, "w").tolist() == array.tolist()
    half = checkpoint.load(opened, {"w": Layout.whole((3, 4), [0], 1)})
    assert half["w"].tolist() == array.tolist()
    (tmp_path / "w.npy").write_bytes(b"no array")
    with pytest.raises(FormatError, match="is no array of NumPy"):
        checkpoint.open(tmp_path)


def test_a_manifest_notices_that_files_were_replaced(whole: Path, tmp_path: Path) -> None:
    checkpoint.convert(whole, tmp_path / "arrays", to="full", format="npy")
    assert json.loads((tmp_path / "arrays" / MANIFEST).read_text())["format"] == "npy"
    np.save(tmp_path / "arrays" / "step.npy", np.zeros(3))
    with pytest.raises(CheckpointError, match=r"step\.npy has .* bytes, the manifest says"):
        checkpoint.open(tmp_path / "arrays")


def test_the_command_inspects_and_plans_an_added_format(whole: Path, tmp_path: Path) -> None:
    checkpoint.convert(whole, tmp_path / "arrays", to="full", format="npy")
    found = CliRunner().invoke(program, ["inspect", str(tmp_path / "arrays"), "--json"])
    assert json.loads(found.stdout)["format"] == "npy"
    found = CliRunner().invoke(program, ["plan", str(tmp_path / "arrays"), "--to", "full"])
    assert found.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"to": "tp=2"}, "the format npy cannot go together with to 'tp=2'"),
        ({"to": "full", "most_file_bytes": 5}, "the format npy cannot .* a limit for files"),
    ],
)
def test_unsupported_options_are_refused(whole: Path, arguments: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        checkpoint.ConversionRequest(format="npy", **arguments)


def test_unsupported_contents_are_listed(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", WHOLE, {"format": "pt", "trained by": "me"})
    found = checkpoint.plan_conversion(
        tmp_path / "model.safetensors", tmp_path / "arrays", to="full", format="npy"
    )
    assert found.losses == ("not in the target, since npy has no text metadata: trained by",)


def test_names_are_given_once_and_formats_are_formats(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a format 'npy' already"):
        checkpoint.register_format(ArrayFolder())
    with pytest.raises(UsageError, match="give an instance of a class of CheckpointFormat"):
        checkpoint.register_format(ArrayFolder)  # type: ignore[arg-type]


def test_a_format_that_is_read_only(whole: Path, tmp_path: Path) -> None:
    checkpoint.register_format(ReadOnly())
    with pytest.raises(
        UsageError, match=r"read-only format 'npy-read-only'; expected one of .*npy"
    ):
        checkpoint.ConversionRequest(to="full", format="npy-read-only")
    with pytest.raises(UsageError, match="are read only"):
        CheckpointFormat.plan_write(ReadOnly(), NewCheckpoint({}))


def test_a_folder_of_no_format_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected `model\.safetensors`.*`\.npy`"):
        checkpoint.open(tmp_path)


def test_old_names_work_and_warn() -> None:
    with pytest.warns(DeprecationWarning, match="Holding is now Capability"):
        holding = checkpoint.Holding  # type: ignore[attr-defined]
    assert holding is Capability
    with pytest.warns(DeprecationWarning, match="is now") as warned:

        class OldFormat(ArrayFolder):
            can_hold = frozenset({Capability.SHARDS})

            def place(self, *_: object) -> None:
                return None

            def detect(self, path: Path) -> bool:  # type: ignore[override]
                return path.name == "old"

    assert [str(one.message).partition("OldFormat.")[2] for one in warned] == [
        "can_hold is now capabilities",
        "place is now assign_layouts",
        "detect(path) is now detect(listing); the path is `listing.path`",
    ]
    assert OldFormat().capabilities == {Capability.SHARDS}
    assert OldFormat().shards_itself
    assert OldFormat().detect(Listing(Path("old")))
    with pytest.warns(DeprecationWarning, match="can_hold of a format is now capabilities"):
        assert ArrayFolder().can_hold == {Capability.WHOLE}
    with pytest.raises(AttributeError, match="'ArrayFolder' object has no attribute 'nothing'"):
        _ = ArrayFolder().nothing
