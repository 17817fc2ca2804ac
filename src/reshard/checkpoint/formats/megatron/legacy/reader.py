"""Opening the folders of Megatron's ranks as a checkpoint.

1. The first rank's arguments specify the parallelism; every rank's folder must be present.
2. Each rank's tensors are blocks of tensors of the whole model: numbered over it, and placed along
   the sharded dimension (`modules`). All copies are bound: of data, context and expert parallelism,
   and of unsharded parameters. The first rank's copies are read.
3. Optimizer state is identified by the order of parameters in Megatron.
4. The rest of the first rank's state is plain values (`common_state`).

A rank numbers layers and experts from 0; the whole model continues the numbers of other ranks::

    stage 1 of 2, two layers each      decoder.layers.0 is layer 2
    chunks of virtual stages           model0 of all stages first, then model1
    expert-parallel rank 1 of 2        local_experts.0 is expert 4 of 8

The number of layers of each chunk is determined by its file, so that uneven stages are read too.

Megatron saves optimizer state without names, in the order of its parameters::

    not distributed     state of each number, and `fp32_from_fp16_params`: the parameters of each
                        group in the order of the modules, groups concatenated
    distributed         flat buffers of all data-parallel ranks, in `distrib_optim.pt`: for each
                        chunk, the parameters of a type in reverse order (`rank_blocks`)

Dense parameters and experts have separate optimizers if experts are parallel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from reshard.binding import View
from reshard.checkpoint.blocks.fusing import StoredRegion
from reshard.checkpoint.contents import Checkpoint, StoredFile
from reshard.checkpoint.formats.chunks import BlockPlace, WholeTensors, flat_block
from reshard.checkpoint.formats.megatron import common_state, legacy, modules, rank_blocks
from reshard.checkpoint.formats.megatron.rank_blocks import RankParameter
from reshard.checkpoint.formats.megatron.rank_layouts import Parallelism, RankPlace
from reshard.checkpoint.formats.optimizer_states import state_name
from reshard.checkpoint.formats.torch_files.nested_states import PlainValues
from reshard.checkpoint.formats.torch_files.pickles import Call
from reshard.checkpoint.formats.torch_files.reading import (
    StorageChecksums,
    read_storage,
    read_torch_dict,
    read_torch_file,
    region_of,
)
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor, explain, is_tensor_call
from reshard.checkpoint.storage.remote_paths import map_paths
from reshard.dtypes import DType
from reshard.errors import CheckpointError, FormatError

_STACKED = re.compile(r"^(.*\.experts)\.weight([12])$")


class RankChunk(NamedTuple):
    """A chunk of the model on a rank: its tensors by their names there."""

    place: RankPlace
    number: int
    path: str
    tensors: dict[str, ArchivedTensor]
    others: dict[str, Any]
    # The common weights of the experts of layers, in the order of the file, each with the names of
    # its parts in `tensors`.
    stacks: Mapping[str, tuple[str, ...]]
    # The first layer and the first expert in the whole model.
    first_layers: Mapping[str, int]
    first_expert: int = 0

    @property
    def layers(self) -> dict[str, int]:
        """The number of layers of each sequence of layers."""
        return modules.count_layers(self.tensors)

    @property
    def experts(self) -> int:
        """The number of experts of each layer on this rank."""
        numbers = [expert[1] for name in self.tensors if (expert := modules.split_expert(name))]
        return max(numbers, default=-1) + 1

    def parameters(self) -> Iterator[tuple[str, DType, tuple[int, ...]]]:
        """Yield the parameters in the order of the modules: name, type and shape.

        Experts with a common weight are a single parameter, with a leading dimension of experts.
        """
        stack_of = {members[0]: name for name, members in self.stacks.items()}
        inside = {member for members in self.stacks.values() for member in members}
        for name, tensor in self.tensors.items():
            stack = stack_of.get(name)
            if stack is not None:
                shape = (len(self.stacks[stack]), *reversed(tensor.shape))
                yield stack, tensor.dtype, shape
            elif name not in inside and not modules.is_buffer(name):
                yield name, tensor.dtype, tensor.shape

    def whole_name(self, name: str) -> str:
        """Return the name in the whole model."""
        return modules.renumber(name, lambda row: self.first_layers.get(row, 0), self.first_expert)


class RankFiles(NamedTuple):
    """The contents of a rank's files; `name` is the name of the model's file, with its folder."""

    place: RankPlace
    slot: int
    name: str
    state: Mapping[str, Any]
    optimizer_file: str | None
    optimizer_state: Any
    chunks: list[RankChunk]


def chunks_of(
    state: Mapping[str, Any], place: RankPlace, path: str, experts: int | None = None
) -> list[RankChunk]:
    """Return the chunks of the model in a rank's file.

    `experts` is the number of experts of a layer on the rank; None if unknown.

    Raises:
        CheckpointError: an unknown number of experts.
        FormatError: a file without a model; experts that differ from the arguments.
    """
    keys = ["model"] if "model" in state else sorted(k for k in state if _is_chunk(k))
    if not keys:
        raise FormatError(
            f"{path} has no model: expected `model`, or `model0` and on for virtual stages"
        )
    chunks = []
    for number, key in enumerate(keys):
        if key not in ("model", f"model{number}"):
            raise FormatError(f"{path} has {key!r}, but no `model{number}`; a chunk is missing")
        parts = dict(_flatten(state[key], "", path))
        stored = {n: v for n, v in parts.items() if isinstance(v, ArchivedTensor)}
        others = {n: v for n, v in parts.items() if n not in stored}
        tensors: dict[str, ArchivedTensor] = {}
        stacks: dict[str, tuple[str, ...]] = {}
        for name, tensor in stored.items():
            match = _STACKED.match(name)
            own = {name: tensor}
            if match is not None:
                own = dict(_unstack(match, stored, path, experts))
                stacks[name] = tuple(own)
            tensors |= own
        chunks.append(RankChunk(place, number, path, tensors, others, stacks, {}))
    return chunks


def _unstack(
    match: re.Match[str], stored: Mapping[str, ArchivedTensor], path: str, experts: int | None
) -> Iterator[tuple[str, ArchivedTensor]]:
    """Yield the weights of experts as views of their common weight (`GroupedMLP`).

    It is the concatenated memory of all experts, each with as many rows as inputs, so a linear
    layer's weight is transposed; its shape does not determine the number of experts::

        weight1 (inputs, experts * outputs)      weight2 (experts * inputs, outputs)
    """
    name, tensor = match[0], stored[match[0]]
    if experts is None:
        raise CheckpointError(
            f"{path} has {name!r}, all experts of a layer in one weight (GroupedMLP), and no "
            "args.num_experts; save it as torch_dist with "
            "Megatron-core"
        )
    along = 1 if match[2] == "1" else 0
    is_whole = len(tensor.shape) == 2 and tensor.view.is_dense(tensor.shape)
    if not is_whole or tensor.shape[along] % experts:
        raise FormatError(
            f"{path}: {name!r} is {list(tensor.shape)}, expected the weights of {experts} experts "
            f"concatenated along dimension {along}, by args.num_experts"
        )
    rows, columns = tensor.shape
    rows, columns = (rows, columns // experts) if along else (rows // experts, columns)
    for number in range(experts):
        view = View(tensor.view.offset + number * rows * columns, (1, columns))
        own = f"{match[1]}.local_experts.{number}.linear_fc{match[2]}.weight"
        yield own, replace(tensor, shape=(columns, rows), view=view)


def _is_chunk(key: object) -> bool:
    return isinstance(key, str) and key.startswith("model") and key[5:].isdigit()


def _flatten(value: Any, name: str, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a state; older states nest their modules."""
    if not isinstance(value, dict):
        if not name:
            raise FormatError(f"{path}: the model is {explain(value)}, expected its state")
        yield name, value
        return
    if depth > 16:
        raise FormatError(f"{path}: the model's state is nested too deep at {name!r}")
    for key, inner in value.items():
        yield from _flatten(inner, f"{name}.{key}" if name else str(key), path, depth + 1)


