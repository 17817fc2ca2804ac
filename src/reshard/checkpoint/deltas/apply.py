"""Applying deltas: a new checkpoint from a base and its changes, in any sharding and format.

1. The index of each delta must match the base: names, types, shapes, and every digest that is
   known beforehand, from a manifest or from the previous delta.
2. A changed tensor is computed (`ComputedTensor`): a block of the base is read and its digest is
   compared; then the payload of each delta is read and applied, and the digest is compared again::

    base   --block-->  digest before?  --changes of delta 1, 2, ...-->  digest after?  -->  block

3. An unchanged tensor is read from the base, and its blocks are compared with the delta's digests.

The result is written by a conversion (`reshard.checkpoint.conversion`), so it is staged, resumed
and committed like any other. By default the new checkpoint has the sharding and the format of the
base.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from numpy.typing import NDArray

from reshard._records import Record
from reshard.binding import Binding, FileRange
from reshard.checkpoint.blocks.grid import block_digest, tensor_digest
from reshard.checkpoint.changes.computed_tensors import ReadBox
from reshard.checkpoint.changes.planning import ChangedElements
from reshard.checkpoint.contents import Checkpoint, StoredFile, StoredItem, StoredTensor
from reshard.checkpoint.conversion.checksums import PIECE_BYTES
from reshard.checkpoint.conversion.conversion import Conversion, ConversionReport
from reshard.checkpoint.conversion.plan import (
    expect_written,
    keep_replicas,
    open_apart,
    plan_conversion,
    plan_files,
)
from reshard.checkpoint.conversion.run import run_conversion
from reshard.checkpoint.deltas.delta_file import (
    HEADER_BYTES,
    AuxiliaryBytes,
    Delta,
    DeltaTensor,
    read_delta,
)
from reshard.checkpoint.deltas.encoding import decode_block, word_bytes
from reshard.checkpoint.formats.format import Capability
from reshard.checkpoint.formats.write_plan import PlannedTensor, WritePlan
from reshard.checkpoint.naming.selection import TensorSelection, select_from
from reshard.checkpoint.options import ConversionRequest, split_arguments
from reshard.checkpoint.storage.filesystem import read_up_to, translate_os_errors
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.elements import CastCounts
from reshard.errors import CheckpointError, DigestError, FormatError, UsageError
from reshard.layout import Box, Layout


class PatchedTensor(Record):
    """A tensor with the changes of deltas applied in order.

    `base` is None if the first delta contains the whole tensor. Each step is a pair of a delta and
    the tensor in it, of the same type and shape. `digests` are those of the blocks after the last
    step, if known.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    base: StoredTensor | None
    steps: tuple[tuple[Delta, DeltaTensor], ...]
    digests: tuple[bytes, ...] | None

    @cached_property
    def sources(self) -> tuple[StoredTensor, ...]:
        """The base, and the payload of each delta."""
        base = () if self.base is None else (self.base,)
        return (*base, *(_bind_payload(delta) for delta, _ in self.steps))

    @cached_property
    def _largest_payloads(self) -> tuple[int, ...]:
        rows = (delta.records_of(tensor)["size"] for delta, tensor in self.steps)
        return tuple(int(sizes.max(initial=0)) for sizes in rows)

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """Return the bytes of a block of the base, and of the largest payload of each delta."""
        block = box.elements * self.dtype.itemsize_bytes
        return (*(() if self.base is None else (block,)), *self._largest_payloads)

    def fill(self, box: Box, out: NDArray[Any], read: ReadBox) -> CastCounts:
        """Write the block `box`, comparing its digests before and after.

        Raises:
            DigestError: a base that is not the first delta's base; a damaged delta.
            FormatError: an invalid payload.
        """
        first, tensor = self.steps[0]
        block = tensor.grid.index_of(box)
        size = word_bytes(self.dtype.itemsize_bytes)
        words = out.reshape(-1).view(f"<u{size}")
        if self.base is not None:
            out[...] = read(0, box)
            row = first.find_record(tensor, block)
            if row is None:
                expected = first.digest_after(tensor, block)
            else:
                expected = row["before"].tobytes()
            if block_digest(words.data.cast("B")) != expected:
                raise DigestError(
                    f"{box} of tensor {self.name!r} has another digest than in the base of "
                    f"{first.path}. The base is another checkpoint, or damaged"
                )
        # The payloads follow the base among the sources.
        for number, (delta, tensor) in enumerate(self.steps, start=int(self.base is not None)):
            row = delta.find_record(tensor, block)
            if row is None:
                continue
            start, length = int(row["start"]), int(row["size"])
            payload = read(number, Box((start,), (start + length,)))
            label = f"{box} of tensor {self.name!r} in {delta.path}"
            decode_block(
                payload,
                int(row["coding"]),
                int(row["flags"]),
                int(row["words"]),
                int(row["plain"]),
                words,
                label,
                has_before=self.base is not None or number > 0,
            )
            if block_digest(words.data.cast("B")) != delta.digest_after(tensor, block):
                raise DigestError(
                    f"{label} does not result in the recorded digest; the delta is damaged, fetch "
                    "it again"
                )
        return CastCounts()


