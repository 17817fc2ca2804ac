"""Error texts for paths that no format detects, or that a format cannot read.

They identify folders of other programs, pointers of git-LFS and mistyped addresses, by names and
the first bytes of files.

1. A path that does not exist may be a mistyped address, or the name of a model on the Hub
   (`describe_missing`).
2. A folder that no format detects may have files of a known program (`describe_folder`).
3. A file that its format cannot read may be of another kind than its suffix
   (`describe_wrong_files`).
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from reshard.checkpoint.storage.remote_paths import HUB_NAME, PARTS, RemotePath
from reshard.text import first_text

# Includes the magic number of tar, which is at byte 257.
_HEAD_BYTES = 600
_MAX_FILES = 4096
_MAX_SHOWN = 4
_ARCHIVE = "unpack it, and name what is in it"
_FETCH = "fetch the file again"
_ZERO_REMEDY = "make one file of it with its `zero_to_fp32.py`"
_ORBAX_REMEDY = (
    "neither reshard nor Orbax can read it without: copy the folder again with all of its files, "
    "or save it again"
)


class FileKind(NamedTuple):
    """A kind of file: its description, a remedy, and the suffixes that such files should have."""

    what: str
    remedy: str
    suffixes: tuple[str, ...] = ()


_POINTER = FileKind(
    "a pointer of git-LFS, in the place of the file itself", "run `git lfs pull` in its repository"
)
_EMPTY = FileKind("empty (0 bytes)", f"{_FETCH}: a download or a save did not finish")
_ZEROS = FileKind(
    "zeros where it begins",
    f"{_FETCH}: a copy of it, or the program that writes it, did not finish",
)
_PAGE = FileKind(
    "a web page (HTML or XML), as a server answers with where it refuses a download",
    f"{_FETCH}, with access to it",
)
_ANSWER = FileKind("a line of text, as a server answers with an error", f"{_FETCH}, with access")
_SAFETENSORS = FileKind("a safetensors file", "name it .safetensors", (".safetensors",))
_TORCH = FileKind(
    "a file of torch.save",
    "name it .bin or .pt",
    (".bin", ".pt", ".pth", ".ckpt", ".distcp", ".tar", ".pkl"),
)
_KERAS = FileKind(
    "an archive of Keras",
    "load it with Keras, and save its weights with `safetensors.numpy.save_file`",
    (".keras",),
)
_NUMPY = FileKind(
    "an archive of NumPy arrays", "save them with `safetensors.numpy.save_file`", (".npz",)
)
_ZIP = FileKind("a zip archive", _ARCHIVE, (".zip",))
_HDF5 = FileKind(
    "an HDF5 file, as Keras and TensorFlow write",
    "load it with `from_tf=True` in transformers 4, and save that with `save_pretrained`",
    (".h5", ".hdf5"),
)
_GGUF = FileKind(
    "a GGUF file, whose weights are quantised for llama.cpp",
    "convert the checkpoint that it was made of",
    (".gguf",),
)
_PICKLE = FileKind(
    "a pickle of Python, which cannot be looked into without running it",
    "load it where it is trusted, and save its tensors as safetensors",
    (".pkl", ".pickle", ".bin", ".pt", ".pth", ".ckpt", ".metadata"),
)
_TAR = FileKind("a tar archive", _ARCHIVE, (".tar",))
_NEMO = FileKind(
    "an archive of NeMo",
    "unpack it with `tar -xf`, and name `model_weights` or `model_weights.ckpt`, which is in it",
    (".nemo",),
)
_COMPRESSED = FileKind(
    "a compressed file",
    _ARCHIVE,
    # The last: chunks of PyTorch's distributed checkpoints may be packed.
    (".gz", ".tgz", ".zst", ".bz2", ".xz", ".7z", ".distcp"),
)
_TFLITE = FileKind("a TensorFlow Lite model", "convert the model that it was made of", (".tflite",))

# Kinds of files by their first bytes. For a zip, the name of its first member is examined too.
_BEGINNINGS = (
    (b"version https://git-lfs", _POINTER),
    (b"GGUF", _GGUF),
    (b"\x89HDF\r\n\x1a\n", _HDF5),
    (b"\x93NUMPY", FileKind("an array of NumPy", "save it as safetensors", (".npy",))),
    (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", _TORCH),
    (b"\x1f\x8b", _COMPRESSED),
    (b"\x28\xb5\x2f\xfd", _COMPRESSED),
    (b"BZh", _COMPRESSED),
    (b"\xfd7zXZ\x00", _COMPRESSED),
    (b"7z\xbc\xaf\x27\x1c", _COMPRESSED),
    # Pickles of earlier protocols begin without a mark.
    *((bytes([0x80, number]), _PICKLE) for number in (2, 3, 4, 5)),
)
_PAGES = (b"<!doctype", b"<html", b"<?xml", b"<error")
# Patterns of names in a folder: the first that matches determines the description.
_FOLDERS: tuple[tuple[str, str, str], ...] = (
    (
        "*zero_pp_rank_*_model_states.pt",
        "a DeepSpeed ZeRO-3 folder, in which every rank has a part of every parameter",
        _ZERO_REMEDY,
    ),
    (
        "*zero_pp_rank_*_optim_states.pt",
        "a DeepSpeed ZeRO-1 or ZeRO-2 folder",
        _ZERO_REMEDY,
    ),
    (
        "mp_rank_*_model_states.pt",
        "a DeepSpeed folder",
        _ZERO_REMEDY,
    ),
    ("universal_checkpoint_info", "a universal checkpoint of DeepSpeed", ""),
    ("zero_to_fp32.py", "a folder of DeepSpeed's, whose steps are folders `global_step*`", ""),
    ("mp_rank_*", "a Megatron checkpoint of ranks' files, `mp_rank_*/model_optim_rng.pt`", ""),
    ("latest_checkpointed_iteration.txt", "a folder of Megatron's, with a folder a step", ""),
    (
        "manifest.ocdbt",
        "an Orbax checkpoint (OCDBT) without its list of arrays, `_METADATA`",
        _ORBAX_REMEDY,
    ),
    (
        "_CHECKPOINT_METADATA",
        "an Orbax checkpoint without its list of arrays, `_METADATA`",
        _ORBAX_REMEDY,
    ),
    ("flax_model*.msgpack", "a Flax model", "load it with `from_flax=True` in transformers 4"),
    ("*.msgpack", "a msgpack file, as Flax writes", "load it with Flax, and save safetensors"),
    ("tf_model*.h5", "a TensorFlow model", _HDF5.remedy),
    ("saved_model.pb", "a SavedModel of TensorFlow", "load it there, and save its weights"),
    (
        "*.data-?????-of-?????",
        "a checkpoint of TensorFlow",
        "read it with `tf.train.load_checkpoint`, and save its arrays as safetensors",
    ),
    ("*.weights.h5", "weights of Keras", _KERAS.remedy),
    ("*.keras", "a model of Keras", _KERAS.remedy),
    ("*.h5", "an HDF5 file, as Keras writes", _KERAS.remedy),
    ("*.gguf", "a GGUF model of llama.cpp", _GGUF.remedy),
    ("*.onnx", "an ONNX model", "convert the checkpoint that it was exported from"),
    ("*.nemo", "an archive of NeMo", _NEMO.remedy),
    ("model_weights", "a NeMo folder", "name the folder `model_weights` in it"),
    (
        "rank*.engine",
        "an engine that TensorRT-LLM built, for one kind of GPU",
        "convert the checkpoint that it was built from",
    ),
    ("*.engine", "an engine of TensorRT", "convert the checkpoint that it was built from"),
    ("*.plan", "an engine of TensorRT", "convert the checkpoint that it was built from"),
    ("*.pdparams", "a PaddlePaddle model", "load it there, and save safetensors"),
    ("*.mlpackage", "a Core ML model", "convert the checkpoint that it was made of"),
    ("openvino_model.xml", "an OpenVINO model", "convert the checkpoint that it was made of"),
    ("*.tflite", _TFLITE.what, _TFLITE.remedy),
    ("model_world_size_*_rank_*.pt", "files of FSDP ranks, as verl writes", ""),
    ("pytorch_model*.bin", "a model of torch.save files", ""),
    ("adapter_model.bin", "an adapter of PEFT, of torch.save", ""),
    ("consolidated.*.pth", "a model of torch.save files, as Meta writes", ""),
    *(
        (f"*{suffix}", f"a folder of archives ({suffix})", _ARCHIVE)
        for suffix in (".tar", ".tar.gz", ".tgz", ".zip", ".zst")
    ),
)
_PARTIAL = ("*.incomplete", "*.part", "*.crdownload", "*.aria2", "*.download")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".metadata")
_ADDRESS = r"([A-Za-z][A-Za-z0-9+]{0,15}):(//?)(.*)"
_OTHER_STORES = {
    "abfs": "azcopy copy --recursive",
    "r2": "rclone copy",
    "oss": "ossutil cp -r",
    "ftp": "wget",
}


def describe_missing(location: str | os.PathLike[str]) -> str:
    """Return the error text for a path that does not exist, such as a mistyped address.

    >>> describe_missing("s3:/bucket/model")
    'no checkpoint at s3:/bucket/model: there is no such path; its address would be \
s3://bucket/model'
    """
    if isinstance(location, RemotePath):
        return f"no checkpoint at {location}: there is nothing of that name"
    location = os.fspath(location)
    address = re.fullmatch(_ADDRESS, location, re.DOTALL)
    scheme = "" if address is None else address[1].lower()
    if address is not None and address[2] == "/" and scheme in PARTS:
        return (
            f"no checkpoint at {location}: there is no such path; its address would be "
            f"{scheme}://{address[3]}"
        )
    if address is not None and scheme in _OTHER_STORES:
        # `Path` has merged the two slashes of the address.
        return (
            f"no checkpoint at {scheme}://{address[3]}: of addresses {', '.join(PARTS)} are "
            f"read; copy it here first, such as with `{_OTHER_STORES[scheme]}`"
        )
    path = Path(location)
    text = f"no checkpoint at {location}: there is nothing of that name"
    with suppress(OSError):
        if path.is_symlink():
            return f"no checkpoint at {location}: a link to {os.readlink(path)}, which is not there"
        parent = path.parent
        if not parent.is_dir():
            if HUB_NAME.fullmatch(location):
                return f"{text}; to read a model of the Hub, pip install 'reshard[hf]'"
            while not parent.is_dir() and parent != parent.parent:
                parent = parent.parent
            if parent == Path():
                return f"{text}, and no folder {path.parts[0]} either"
            return f"{text}; of its folders there is {parent}"
        near = difflib.get_close_matches(path.name, list_names(parent), 1)
        if near:
            return f"{text}; did you mean {parent / near[0]}?"
    return text


def describe_folder(path: Path) -> str | None:
    """Return the error text for a folder that no format detects, or None if it is unknown."""
    names = list_names(path)
    wrong = describe_wrong_files(path)
    if wrong is not None:
        return wrong
    for pattern, what, remedy in _FOLDERS:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if matching:
            how = f"; {remedy}" if remedy else ""
            return f"{path} is {what} ({list_some(matching)}), which cannot be read as it is{how}"
    for pattern in _PARTIAL:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if matching:
            return f"{path} has {list_some(matching)}: its download did not finish; go on with it"
    return None


def folders_within(path: Path) -> Iterator[Path]:
    """Yield the subfolders that may contain steps or snapshots, the latest first."""
    for name in sorted(list_names(path), key=_by_numbers, reverse=True):
        inner = path / name
        if name.startswith(".") or not inner.is_dir():
            continue
        if name == "snapshots":
            # The cache of the Hub has a further level of folders, named by commit.
            yield from (inner / commit for commit in list_names(inner) if (inner / commit).is_dir())
        yield inner


def describe_wrong_files(path: Path, error: str | None = None) -> str | None:
    """Return the error text for files of another kind than their suffix, or None if there are none.

    Args:
        path: a file, or a folder.
        error: of the format that could not read it; only files that it names are considered.
    """
    is_folder = path.is_dir()
    files = [path]
    if is_folder:
        files = [path / name for name in list_names(path) if name.endswith(_WEIGHTS)]
    wrong: dict[FileKind, list[Path]] = {}
    for file in files:
        kind = find_kind(file)
        # A kind without suffixes is wrong under any name: names lack null characters.
        if kind is not None and not file.name.lower().endswith(kind.suffixes or ("\0",)):
            wrong.setdefault(kind, []).append(file)
    if error is not None:
        wrong = {
            kind: members
            for kind, members in wrong.items()
            if any(member.name in error for member in members)
        }
    if not wrong:
        return None
    kind, largest = max(wrong.items(), key=lambda pair: len(pair[1]))
    if len(largest) == 1:
        return f"{largest[0]} is {kind.what}; {kind.remedy}"
    names = list_some([member.name for member in largest])
    return f"{len(largest)} files in {path} ({names}) are each {kind.what}; {kind.remedy}"


def find_kind(file: Path) -> FileKind | None:
    """Return the kind of a regular file by its first bytes, or None if it is unknown.

    >>> find_kind(Path(__file__)) is None
    True
    """
    try:
        if not file.is_file():
            return None
        with file.open("rb") as opened:
            head = opened.read(_HEAD_BYTES)
    except OSError:
        return None
    if not head:
        return _EMPTY
    for beginning, kind in _BEGINNINGS:
        if head.startswith(beginning):
            return kind
    if head.startswith(b"PK\x03\x04"):
        return _find_kind_of_zip(head)
    if head[257:262] == b"ustar":
        return _NEMO if file.suffix == ".nemo" or b"model_config.yaml" in head[:100] else _TAR
    if head[4:8] == b"TFL3":
        return _TFLITE
    if head.lstrip().lower().startswith(_PAGES):
        return _PAGE
    if (
        # The limit of safetensors for a header, which is JSON.
        int.from_bytes(head[:8], "little") <= 100_000_000
        and head[8:].lstrip(b" \t\n\r")[:1] == b"{"
    ):
        return _SAFETENSORS
    if len(head) == _HEAD_BYTES and not any(head):
        return _ZEROS
    is_short = len(head) < _HEAD_BYTES and file.name.endswith(_WEIGHTS)
    if is_short and re.fullmatch(rb"[\x20-\x7e\s]+", head):
        return _ANSWER
    return None


def _find_kind_of_zip(head: bytes) -> FileKind:
    """Return the kind of a zip by the name of its first member."""
    # By the zip format, the name follows 30 bytes, and its length is at byte 26.
    length = int.from_bytes(head[26:28], "little")
    name = head[30 : 30 + length].decode("utf-8", "replace")
    if name.endswith(".npy"):
        return _NUMPY
    if re.fullmatch(r"[^/]+/(data\.pkl|version|byteorder|\.format_version|code/.*)", name):
        return _TORCH
    if name in ("metadata.json", "config.json", "model.weights.h5"):
        return _KERAS
    return _ZIP


def list_names(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; at most some thousands.

    >>> list_names(Path("/nowhere"))
    []
    """
    with suppress(OSError):
        return sorted(path.name for path in itertools.islice(folder.iterdir(), _MAX_FILES))
    return []


def _by_numbers(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key by which names sort in numeric order: 100 after 20."""
    return tuple((int(n or 0), text) for n, text in re.findall(r"(\d{1,18})|(\D+)", name))


def list_some(names: Sequence[str]) -> str:
    return first_text(names, _MAX_SHOWN)