def number_chunks(ranks: Sequence[RankFiles]) -> list[RankFiles]:
    """Return the files of ranks, with the first layer and the first expert of every chunk."""
    chunks = [chunk for rank in ranks for chunk in rank.chunks]
    counts: dict[tuple[int, int], dict[str, int]] = {}
    experts: dict[int, int] = {}
    for chunk in chunks:
        # The other ranks of a stage have the same layers.
        counts.setdefault((chunk.number, chunk.place.pp), chunk.layers)
        experts[chunk.place.ep] = max(experts.get(chunk.place.ep, 0), chunk.experts)
    starts: dict[tuple[int, int], dict[str, int]] = {}
    reached: dict[str, int] = {}
    # Virtual stages are interleaved: the first chunks of all stages precede the second chunks.
    for key in sorted(counts):
        starts[key] = dict(reached)
        for row, count in counts[key].items():
            reached[row] = reached.get(row, 0) + count
    first_expert = {ep: sum(n for at, n in experts.items() if at < ep) for ep in experts}

    def number(chunk: RankChunk) -> RankChunk:
        first_layers = starts[chunk.number, chunk.place.pp]
        return chunk._replace(first_layers=first_layers, first_expert=first_expert[chunk.place.ep])

    return [rank._replace(chunks=[*map(number, rank.chunks)]) for rank in ranks]