def patch(base: Checkpoint, deltas: Sequence[Delta]) -> ChangedElements:
    """Return a checkpoint with deltas applied in order.

    Raises:
        CheckpointError: deltas of another checkpoint, by names, types or shapes.
        DigestError: deltas of another checkpoint, by known digests.
    """
    patched = {
        name: PatchedTensor(
            name,
            tensor.dtype,
            tensor.shape,
            tensor,
            (),
            None if tensor.digest is None else tensor.digest.blocks,
        )
        for name, tensor in base.tensors.items()
    }
    source = str(base.folder)
    for delta in deltas:
        patched = _apply_index(patched, delta, source)
        source = str(delta.path)
    computed: dict[str, PatchedTensor] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, after in patched.items():
        stored = after.base
        if stored is None or any(len(delta.records_of(tensor)) for delta, tensor in after.steps):
            computed[name] = after
        if stored is None:
            # A tensor that is not in the base is read from payloads. Planning needs a location, so
            # the tensor is bound to the delta's file as a whole.
            place = _bind_payload(after.steps[0][0]).file_range(0)
            whole = Binding(Layout.whole(after.shape, [0], 1), {0: place}, {})
            stored = StoredTensor(name, after.dtype, whole)
        elif name not in computed and stored.digest is None and after.digests is not None:
            # The digest that the deltas recorded is verified when the tensor is read.
            stored = stored.replace(digest=tensor_digest(after.digests))
        tensors[name] = stored.replace(name=name)
    return ChangedElements(
        _add_auxiliary(base, deltas, tensors), computed, rewritten=_read_all_rewritten(deltas)
    )


def _apply_index(
    tensors: Mapping[str, PatchedTensor], delta: Delta, source: str
) -> dict[str, PatchedTensor]:
    """Return the tensors after a further delta; `source` is what had them before it."""
    expected = {name: t.before for name, t in delta.tensors.items() if t.before is not None}
    expected |= delta.removed
    for name in [*expected, *tensors]:
        if name not in tensors or name not in expected:
            where = "is not in" if name not in tensors else "is in"
            raise CheckpointError(
                f"tensor {name!r} {where} {source}, unlike the checkpoint of {delta.path}; the "
                "delta is for another checkpoint"
            )
        form = (tensors[name].dtype, tensors[name].shape)
        if form != expected[name]:
            raise CheckpointError(
                f"tensor {name!r} is {form[0]} {list(form[1])} in {source}, {delta.path} was "
                f"made from {expected[name][0]} {list(expected[name][1])}; the delta is for "
                "another checkpoint"
            )
    after = {}
    for name, tensor in delta.tensors.items():
        step = (delta, tensor)
        raw = delta.digests[tensor.blocks].tobytes()
        digests = tuple(raw[at : at + 16] for at in range(0, len(raw), 16))
        if tensor.kind in ("added", "replaced"):
            after[name] = PatchedTensor(name, tensor.dtype, tensor.shape, None, (step,), digests)
            continue
        was = tensors[name]
        _check_digests(was, delta, tensor, source)
        after[name] = was.replace(steps=(*was.steps, step), digests=digests)
    return after


def _check_digests(was: PatchedTensor, delta: Delta, tensor: DeltaTensor, source: str) -> None:
    """Raise DigestError if known digests differ from those of the delta's base."""
    if was.digests is None:
        return
    before = delta.digests_before(tensor).tobytes()
    for block, digest in enumerate(was.digests):
        if before[block * 16 : block * 16 + 16] != digest:
            raise DigestError(
                f"{tensor.grid.box(block)} of tensor {tensor.name!r} in {source} has another "
                f"digest than in the base of {delta.path}; the delta is for another checkpoint"
            )


def _bind_payload(delta: Delta) -> StoredTensor:
    """Return the payload of a delta as a tensor of bytes, so that any range can be read."""
    shape = (delta.payload_bytes,)
    binding = Binding(Layout.whole(shape, [0], 1), {0: FileRange(_name(delta), HEADER_BYTES)}, {})
    return StoredTensor(f"the payload of {delta.path}", as_dtype("uint8"), binding)


def _name(delta: Delta) -> str:
    # An absolute path does not depend on the folder that it is joined to.
    return str(delta.path.absolute())


