"""The manifest: what a checkpoint written by reshard says about itself.

A JSON file beside the tensor files. Neither safetensors nor PyTorch's convention for sharded
safetensors stores the shape of a tensor that is cut, or which files belong together; this
does, with the mesh, the cuts, the size of every file, and a digest of every block::

    {"format_version": 1, "format": "sharded-safetensors", "conversion_id": "...",
     "mesh": {"name": "mesh", "shape": [2], "axis_names": ["tp"], "devices": [0, 1]},
     "files": {"shard-00001-...": {"size_bytes": 4096, "rank": 0}, ...},
     "tensors": {"lm_head.weight": {"dtype": "bfloat16", "shape": [8, 4], "spec": "tp, -",
                                    "digest": "...", "block_digests": "..."}},
     "carried": ["config.json"]}

A tensor that is not laid out by a sharding has `"boxes": [[rank, start, stop], ...]` instead
of `"spec"`. Which ranks store a copy of their shard is not written down: the files say so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.checkpoint.blocks import BlockGrid
from reshard.checkpoint.contents import StoredFile, StoredTensor, TensorDigest
from reshard.checkpoint.journal import DIGEST_BYTES
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import CheckpointError, FormatError, ReshardError
from reshard.layout import Box, Layout
from reshard.mesh import DeviceMesh
from reshard.sharding_text import spec

MANIFEST_NAME = "reshard.manifest.json"
FORMAT_VERSION = 1
_DIGEST_CHARACTERS = 2 * DIGEST_BYTES


@dataclass(frozen=True)
class ManifestTensor:
    """What a manifest says about one tensor."""

    dtype: DType
    layout: Layout
    spec: str | None
    digest: TensorDigest | None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself; `conversion_id` names the run that wrote it."""

    format: str
    conversion_id: str
    mesh: DeviceMesh | None
    files: tuple[StoredFile, ...]
    tensors: Mapping[str, ManifestTensor]
    carried: tuple[str, ...]

    def to_json(self) -> str:
        """The text of the manifest file."""
        mesh = self.mesh
        content = {
            "format_version": FORMAT_VERSION,
            "format": self.format,
            "conversion_id": self.conversion_id,
            "mesh": mesh
            and {
                "name": mesh.name,
                "shape": mesh.shape,
                "axis_names": mesh.axis_names,
                "devices": mesh.devices,
            },
            "files": {
                file.name: {"size_bytes": file.size_bytes, "rank": file.rank} for file in self.files
            },
            "tensors": {name: _tensor_json(tensor) for name, tensor in self.tensors.items()},
            "carried": self.carried,
        }
        return json.dumps(content, indent=1) + "\n"


def _tensor_json(tensor: ManifestTensor) -> dict[str, Any]:
    layout = tensor.layout
    content: dict[str, Any] = {"dtype": tensor.dtype.name, "shape": layout.shape}
    if tensor.spec is not None:
        content["spec"] = tensor.spec
    else:
        content["boxes"] = [
            (slot, box.start, box.stop) for slot in layout.holders for box in layout.boxes(slot)
        ]
    if tensor.digest is not None:
        content["digest"] = tensor.digest.tensor.hex()
        content["block_digests"] = b"".join(tensor.digest.blocks).hex()
    return content


def manifest_of(
    format_name: str,
    conversion_id: str,
    mesh: DeviceMesh | None,
    files: tuple[StoredFile, ...],
    tensors: Mapping[str, StoredTensor],
    digests: Mapping[str, TensorDigest],
    carried: tuple[str, ...],
) -> Manifest:
    """The manifest of tensors about to be committed, with their digests."""
    described = {
        name: ManifestTensor(tensor.dtype, tensor.layout, tensor.spec, digests.get(name))
        for name, tensor in tensors.items()
    }
    return Manifest(format_name, conversion_id, mesh, files, described, carried)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint folder, or None where it has none.

    Raises:
        FormatError: a manifest that is damaged, of a later version, or contradicts itself.
        CheckpointError: a manifest that cannot be read.
    """
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8 text: {error}") from error
    try:
        content = json.loads(text, object_pairs_hook=_unique_keys)
        version = content["format_version"]
        if version != FORMAT_VERSION:
            raise FormatError(
                f"{path} has format version {version!r}; this reshard reads {FORMAT_VERSION}, "
                "update it"
            )
        return _parse(content)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except (ReshardError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise FormatError(
            f"{path} is not a manifest of reshard: {reason}. It was damaged or edited; without "
            "the file, the checkpoint is read by what its tensor files say"
        ) from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise FormatError(f"the key {twice!r} appears twice")
    return content


def _parse(content: Mapping[str, Any]) -> Manifest:
    mesh = None
    if content["mesh"] is not None:
        fields = content["mesh"]
        mesh = DeviceMesh(fields["name"], fields["shape"], fields["axis_names"], fields["devices"])
    files = []
    for name, fields in content["files"].items():
        if not is_plain_name(name):
            raise FormatError(f"the file name {name!r} leads outside the checkpoint")
        files.append(StoredFile(name, int(fields["size_bytes"]), int(fields["rank"])))
    ranks = max([file.rank for file in files], default=0) + 1
    return Manifest(
        str(content["format"]),
        str(content["conversion_id"]),
        mesh,
        tuple(files),
        {name: _parse_tensor(mesh, ranks, item) for name, item in content["tensors"].items()},
        tuple(content["carried"]),
    )


def _parse_tensor(mesh: DeviceMesh | None, ranks: int, item: Mapping[str, Any]) -> ManifestTensor:
    shape = tuple(int(size) for size in item["shape"])
    text = item.get("spec")
    if text is not None:
        if mesh is None:
            raise FormatError(f"a sharding {text!r} without a mesh")
        layout = spec(mesh, text).layout(shape)
    else:
        boxes = [(int(slot), Box(tuple(a), tuple(b))) for slot, a, b in item["boxes"]]
        layout = Layout.from_boxes(shape, boxes, max([ranks, *(slot + 1 for slot, _ in boxes)]))
    digest = None
    if "digest" in item:
        joined = str(item["block_digests"])
        blocks = [
            bytes.fromhex(joined[at : at + _DIGEST_CHARACTERS])
            for at in range(0, len(joined), _DIGEST_CHARACTERS)
        ]
        expected = BlockGrid.of(shape, as_dtype(item["dtype"]).itemsize_bytes).count
        if len(blocks) != expected or any(len(block) != DIGEST_BYTES for block in blocks):
            raise FormatError(f"{len(blocks)} digests for a tensor of {expected} blocks")
        digest = TensorDigest(bytes.fromhex(item["digest"]), tuple(blocks))
    return ManifestTensor(as_dtype(item["dtype"]), layout, text, digest)


def is_plain_name(name: str) -> bool:
    """Whether a file name from a file stays inside its folder.

    >>> [is_plain_name(name) for name in ("a.safetensors", "../a", "/a", "sub/a", "")]
    [True, False, False, False, False]
    """
    return (
        bool(name)
        and "/" not in name
        and "\\" not in name
        and "\0" not in name
        and (name not in (".", ".."))
    )