class StateBlock(NamedTuple):
    """A block of optimizer state: its chunk and parameter, and where it is stored.

    `tensor` is the tensor of the file if the block is all of it.
    """

    chunk: int
    parameter: str
    key: str
    dtype: DType
    shape: tuple[int, ...]
    path: str
    stored: Sequence[StoredRegion]
    tensor: ArchivedTensor | None = None


class RankOptimizer:
    """The optimizer state in a rank's files. `unread` lists the parts that are not read."""

    def __init__(self, rank: RankFiles, sizes: Parallelism, arguments: Mapping[str, Any]) -> None:
        self._rank = rank
        self._arguments = arguments
        self.unread: list[tuple[str, str]] = []
        self._is_shared = (
            sizes.pp > 1 and arguments.get("untie_embeddings_and_output_weights") is False
        )
        self._parameters = [
            RankParameter(chunk.number, name, dtype, shape)
            for chunk in rank.chunks
            for name, dtype, shape in chunk.parameters()
        ]
        self._stacks = {
            (chunk.number, name): members
            for chunk in rank.chunks
            for name, members in chunk.stacks.items()
        }

    def blocks(self) -> Iterator[StateBlock]:
        """Yield every block of state."""
        if self._rank.optimizer_file is not None:
            yield from self._list_buffered(self._rank.optimizer_file)
        else:
            yield from self._list_numbered()

    def _skip(self, what: str, why: str) -> None:
        self.unread.append((f"{self._rank.name}: {what}", why))

    def _list_buffered(self, path: str) -> Iterator[StateBlock]:
        state = self._rank.optimizer_state
        members = list(state) if isinstance(state, list | tuple) else [state]
        for member, own in zip(
            members, rank_blocks.split_chain(self._parameters, len(members)), strict=False
        ):
            # Optimizers whose first data-parallel rank is elsewhere do not store state here.
            if isinstance(member, dict):
                yield from self._read_buffers(path, member, own)

    def _read_buffers(
        self, path: str, state: Mapping[Any, Any], parameters: Sequence[RankParameter]
    ) -> Iterator[StateBlock]:
        stored = rank_blocks.read_buffers(state, self._rank.slot, path)
        buffers = rank_blocks.list_buffers(parameters, is_embedding_shared=self._is_shared)
        for number, buffer in enumerate(buffers):
            own = stored.get(number)
            if own is None:
                self._skip(f"buffer {number} of {path}", "it is not there, or in another form")
                continue
            length = rank_blocks.lengths_of(own)
            if length is None:
                self._skip(
                    f"buffer {number} of {path}",
                    "its buckets are apart, as Megatron before 2024 wrote them; load it and save "
                    "it once more",
                )
                continue
            plan = rank_blocks.find_plan(buffer, length, rank_blocks.bucket_sizes(self._arguments))
            if plan is None:
                held = sum(math.prod(param.shape) for param in buffer)
                self._skip(
                    f"buffer {number} of {path}",
                    f"it has {length} elements, and the {len(buffer)} parameters that should be in "
                    f"it {held}; the parts of parameters are ambiguous",
                )
                continue
            for param, bucket, start in plan.places:
                for key, buckets in own.items():
                    dtype, regions = rank_blocks.take_block(buckets, bucket, start, param.shape)
                    yield from self._split(param, modules.common_key(key), dtype, path, regions)

    def _list_numbered(self) -> Iterator[StateBlock]:
        members = [*common_state.chain_of(self._rank.state.get("optimizer"))]
        for member, own in zip(
            members, rank_blocks.split_chain(self._parameters, len(members)), strict=False
        ):
            inner = member.get("optimizer", member)
            groups = inner.get("param_groups") if isinstance(inner, dict) else None
            state = inner.get("state") if isinstance(inner, dict) else None
            if isinstance(groups, list) and isinstance(state, dict) and state:
                yield from self._read_groups(member, groups, state, own)

    def _read_groups(
        self,
        member: Mapping[str, Any],
        groups: Sequence[Any],
        state: Mapping[Any, Any],
        parameters: Sequence[RankParameter],
    ) -> Iterator[StateBlock]:
        plain = [group if isinstance(group, dict) else {} for group in groups]
        names: list[list[RankParameter]] = [[] for _ in plain]
        for param in parameters:
            for number in common_state.find_groups(plain, param.name, param.shape)[:1]:
                names[number].append(param)
        masters = member.get("fp32_from_fp16_params", member.get("fp32_from_fp16"))
        for number, (group, own) in enumerate(zip(plain, names, strict=True)):
            numbers = group.get("params")
            if not isinstance(numbers, list) or len(numbers) != len(own):
                self._skip(
                    f"group {number} of the optimizer",
                    f"it has {len(numbers) if isinstance(numbers, list) else 'no'} parameters, and "
                    f"{len(own)} of the model's should be in it; their order is ambiguous",
                )
                continue
            narrow = [param for param in own if param.dtype.name in rank_blocks.NARROW]
            wide = masters[number] if isinstance(masters, list) and number < len(masters) else []
            if isinstance(wide, list) and len(wide) == len(narrow):
                for param, tensor in zip(narrow, wide, strict=True):
                    yield from self._make_blocks(param, "master", tensor)
            for param, index in zip(own, numbers, strict=True):
                entries = state.get(index)
                for key, tensor in entries.items() if isinstance(entries, dict) else ():
                    yield from self._make_blocks(param, str(key), tensor)

    def _make_blocks(self, param: RankParameter, key: str, tensor: Any) -> Iterator[StateBlock]:
        if not isinstance(tensor, ArchivedTensor):
            return
        path = self._rank.name
        if (param.chunk, param.name) in self._stacks:
            # The state has the shape of the stacked weight, and the memory order of the experts.
            is_dense = tensor.view.is_dense(tensor.shape)
            if math.prod(tensor.shape) != math.prod(param.shape) or not is_dense:
                self._skip(f"{key} of {param.name!r}", "it is not of the weight's shape")
                return
            flat = replace(
                tensor, shape=(math.prod(tensor.shape),), view=View(tensor.view.offset, (1,))
            )
            regions = flat_block([(self._rank.slot, region_of(path, flat))], 0, param.shape)
            yield from self._split(param, key, tensor.dtype, path, [*regions])
            return
        block = ((self._rank.slot, region_of(path, tensor)),)
        yield StateBlock(
            param.chunk, param.name, key, tensor.dtype, tensor.shape, path, block, tensor
        )

    def _split(
        self,
        param: RankParameter,
        key: str,
        dtype: DType,
        path: str,
        regions: Sequence[StoredRegion],
    ) -> Iterator[StateBlock]:
        """Yield state as the block of its parameter, or as transposed blocks of stacked experts."""
        members = self._stacks.get((param.chunk, param.name))
        if members is None:
            yield StateBlock(param.chunk, param.name, key, dtype, param.shape, path, regions)
            return
        for number, name in enumerate(members):
            own = [
                (slot, region.drop(0, number).permute((1, 0)))
                for slot, region in regions
                if region.start[0] <= number < region.stop[0]
            ]
            # Transposed, and without the dimension of experts.
            shape = param.shape[:0:-1]
            yield StateBlock(param.chunk, name, key, dtype, shape, path, own)