def _add_auxiliary(
    base: Checkpoint, deltas: Sequence[Delta], tensors: Mapping[str, StoredTensor]
) -> Checkpoint:
    """Return the checkpoint with new tensors, and with the other values of deltas."""
    items: Mapping[str, StoredItem] = base.items
    changes: dict[str, Any] = {}
    for delta in deltas:
        if delta.items is not None:
            items = {name: _find_item(items, delta, item) for name, item in delta.items.items()}
        for field in ("values", "metadata", "paths", "attributes"):
            value = getattr(delta, field)
            if value is not None:
                changes[field] = value
    last = deltas[-1]
    checksums = [entry for entry in base.checksums if entry.tensor in tensors]
    changed = {
        name for delta in deltas for name, tensor in delta.tensors.items() if tensor.kind != "kept"
    }
    files = [StoredFile(_name(delta), delta.size_bytes, 0) for delta in deltas]
    notes = [note for delta in deltas for note in delta.notes]
    return base.replace(
        tensors=tensors,
        files=(*base.files, *files),
        identities={**base.identities, **{_name(delta): delta.identity for delta in deltas}},
        items=items,
        # Changed tensors are not read as a whole, so the checksums of their files do not apply.
        checksums=tuple(entry for entry in checksums if entry.tensor not in changed),
        carried=tuple(last.files),
        notes=(*base.notes, *notes),
        **changes,
    )


def _find_item(items: Mapping[str, StoredItem], delta: Delta, entry: AuxiliaryBytes) -> StoredItem:
    if entry.start_bytes is None:
        item = items.get(entry.name)
        if item is None or (item.size_bytes, item.transforms) != (
            entry.size_bytes,
            entry.transforms,
        ):
            raise CheckpointError(
                f"{entry.name!r} of {delta.path} is not in the base; the delta is for another "
                "checkpoint"
            )
        return item.replace(digest=entry.digest)
    place = FileRange(_name(delta), HEADER_BYTES + entry.start_bytes)
    return StoredItem(
        entry.name, place, entry.size_bytes, entry.rank, entry.transforms, entry.digest
    )


def _read_all_rewritten(deltas: Sequence[Delta]) -> Mapping[str, bytes]:
    places: dict[str, tuple[Delta, AuxiliaryBytes]] = {}
    for delta in deltas:
        # A file that a later delta does not list was removed by it.
        places = {name: place for name, place in places.items() if name in delta.files}
        for name, entry in delta.files.items():
            if entry.start_bytes is not None:
                places[name] = (delta, entry)
    return {name: _read_rewritten(name, *place) for name, place in places.items()}


def _read_rewritten(name: str, delta: Delta, entry: AuxiliaryBytes) -> bytes:
    with translate_os_errors("read the delta", delta.path), delta.path.open("rb") as file:
        file.seek(HEADER_BYTES + (entry.start_bytes or 0))
        content = read_up_to(file, entry.size_bytes)
    # The digest is of the digests of pieces of this size.
    pieces = (content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES))
    if tensor_digest(block_digest(piece) for piece in pieces).tensor != entry.digest:
        raise DigestError(
            f"{name!r} in {delta.path} differs from its digest; the delta is damaged, fetch it "
            "again"
        )
    return content


def check_files(base: Checkpoint, patched: ChangedElements) -> None:
    """Raise CheckpointError for files that a delta keeps and the base does not have."""
    for name in patched.checkpoint.carried:
        if name not in patched.rewritten and name not in base.carried:
            raise CheckpointError(
                f"{name!r}, which the delta keeps, is not in {base.folder}; the delta is for "
                "another checkpoint"
            )
        if any(name == file.name for file in base.files):
            raise FormatError(f"the delta has a file {name!r}, which is a file of tensors")


if TYPE_CHECKING:
    from reshard.checkpoint.keywords import ConvertArguments, RequestArguments

PathLike = str | os.PathLike[str]
# The options of a request that change elements or names, which a delta depends on.
_CONFLICTING = (
    *("dtype", "dequantize", "quantize", "source_names", "target_names"),
    *("strip_prefix", "rename"),
)


