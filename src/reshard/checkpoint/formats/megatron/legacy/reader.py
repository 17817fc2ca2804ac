"""Opening the folders of Megatron's ranks as a checkpoint.

1. The first rank's arguments specify the parallelism; every rank's folder must be present.
2. Each rank's tensors are blocks of tensors of the whole model: numbered over it (`ranks`), and
   placed along the sharded dimension (`parameters`). All copies are bound: of data, context and
   expert parallelism, and of unsharded parameters. The first rank's copies are read.
3. Optimizer state is identified by the order of parameters in Megatron (`ranks`).
4. The rest of the first rank's state is plain values (`common_state`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from reshard.checkpoint.contents import Checkpoint, StoredFile
from reshard.checkpoint.formats.megatron.common_state import add_optimizer, add_state, set_groups
from reshard.checkpoint.formats.megatron.legacy import (
    FORMAT_NAME,
    OPTIMIZER_NAME,
    check_complete,
    find_model_file,
    list_rank_folders,
)
from reshard.checkpoint.formats.megatron.legacy.ranks import (
    RankChunk,
    RankFiles,
    RankOptimizer,
    StateBlock,
    chunks_of,
    number_chunks,
)
from reshard.checkpoint.formats.megatron.parameters import ParameterCut, engine_name, find_cut
from reshard.checkpoint.formats.megatron.rank_blocks import BlockPlace, WholeTensors
from reshard.checkpoint.formats.megatron.rank_layouts import Parallelism, RankPlace
from reshard.checkpoint.formats.torch_files.nested_states import PlainValues
from reshard.checkpoint.formats.torch_files.optimizer_states import state_name
from reshard.checkpoint.formats.torch_files.pickles import Call
from reshard.checkpoint.formats.torch_files.reading import (
    StorageChecksums,
    read_storage,
    read_torch_file,
    region_of,
)
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor, explain, is_tensor_call
from reshard.checkpoint.storage.remote_paths import map_paths
from reshard.errors import CheckpointError, FormatError

_SCALAR = BlockPlace.cut((), None, 0, 1)
# Parts of a rank's file that are not values of the whole training.
_OWN_PARTS = ("model", "optimizer", "rng_state", "args")


def read(root: Path, inside: str = "") -> Checkpoint:
    """Describe the checkpoint in a folder of ranks' folders: `inside` of `root`.

    Raises:
        CheckpointError: a rank's folder or file that is missing, or tensor parallelism
            of a parameter that is not known.
        FormatError: a file that is damaged; ranks that contradict each other.
        CoverageError: parts that no rank has.
    """
    folder = root / inside
    there = list_rank_folders(folder)
    if not there:
        raise CheckpointError(f"{folder} has no folder of a rank, such as mp_rank_00")
    first = folder / min(there)
    state = _read_state(find_model_file(first))
    sizes = _read_sizes(first, state, there)
    check_complete(folder, sizes)
    ahead = f"{inside}/" if inside else ""
    slots = {sizes.folder_name(place): (place, slot) for slot, place in enumerate(sizes.places())}
    read_own = map_paths(
        lambda own: _read_rank(own, sizes, *slots[own.name], ahead),
        (folder / name for name in slots),
    )
    ranks = number_chunks([*read_own])
    builder = _Builder(root, sizes, _arguments(state))
    builder.find_unreadable(ranks)
    for rank in ranks:
        builder.add(rank)
    tensors = builder.whole.stored(len(ranks))
    common = _read_common(root, ranks[0])
    # Groups list the parameters that are trained.
    weights = {n: t.shape for n, t in tensors.items() if state_name(n, "exp_avg") in tensors}
    note = set_groups(common, weights)
    files = tuple(
        StoredFile(name, (root / name).stat().st_size, rank.slot)
        for rank in ranks
        for name in (rank.name, rank.optimizer_file)
        if name is not None
    )
    notes = [] if note is None else [note]
    if len(ranks) > 1:
        notes.append(f"put together of {len(ranks)} ranks' folders: {sizes}")
    return Checkpoint(
        root,
        FORMAT_NAME,
        dict(tensors),
        files,
        values=common.values,
        paths=common.paths,
        checksums=builder.checksums.list(),
        unread=(*common.unread, *builder.unread),
        unreadable=builder.unreadable,
        notes=tuple(notes),
    )


def _read_state(path: Path) -> dict[str, Any]:
    state = read_torch_file(path)
    if not isinstance(state, dict):
        raise FormatError(f"{path} holds {explain(state)}, expected the state of a rank")
    return {key: value for key, value in state.items() if isinstance(key, str)}


def _arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    args = state.get("args")
    if isinstance(args, Call) and isinstance(args.state, dict):
        args = args.state
    return args if isinstance(args, dict) else {}


def _read_sizes(first: Path, state: Mapping[str, Any], there: Mapping[str, Any]) -> Parallelism:
    arguments = _arguments(state)
    if "tensor_model_parallel_size" in arguments:
        return Parallelism.of_arguments(arguments, str(first))
    # Without arguments, two numbers are of a tensor-parallel rank and a stage.
    numbers = [*there.values()]
    counts = [max(number[n] if n < len(number) else 0 for number in numbers) + 1 for n in range(3)]
    chunks = sum(1 for key in state if key.startswith("model") and key[5:].isdigit())
    return Parallelism(counts[0], counts[1], counts[2], counts[0], max(chunks, 1))


def _read_rank(own: Path, sizes: Parallelism, place: RankPlace, slot: int, ahead: str) -> RankFiles:
    path = find_model_file(own)
    state = _read_state(path)
    arguments = _arguments(state)
    is_said = "tensor_model_parallel_size" in arguments
    said = Parallelism.of_arguments(arguments, str(path)) if is_said else sizes
    if said != sizes:
        raise FormatError(
            f"{path} was saved by ranks of {said}, others by those of {sizes}; they are of "
            "different saves"
        )
    name = f"{ahead}{own.name}/{path.name}"
    experts = arguments.get("num_experts")
    each = experts // sizes.ep if type(experts) is int and experts >= sizes.ep else None
    chunks = chunks_of(state, place, name, each)
    if len(chunks) != sizes.vp:
        raise FormatError(
            f"{path} has {len(chunks)} chunks of the model, expected {sizes.vp}, the virtual "
            "stages of each rank"
        )
    optimizer = own / OPTIMIZER_NAME
    file, optimizer_state = None, None
    if optimizer.is_file():
        file, optimizer_state = f"{ahead}{own.name}/{OPTIMIZER_NAME}", read_torch_file(optimizer)
    return RankFiles(place, slot, name, state, file, optimizer_state, chunks)


def _read_common(folder: Path, rank: RankFiles) -> PlainValues:
    """Return the plain values of the first rank."""
    common = PlainValues()
    for key, value in rank.state.items():
        if not key.startswith("model") and key not in _OWN_PARTS:
            add_state(common, (key,), value, rank.name)
    add_state(common, ("args",), rank.state.get("args", {}), rank.name)
    add_optimizer(common, rank.state.get("optimizer"), partial(read_storage, folder / rank.name))
    if "rng_state" in rank.state:
        common.unread.append(
            ("rng_state", "states of random number generators are those of one rank each")
        )
    return common


class _Builder:
    """An assembler of the blocks of ranks."""

    def __init__(self, folder: Path, sizes: Parallelism, arguments: Mapping[str, Any]) -> None:
        self.folder = folder
        self.sizes = sizes
        self.arguments = arguments
        self.whole = WholeTensors()
        self.checksums = StorageChecksums()
        self.unread: list[tuple[str, str]] = []
        self.unreadable: dict[str, str] = {}
        self.is_tied = arguments.get("untie_embeddings_and_output_weights") is False

    def find_unreadable(self, ranks: Iterable[RankFiles]) -> None:
        """Find the weights with a part of a special class on some rank."""
        for chunk in (chunk for rank in ranks for chunk in rank.chunks):
            odd = {name: one for name, one in chunk.others.items() if is_tensor_call(one)}
            known = {chunk.whole_name(name) for name in (*chunk.tensors, *odd)}
            for name, value in odd.items():
                whole = engine_name(chunk.whole_name(name), known)
                self.unreadable[whole] = explain(value)
        if self.unreadable:
            why = "the shapes of all weights identify it, and some cannot be read"
            self.unread.append(("the state of the optimizer", why))

    def add(self, rank: RankFiles) -> None:
        """Add all blocks of a rank."""
        places: dict[tuple[int, str], tuple[str, BlockPlace]] = {}
        for chunk in rank.chunks:
            shapes = {name: tensor.shape for name, tensor in chunk.tensors.items()}
            whole_names = {name: chunk.whole_name(name) for name in chunk.tensors}
            known = {*whole_names.values(), *self.unreadable}
            for name, tensor in chunk.tensors.items():
                cut = self._find_cut(chunk, name, shapes)
                whole = engine_name(whole_names[name], known)
                place = self._place(rank.place, whole, tensor.shape, cut)
                places[chunk.number, name] = whole, place
                if self._is_tied(whole) or whole in self.unreadable:
                    continue
                self._add_tensor(rank, rank.name, whole, tensor, place)
        if self.unreadable:
            return
        state = RankOptimizer(rank, self.sizes, self.arguments)
        for block in state.blocks():
            whole, place = places[block.chunk, block.parameter]
            if not self._is_tied(whole):
                self._add_state(rank, block, whole, place)
        self.unread += state.unread

    def _find_cut(
        self, chunk: RankChunk, name: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> ParameterCut:
        cut = find_cut(name, shapes, self.arguments.get("q_lora_rank"))
        if cut is not None:
            return cut
        if self._parts(name) == 1:
            return None, 1
        raise CheckpointError(
            f"{self.folder / chunk.path} has {name!r}, and how tensor parallelism cuts it is not "
            "known; save it as torch_dist with Megatron-core, which describes it"
        )

    def _parts(self, name: str) -> int:
        is_expert = ".experts." in name
        return self.sizes.etp if is_expert else self.sizes.tp

    def _place(
        self, rank: RankPlace, name: str, shape: tuple[int, ...], cut: ParameterCut
    ) -> BlockPlace:
        parts, (dimension, stride) = self._parts(name), cut
        if dimension is not None and dimension >= len(shape):
            raise FormatError(f"{self.folder}: {name!r} has the shape {list(shape)}")
        return BlockPlace.cut(shape, dimension, rank.tp % parts, parts, stride)

    def _is_tied(self, name: str) -> bool:
        """Return whether a tensor is the embedding once more, on the last stage."""
        return self.is_tied and name.startswith("output_layer.") and self.sizes.pp > 1

    def _add_tensor(
        self, rank: RankFiles, path: str, name: str, tensor: ArchivedTensor, place: BlockPlace
    ) -> None:
        self.whole.add(name, tensor.dtype, place, [(rank.slot, region_of(path, tensor))], path)
        self.checksums.add(name, "its part", path, tensor, None)

    def _add_state(self, rank: RankFiles, block: StateBlock, whole: str, place: BlockPlace) -> None:
        shape = block.shape
        if shape == ():
            # A step belongs to the parameter, however that is sharded.
            name = state_name(whole, block.key)
            if name not in self.whole.tensors:
                self.whole.add(name, block.dtype, _SCALAR, block.stored, block.path)
            return
        if shape != place.block_shape:
            raise FormatError(
                f"{self.folder / block.path} has optimizer state of {list(shape)} for {whole!r}, "
                f"whose block has {list(place.block_shape)}; they are of different saves"
            )
        name = state_name(whole, block.key)
        self.whole.add(name, block.dtype, place, block.stored, block.path)
        if block.tensor is not None:
            self.checksums.add(name, "its part", block.path, block.tensor, None)