_SCALAR = BlockPlace.split((), None, 0, 1)
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
    there = legacy.list_rank_folders(folder)
    if not there:
        raise CheckpointError(f"{folder} has no folder of a rank, such as mp_rank_00")
    first = folder / min(there)
    state = _read_state(legacy.find_model_file(first))
    sizes = _read_sizes(first, state, there)
    legacy.check_complete(folder, sizes)
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
    note = common_state.set_groups(common, weights)
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
        legacy.FORMAT_NAME,
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
    state = read_torch_dict(path, "the state of a rank")
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
    chunks = sum(map(_is_chunk, state))
    return Parallelism(counts[0], counts[1], counts[2], counts[0], max(chunks, 1))


def _read_rank(own: Path, sizes: Parallelism, place: RankPlace, slot: int, ahead: str) -> RankFiles:
    path = legacy.find_model_file(own)
    state = _read_state(path)
    arguments = _arguments(state)
    has_sizes = "tensor_model_parallel_size" in arguments
    own_sizes = Parallelism.of_arguments(arguments, str(path)) if has_sizes else sizes
    if own_sizes != sizes:
        raise FormatError(
            f"{path} was saved by ranks of {own_sizes}, others by those of {sizes}; they are of "
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
    optimizer = own / legacy.OPTIMIZER_NAME
    file, optimizer_state = None, None
    if optimizer.is_file():
        file, optimizer_state = (
            f"{ahead}{own.name}/{legacy.OPTIMIZER_NAME}",
            read_torch_file(optimizer),
        )
    return RankFiles(place, slot, name, state, file, optimizer_state, chunks)


def _read_common(folder: Path, rank: RankFiles) -> PlainValues:
    """Return the plain values of the first rank."""
    common = PlainValues()
    for key, value in rank.state.items():
        if not key.startswith("model") and key not in _OWN_PARTS:
            common_state.add_state(common, (key,), value, rank.name)
    common_state.add_state(common, ("args",), rank.state.get("args", {}), rank.name)
    common_state.add_optimizer(
        common, rank.state.get("optimizer"), partial(read_storage, folder / rank.name)
    )
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
        self.whole = WholeTensors(folder)
        self.checksums = StorageChecksums()
        self.unread: list[tuple[str, str]] = []
        self.unreadable: dict[str, str] = {}
        self.is_tied = arguments.get("untie_embeddings_and_output_weights") is False

    def find_unreadable(self, ranks: Iterable[RankFiles]) -> None:
        """Find the weights with a part of a special class on some rank."""
        for chunk in (chunk for rank in ranks for chunk in rank.chunks):
            odd = {name: value for name, value in chunk.others.items() if is_tensor_call(value)}
            names = {chunk.whole_name(name) for name in (*chunk.tensors, *odd)}
            for name, value in odd.items():
                whole = modules.engine_name(chunk.whole_name(name), names)
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
            names = {*whole_names.values(), *self.unreadable}
            for name, tensor in chunk.tensors.items():
                place = self._find_place(chunk, name, shapes)
                whole = modules.engine_name(whole_names[name], names)
                places[chunk.number, name] = whole, place
                if self._is_tied(whole) or whole in self.unreadable:
                    continue
                region = region_of(rank.name, tensor)
                self.whole.add(whole, tensor.dtype, place, [(rank.slot, region)], rank.name)
                self.checksums.add(whole, "its part", rank.name, tensor, None)
        if self.unreadable:
            return
        state = RankOptimizer(rank, self.sizes, self.arguments)
        for block in state.blocks():
            whole, place = places[block.chunk, block.parameter]
            if not self._is_tied(whole):
                self._add_state(block, whole, place)
        self.unread += state.unread

    def _find_place(
        self, chunk: RankChunk, name: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> BlockPlace:
        """Return the place of a tensor of a chunk in the tensor of the whole model."""
        parts = self.sizes.etp if ".experts." in name else self.sizes.tp
        cut = modules.find_cut(name, shapes, self.arguments.get("q_lora_rank"))
        if cut is None and parts > 1:
            raise CheckpointError(
                f"{self.folder / chunk.path} has {name!r}, and how tensor parallelism cuts it is "
                "not known; save it as torch_dist with Megatron-core, which describes it"
            )
        dimension, stride = cut or (None, 1)
        if dimension is not None and dimension >= len(shapes[name]):
            raise FormatError(f"{self.folder}: {name!r} has the shape {list(shapes[name])}")
        return BlockPlace.split(shapes[name], dimension, chunk.place.tp % parts, parts, stride)

    def _is_tied(self, name: str) -> bool:
        """Return whether a tensor is the embedding once more, on the last stage."""
        return self.is_tied and name.startswith("output_layer.") and self.sizes.pp > 1

    def _add_state(self, block: StateBlock, whole: str, place: BlockPlace) -> None:
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