def plan_application(
    base: PathLike | Checkpoint,
    deltas: PathLike | Delta | Sequence[PathLike | Delta],
    target: PathLike,
    request: ConversionRequest | None = None,
    **arguments: Unpack[RequestArguments],
) -> Conversion:
    """Plan the conversion of a checkpoint with deltas applied; reads headers, writes nothing.

    Args:
        base: a checkpoint, or its path.
        deltas: a delta, or several deltas to apply in order.
        target: the folder of the new checkpoint.
        request: the sharding and the format; or its fields as keywords (see `ConversionRequest`).
            By default, the new checkpoint has the sharding and the format of the base.

    Raises:
        CheckpointError: a base or a delta that cannot be used; a delta of another checkpoint.
        DigestError: a delta of another checkpoint, by known digests.
        UsageError: arguments that contradict each other, or that change elements or names.
    """
    request = ConversionRequest.of(request, arguments)
    many = deltas if isinstance(deltas, Sequence) and not isinstance(deltas, str) else [deltas]
    opened = [delta if isinstance(delta, Delta) else read_delta(delta) for delta in many]
    if not opened:
        raise UsageError("no delta to apply; give at least one")
    checkpoint, target = open_apart(base, target)
    # Deltas have the names of the model that was selected when they were created.
    # So the model is selected before the deltas are applied, not by the request.
    chosen, request = request.select, request.replace(select=None)
    checkpoint = select_from(checkpoint, TensorSelection(select=chosen))
    with translate_os_errors("inspect the target", target):
        for delta in opened:
            if target.resolve() in delta.path.resolve().parents:
                raise UsageError(
                    f"the delta {delta.path} is inside the target {target}, and would be deleted "
                    "with it; choose another target"
                )
    patched = patch(checkpoint, opened)
    check_files(checkpoint, patched)
    # These two leave sharding and format as they are.
    if request.replace(replicas=None, most_file_bytes=None) == ConversionRequest():
        conversion = _keep_cut(checkpoint, patched, target, request)
    else:
        _check_request(request)
        conversion = plan_conversion(patched.checkpoint, target, request)
    _check_names(conversion.write_plan, patched)
    computed = {
        name: tensor
        for name, tensor in patched.computed.items()
        if name in conversion.write_plan.tensors
    }
    return conversion.replace(
        computed={**conversion.computed, **computed},
        rewritten={**conversion.rewritten, **patched.rewritten},
        resolved={
            **conversion.resolved,
            "deltas": tuple(delta.digest.hex() for delta in opened),
            **({} if chosen is None else {"select": chosen}),
        },
        digest_hint=(
            f"The delta is for another state of {checkpoint.folder}, or one of the two is damaged"
        ),
    )


def apply(
    base: PathLike | Checkpoint,
    deltas: PathLike | Delta | Sequence[PathLike | Delta],
    target: PathLike,
    request: ConversionRequest | None = None,
    **arguments: Unpack[ConvertArguments],
) -> ConversionReport:
    """Write a checkpoint with deltas applied.

    Takes the arguments of `plan_application`, and as keywords the arguments of `run_conversion`.

    Raises:
        CheckpointError: a base or a delta that cannot be used; a delta of another checkpoint.
        DigestError: a base that is not the delta's base; a damaged delta.
        UsageError: arguments that contradict each other; a target that exists.
        RunError: a failure while running; the same call continues.
    """
    asked, options = split_arguments(arguments)
    return run_conversion(plan_application(base, deltas, target, request, **asked), options)


def _check_request(request: ConversionRequest) -> None:
    """Raise UsageError for a request that changes elements or names."""
    for name in _CONFLICTING:
        if getattr(request, name):
            raise UsageError(
                f"{name}={getattr(request, name)!r} while a delta is applied; apply it, and "
                "convert the result"
            )


def _check_names(write_plan: WritePlan, patched: ChangedElements) -> None:
    for name in write_plan.tensors:
        if name not in patched.checkpoint.tensors:
            raise UsageError(
                f"{name!r} is not a name of the base: names cannot be changed while a delta is "
                "applied; apply it, and convert the result"
            )
    for file in write_plan.files:
        if file.stored.name in patched.checkpoint.carried:
            raise UsageError(
                f"{file.stored.name!r} is both a file of tensors and another file; choose another "
                "format"
            )


def _keep_cut(
    base: Checkpoint,
    patched: ChangedElements,
    target: Path,
    request: ConversionRequest,
) -> Conversion:
    """Return the conversion with the base's sharding and format, and by default its replicas."""
    format = expect_written(base, base.format)
    is_whole = Capability.SHARDS not in format.capabilities
    checkpoint = patched.checkpoint
    placed = format.assign_layouts(checkpoint, base.mesh, base.ranks) or {}
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        layout, spec = tensor.layout, tensor.spec
        if name in placed or is_whole:
            layout, spec = placed.get(name, Layout.whole(tensor.shape, [0], 1)), None
        tensors[name] = PlannedTensor(tensor.dtype, layout, spec)
    to = "full" if is_whole else base.mesh or base.ranks
    replicas = keep_replicas(request, format, base)
    request = request.replace(to=to, format=format.name, replicas=replicas)
    write_plan, single_file = plan_files(request, target, checkpoint, tensors, base.mesh)
    resolved = {"to": request.to_text, "cut": "as the base", "recipe": None}
    return Conversion(checkpoint, target, write_plan, request, resolved, single_file=single_file)
