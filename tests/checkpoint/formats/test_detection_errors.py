"""What is found and not read is named, with what to do."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoint.checkpoint_files import tensor, write_file
from reshard import checkpoint
from reshard.checkpoint.formats.detection_errors import (
    describe_folder,
    describe_missing,
    find_kind,
    folders_within,
)
from reshard.errors import CheckpointError, FormatError

WHOLE = {"w": tensor("float32", (4, 4), 1)}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"


def message(path: Path | str, kind: type[Exception] = CheckpointError) -> str:
    """What opening says."""
    with pytest.raises(kind) as caught:
        checkpoint.open(path)
    return str(caught.value)


def saved(value: object, **options: bool) -> bytes:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def zipped(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, "content")
    return file.getvalue()


def tarred(name: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo(name))
    return file.getvalue()


def safetensors_bytes(folder: Path) -> bytes:
    write_file(folder / "other.safetensors", WHOLE)
    content = (folder / "other.safetensors").read_bytes()
    (folder / "other.safetensors").unlink()
    return content


CONTENTS = {
    "pointer": (POINTER, r"a pointer of git-LFS.*run `git lfs pull`"),
    "empty": (b"", r"is empty \(0 bytes\); fetch the file again"),
    "zeros": (bytes(4096), "zeros where it begins"),
    "page": (b"\n<!DOCTYPE html><html><body>Sign in</body></html>", "a web page"),
    "refusal": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "a web page"),
    "answer": (b"Invalid username or password.\n", "a line of text, as a server answers"),
    "torch": (saved({"w": torch.ones(2)}), r"a file of torch\.save; name it \.bin or \.pt"),
    "old torch": (
        saved({"w": torch.ones(2)}, _use_new_zipfile_serialization=False),
        r"a file of torch\.save",
    ),
    "gguf": (b"GGUF" + bytes(100), "a GGUF file"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(100), "an HDF5 file"),
    "keras": (zipped("metadata.json", "config.json", "model.weights.h5"), "an archive of Keras"),
    "npz": (zipped("w.npy"), "an archive of NumPy"),
    "zip": (zipped("model/model.safetensors"), "a zip archive; unpack it"),
    "tar": (tarred("model.safetensors"), "a tar archive; unpack it"),
    "nemo": (tarred("model_config.yaml"), "an archive of NeMo"),
    "gzip": (b"\x1f\x8b\x08" + bytes(100), "a compressed file; unpack it"),
    "pickle": (b"\x80\x04\x95" + bytes(100), "a pickle of Python"),
    "tflite": (b"\x1c\0\0\0TFL3" + bytes(100), "a TensorFlow Lite model"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_other_contents_under_a_safetensors_name_are_described(name: str, tmp_path: Path) -> None:
    content, says = CONTENTS[name]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    for path in (file, tmp_path):
        text = message(path, FormatError)
        assert text.startswith(f"{file} is ")
        with pytest.raises(FormatError, match=says):
            checkpoint.open(path)


def test_pointers_of_a_whole_folder_are_counted(tmp_path: Path) -> None:
    for number in range(1, 7):
        (tmp_path / f"model-{number:05d}-of-00006.safetensors").write_bytes(POINTER)
    (tmp_path / "config.json").write_text("{}")
    assert message(tmp_path) == (
        f"6 files in {tmp_path} (model-00001-of-00006.safetensors, "
        "model-00002-of-00006.safetensors, model-00003-of-00006.safetensors, "
        "model-00004-of-00006.safetensors and 2 more) are each a pointer of git-LFS, in the place "
        "of the file itself; run `git lfs pull` in its repository"
    )
    for file in tmp_path.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    with pytest.raises(CheckpointError, match=r"6 files in .*a pointer of git-LFS"):
        checkpoint.open(tmp_path)


def test_a_damaged_file_of_the_right_kind_keeps_its_own_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(safetensors_bytes(tmp_path)[:-5])
    (tmp_path / "notes.bin").write_bytes(b"")
    for path in (file, tmp_path):
        assert "is empty" not in message(path, FormatError)


def test_safetensors_under_another_name_are_recognised(tmp_path: Path) -> None:
    content = safetensors_bytes(tmp_path)
    file = tmp_path / "model.bin"
    file.write_bytes(content)
    kind = find_kind(file)
    assert kind is not None
    assert kind.what == "a safetensors file"
    assert find_kind(tmp_path / "nothing") is None
    assert find_kind(tmp_path) is None


FOLDERS = {
    "zero3": (
        ["zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"],
        "a DeepSpeed ZeRO-3 folder",
    ),
    "zero1": (["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "DeepSpeed ZeRO-1 or ZeRO-2"),
    "tensorflow": (
        ["checkpoint", "model.ckpt-5.index", "model.ckpt-5.data-00000-of-00001"],
        "a checkpoint of TensorFlow",
    ),
    "saved model": (["saved_model.pb", "variables/variables.index"], "a SavedModel of TensorFlow"),
    "tf of transformers": (["tf_model.h5", "config.json"], "a TensorFlow model"),
    "keras": (["model.weights.h5"], "weights of Keras"),
    "flax": (["flax_model.msgpack", "config.json"], "a Flax model"),
    "msgpack": (["weights.msgpack"], "a msgpack file"),
    "gguf": (["llama.Q4_K_M.gguf"], "a GGUF model"),
    "onnx": (["model.onnx", "model.onnx_data"], "an ONNX model"),
    "nemo": (["llama.nemo"], "an archive of NeMo"),
    "engine": (["config.json", "rank0.engine"], "an engine that TensorRT-LLM built"),
    "paddle": (["model_state.pdparams"], "a PaddlePaddle model"),
    "openvino": (["openvino_model.xml"], "an OpenVINO model"),
    "archive": (["model.tar.gz"], r"a folder of archives \(\.tar\.gz\)"),
    "download": (["model-00001-of-00002.safetensors.incomplete"], "download did not finish"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_other_programs_are_described(name: str, tmp_path: Path) -> None:
    files, says = FOLDERS[name]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"\x08content\0")
    text = describe_folder(tmp_path)
    assert text is not None
    with pytest.raises(CheckpointError, match=says):
        raise CheckpointError(text)


def test_a_folder_of_which_nothing_is_known(tmp_path: Path) -> None:
    assert message(tmp_path).endswith("; it is empty")
    (tmp_path / "notes.txt").write_text("nothing")
    assert "expected `model.safetensors`" in message(tmp_path)
    assert message(tmp_path).endswith("; it has notes.txt")


def test_checkpoints_within_a_folder_are_named(tmp_path: Path) -> None:
    for step in (90, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
        write_file(tmp_path / f"checkpoint-{step}" / "model.safetensors", WHOLE)
    (tmp_path / "logs").mkdir()
    assert message(tmp_path).endswith(
        ". There are checkpoints in it, name one: checkpoint-100, checkpoint-90"
    )
    hub = tmp_path / "models--a--b"
    (hub / "snapshots" / "0123abc").mkdir(parents=True)
    write_file(hub / "snapshots" / "0123abc" / "model.safetensors", WHOLE)
    assert message(hub).endswith("name one: snapshots/0123abc")
    assert [*folders_within(tmp_path / "logs")] == []


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("s3:/bucket/model", "no such path; its address would be s3://bucket/model"),
        ("oss://bucket/model", "of addresses s3, gs, az, http, https, hf are read; copy it here"),
        ("ftp://host/model", "no checkpoint at ftp://host/model: of addresses s3, gs, az, "),
        ("http://127.0.0.1:1/model", "see that its server runs and lets you in"),
        ("file:///no/data/model", "no checkpoint at /no/data/model"),
    ],
)
def test_addresses_of_other_kinds_are_errors(
    path: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=says):
        checkpoint.open(path)


def test_slips_in_paths_get_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "llama-3-8b").mkdir()
    near = describe_missing(str(tmp_path / "lama-3-8b"))
    assert near.endswith(f"did you mean {tmp_path / 'llama-3-8b'}?")
    far = describe_missing(str(tmp_path / "no" / "such" / "folder" / "here"))
    assert far.endswith(f"of its folders there is {tmp_path}")
    assert describe_missing("nothing/of/it").endswith("and no folder nothing either")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert "a link to" in describe_missing(str(tmp_path / "link"))


def test_a_folder_of_many_files_is_looked_at_in_part(tmp_path: Path) -> None:
    for number in range(5000):
        (tmp_path / f"{number}.txt").touch()
    np.save(tmp_path / "a.npy", np.ones(2))
    assert "expected" in message(tmp_path)


@pytest.mark.parametrize("name", ["manifest.ocdbt", "_CHECKPOINT_METADATA"])
def test_orbax_without_its_list_of_arrays_is_not_sent_to_orbax(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(CheckpointError) as refused:
        checkpoint.open(tmp_path)
    assert "`_METADATA`" in str(refused.value)
    assert "restore it with orbax" not in str(refused.value)
