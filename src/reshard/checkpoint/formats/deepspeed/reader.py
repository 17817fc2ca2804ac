"""Opening a DeepSpeed checkpoint of any ZeRO stage.

1. The files determine the number of ranks; a missing file is an error with its name.
2. Files of weights have the names and shapes of parameters, by group, in the order of the flat
   buffers; and values: a user's state, schedulers.
3. Each rank's partition has its flat buffers; the parameters in them are located by `flat_buffers`.
4. Float32 weights of NAME become `optimizer.state.NAME.master`, the rest of the optimizer's
   `optimizer.state.NAME.exp_avg` and so on; groups and hyper-parameters are the value
   `optimizer.param_groups`, with the names of parameters.

Each expert and its optimizer state are on some of the ranks. The layers of a pipeline are in their
own files, with names within the layer. In the whole model the name is preceded by the number of the
layer. A layer in several positions of the pipeline (`TiedLayerSpec`) has a file for each, and a
single name::

    layer_00-model_00-model_states.pt   weight          tied_modules.embed.weight
    layer_01-model_00-model_states.pt   weight, bias    1.weight, 1.bias
    layer_02-model_00-model_states.pt   weight          tied_modules.embed.weight
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from reshard.checkpoint.contents import Checkpoint, StoredFile
from reshard.checkpoint.formats.deepspeed import (
    SavedFiles,
    expect_complete,
    flat_buffers,
    saved_states,
)
from reshard.checkpoint.formats.deepspeed.stored_tensors import Stored, TensorCollector
from reshard.checkpoint.formats.deepspeed.tensor_parallel import INFO, Joiner
from reshard.checkpoint.formats.optimizer_states import GROUPS, MASTER, state_name
from reshard.checkpoint.formats.torch_files.nested_states import PlainValues
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor
from reshard.checkpoint.storage.remote_paths import map_paths
from reshard.errors import CheckpointError, FormatError
from reshard.geometry.regions import Region
from reshard.mesh import DeviceMesh
from reshard.text import count_text

Key = TypeVar("Key", bound=tuple[int, ...])
Found = TypeVar("Found")
# Keys of experts that DeepSpeed made of a model's layers, in files of weights.
_AUTO_EXPERTS = ("ds_autoep_layers", "autoep_layers")


class SaveReader:
    """A reader of a save; names of files are relative to `folder`."""

    def __init__(self, folder: Path, saved: SavedFiles, format_name: str) -> None:
        self.folder, self.saved, self.format_name = folder, saved, format_name
        is_inside = saved.folder != folder
        self.prefix = f"{saved.folder.name}/" if is_inside else ""
        self.notes: list[str] = []
        self.is_stage3 = bool(saved.model_partitions)
        self.param_groups: list[dict[str, Any]] = []
        self.whole_rest: Mapping[str, Any] = {}

    def read(self) -> Checkpoint:
        """Describe the save.

        Raises:
            CheckpointError: files that are missing.
            FormatError: files that are damaged, or belong to different saves.
        """
        self._read_files()
        joiner = None
        if self.tensor_ranks > 1:
            label = str(self.saved.folder / self.first.file)
            joiner = Joiner(self.joining, self.tensor_ranks, label)
        self.collector = TensorCollector(self.saved.folder, self.slots, self.prefix, joiner)
        self.values = PlainValues()
        self._add_weights()
        self._add_states()
        self._add_whole_states()
        self.collector.join()
        self._expect_weights()
        self._add_values()
        collector = self.collector
        return Checkpoint(
            self.folder,
            self.format_name,
            collector.tensors,
            tuple(self._list_files()),
            self.mesh,
            paths=self.values.paths,
            checksums=collector.checksums,
            values=self.values.values,
            unread=tuple(self.values.unread),
            unreadable={n: why for m in self.models.values() for n, why in m.unreadable.items()},
            notes=tuple(self.notes),
        )

    def _read_files(self) -> None:
        saved, folder = self.saved, self.saved.folder
        # Under stage 3, each data-parallel rank has a file of weights too.
        names = saved.model_partitions or {(mp, 0): name for mp, name in saved.models.items()}
        self.models = self._read_each(saved_states.read_model_state, names)
        self.partitions = self._read_each(saved_states.read_partition, saved.partitions)
        counts = [count for partition in self.partitions.values() for count in partition.counts]
        first = next(iter(self.models.values()), None)
        # Groups of experts are partitioned over fewer ranks than the others: the largest count is
        # the number of data-parallel ranks.
        self.ranks = max(counts) if counts else first.ranks if first else 1
        degrees = first.degrees if first else None
        # Old versions lack the degrees; layers have a file of each tensor-parallel rank.
        layer_ranks = max((rank + 1 for _, rank in saved.layers), default=saved.mp_ranks)
        self.stages, self.tensor_ranks = degrees or (saved.mp_ranks // layer_ranks, layer_ranks)
        expect_complete(saved, self.ranks, max(saved.mp_ranks, self.stages * self.tensor_ranks))
        self.first = self.models[0, 0]
        self.joining = self.first.rest.get(INFO)
        if self.tensor_ranks > 1:
            # It describes parts, which targets do not have.
            rest = {key: value for key, value in self.first.rest.items() if key != INFO}
            self.first = self.first._replace(rest=rest)
        if self.tensor_ranks > 1 and saved.experts:
            raise FormatError(
                f"{folder} has experts over {self.tensor_ranks} tensor-parallel ranks: nothing in "
                "it describes how parts of experts are joined. Save it without tensor parallelism"
            )
        if self.first.groups and not self.partitions:
            if self.is_stage3:
                raise CheckpointError(
                    f"{folder} has no file zero_pp_rank_0_mp_rank_00_optim_states.pt and no other "
                    "like it; stage 3 of ZeRO has its weights there, fetch them"
                )
            self.notes.append(
                "there is no file of optimizer state (*_optim_states.pt); the weights are read"
            )
        if any(self.first.rest.get(key) for key in _AUTO_EXPERTS):
            raise FormatError(
                f"{folder} is of AutoEP, whose experts are one tensor that its own program puts "
                "together; convert it with DeepSpeed's ds_to_universal, whose result is read"
            )

    def _read_each(
        self, read: Callable[[Path, str], Found], names: Mapping[Key, str]
    ) -> dict[Key, Found]:
        """Return the contents of files, in the order of their keys."""
        keys, folder = sorted(names), self.saved.folder
        contents = map_paths(
            lambda path: read(folder, path.name), (folder / names[k] for k in keys)
        )
        return dict(zip(keys, contents, strict=True))

    @property
    def slots(self) -> int:
        """The number of ranks."""
        return self.stages * self.ranks * self.tensor_ranks

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks, stages first."""
        sizes = {"pp": self.stages, "dp": self.ranks, "tp": self.tensor_ranks}
        axes = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
        return DeviceMesh("mesh", tuple(axes.values()), tuple(axes))

    def slot(self, mp: int, rank: int) -> int:
        """Return the number of a rank."""
        stage, tensor_rank = divmod(mp, self.tensor_ranks)
        return (stage * self.ranks + rank) * self.tensor_ranks + tensor_rank

    def _list_files(self) -> Iterator[StoredFile]:
        saved = self.saved
        ranks = {name: self.slot(mp, rank) for (mp, rank), name in saved.partitions.items()}
        ranks |= {name: self.slot(mp, rank) for (mp, rank), name in saved.model_partitions.items()}
        ranks |= {name: self.slot(mp, 0) for mp, name in saved.models.items()}
        ranks |= dict.fromkeys([*saved.layers.values(), *saved.experts.values()], 0)
        ranks |= dict.fromkeys(saved.expert_optimizers.values(), 0)
        for name in sorted(ranks, key=lambda name: (ranks[name], name)):
            size_bytes = (saved.folder / name).stat().st_size
            yield StoredFile(self.prefix + name, size_bytes, ranks[name])

    # Weights. Stages of a pipeline that share a parameter each have it: the first stage's is read.

    def _add_weights(self) -> None:
        for (mp, rank), model in self.models.items():
            # Under stage 3 all data-parallel ranks have a file; its module is the same.
            if rank:
                continue
            partitioned = {*model.shapes, *model.frozen, *model.shared} if self.is_stage3 else set()
            for name, archived in (model.module or {}).items():
                # The module of a rank has empty tensors for partitioned weights.
                elements = math.prod(archived.shape)
                if name not in partitioned or elements:
                    own = model.shared.get(name, name)
                    self._add_weight(own, name, mp, model, archived)
            if self.is_stage3:
                for name, shape in model.frozen.items():
                    self._add_frozen(mp, name, shape)
        experts, layers = self.saved.experts, self.saved.layers
        expert_tensors = self._read_each(saved_states.read_tensors, experts)
        for key, file in experts.items():
            for name, archived in expert_tensors[key].items():
                self.collector.add_copy(name, file, archived, self.slot(key[2], 0))
        layer_tensors = self._read_each(saved_states.read_tensors, layers)
        seen: set[tuple[str, int]] = set()
        for (layer, rank), file in layers.items():
            tensors = layer_tensors[layer, rank]
            shapes = {
                name: shape
                for (mp, _), model in self.models.items()
                if mp % self.tensor_ranks == rank
                for name, shape in model.shapes.items()
            }
            # A layer that stages share has a file for each of them; the stages are unknown.
            last = (self.stages - 1) * self.tensor_ranks
            for name, archived in name_layer(layer, tensors, shapes).items():
                mp = rank + last if (name, rank) in seen else rank
                seen.add((name, rank))
                self.collector.add_part(name, name, mp, self.slot(mp, 0), file, archived)

    def _add_weight(
        self,
        parameter: str,
        name: str,
        mp: int,
        model: saved_states.ModelState,
        archived: ArchivedTensor,
    ) -> None:
        """Add a weight of the model, or a buffer, which tensor-parallel ranks have alike."""
        if name not in model.buffers:
            self.collector.add_part(parameter, name, mp, self.slot(mp, 0), model.file, archived)
            return
        first = (self.models[0, 0].module or {}).get(name)
        if self.tensor_ranks > 1 and first is not None and first.crc32 != archived.crc32:
            why = "another than that of rank 0, which is taken"
            self.values.unread.append((f"{name} in {model.file}", why))
        self.collector.add_first(name, model.file, archived, self.slot(mp, 0))

    def _locate(self, name: str, piece: Region, file: str, buffer: Any) -> Region:
        """Return a piece in a flat buffer of a file."""
        if not isinstance(buffer, ArchivedTensor) or len(buffer.shape) != 1:
            raise FormatError(
                f"{self.saved.folder / file} has no flat tensor for {name!r}, which other ranks "
                "have; the files belong to different saves"
            )
        end = piece.offset + piece.elements
        if end > buffer.shape[0]:
            raise FormatError(
                f"{self.saved.folder / file} has {buffer.shape[0]} elements of {buffer.dtype} "
                f"where {end} were expected for {name!r}; the files belong to different saves"
            )
        offset = buffer.view.offset + piece.offset
        return Region(piece.start, piece.stop, Stored(file, buffer), offset, (1,))

    def _expect_weights(self) -> None:
        """Raise CheckpointError if a layer or an expert lacks a file of weights."""
        saved, tensors = self.saved, self.collector.tensors
        if self.is_stage3 or not (saved.layers or saved.experts):
            return
        trained = [name for group in self.param_groups for name in group["params"]]
        missing = [name for name in trained if isinstance(name, str) and name not in tensors]
        if missing:
            raise CheckpointError(
                f"{saved.folder} has no weights of {missing[0]!r}, which the optimizer has "
                f"({count_text(len(missing), 'parameter')} in all); a file of a layer "
                "(layer_03-model_00-model_states.pt) or an expert "
                "(layer_0_expert_5_mp_rank_00_model_states.pt) is missing, fetch it"
            )

    def _add_frozen(self, mp: int, name: str, shape: saved_states.Shape) -> None:
        """Add a parameter without an optimizer: each rank's file has its part."""
        elements = math.prod(shape)
        size = flat_buffers.part_size(elements, self.ranks)
        pieces = []
        for piece in flat_buffers.own_pieces(elements, self.ranks, 0):
            model = self.models[mp, piece.container]
            buffer = model.fragments.get(name)
            if buffer is None or buffer.shape != (size,):
                # A parameter that is not partitioned yet is complete on each rank.
                if buffer is not None and buffer.shape == shape:
                    self.collector.add_part(name, name, mp, self.slot(mp, 0), model.file, buffer)
                    return
                state = "missing" if buffer is None else f"of shape {list(buffer.shape)}"
                raise FormatError(
                    f"{self.saved.folder / model.file}: the part of the frozen parameter {name!r} "
                    f"is {state}, expected {size} elements of {list(shape)} over {self.ranks} ranks"
                )
            slot = self.slot(mp, piece.container)
            pieces.append((slot, self._locate(name, piece, model.file, buffer)))
        self.collector.add_pieces(name, name, mp, shape, pieces)

    # Optimizer state.

    def _add_states(self) -> None:
        for mp in sorted({mp for mp, _ in self.partitions}):
            parts = [self.partitions[mp, rank] for rank in range(self.ranks)]
            groups = self.models[mp, 0].groups
            self._expect_alike(parts, groups)
            for number, shapes in enumerate(groups):
                self._add_group(mp, number, shapes, parts)
            self._add_hyper(parts[0], groups)

    def _expect_alike(
        self,
        parts: list[saved_states.Partition],
        groups: tuple[Mapping[str, saved_states.Shape], ...],
    ) -> None:
        first = parts[0]
        for part in parts:
            is_alike = (part.stage, part.counts) == (first.stage, first.counts)
            if not is_alike or len(part.masters) != len(groups):
                raise FormatError(
                    f"{self.saved.folder / part.file} has {len(part.masters)} groups of stage "
                    f"{part.stage} over {list(part.counts)} ranks; {first.file} has stage "
                    f"{first.stage} over {list(first.counts)}, and the weights have {len(groups)} "
                    "groups. The files belong to different saves"
                )

    def _add_group(
        self,
        mp: int,
        number: int,
        shapes: Mapping[str, saved_states.Shape],
        parts: list[saved_states.Partition],
    ) -> None:
        elements = [math.prod(shape) for shape in shapes.values()]
        count = self._count_partitions(parts[0], number)
        if parts[0].stage == 3:
            located = _find_own(elements, count)
        else:
            located = self._find_flat(number, elements, parts, count)
        for ranks, names in flat_buffers.spread([*shapes], count, self.ranks, self._is_data_first):
            members = [parts[rank] for rank in ranks]
            first, size = members[0], members[0].masters[number].shape[0]
            # The float32 weights, and the state of the flat buffer, of each rank.
            buffers: dict[str, list[Any]] = {MASTER: [part.masters[number] for part in members]}
            for key in first.states[number]:
                buffers[str(key)] = [part.states[number].get(key) for part in members]
            for name, shape, pieces in zip(names, shapes.values(), located, strict=True):
                for key, of_ranks in buffers.items():
                    own, value = state_name(name, key), of_ranks[0]
                    if not isinstance(value, ArchivedTensor):
                        path = ("optimizer", "state", name, key)
                        self.values.add(own, value, path, first.file)
                    # Stages 1 and 2 save state with padding, and the float32 weights without it.
                    elif len(value.shape) == 1 and value.shape[0] >= size:
                        stored = []
                        for piece in pieces:
                            n: int = piece.container
                            region = self._locate(own, piece, members[n].file, of_ranks[n])
                            stored.append((self.slot(mp, ranks[n]), region))
                        self.collector.add_pieces(name, own, mp, shape, stored)
                    elif math.prod(value.shape) == 1:
                        self.collector.add_first(own, first.file, value, self.slot(mp, ranks[0]))
                    else:
                        why = f"it has shape {list(value.shape)}, and no part for each parameter"
                        self.values.unread.append((own, why))

    def _find_flat(
        self, number: int, elements: list[int], parts: list[saved_states.Partition], count: int
    ) -> list[tuple[Region, ...]]:
        """Return the pieces of the parameters of a group of stage 1 or 2."""
        first = parts[0]
        saved_paddings = (
            first.paddings[number] if first.paddings and number < len(first.paddings) else ()
        )
        paddings = (
            [*saved_paddings] if len(saved_paddings) == len(elements) else [0] * len(elements)
        )
        total = sum(elements) + sum(paddings)
        size = first.size(number)
        if size * count < total:
            raise FormatError(
                f"{self.saved.folder / first.file}: group {number} has partitions of {size} "
                f"elements over {count} ranks, its parameters have {total}. The files belong to "
                "different saves, or some ranks did not save"
            )
        for rank, part in enumerate(parts):
            if part.size(number) != size:
                held, end = part.masters[number].shape[0], part.ends[number]
                raise FormatError(
                    f"{self.saved.folder / part.file}: the partition of group {number} has "
                    f"{held} elements and {end} of padding, that of rank 0 "
                    f"has {size}. The files belong to different saves (rank {rank})"
                )
        return flat_buffers.flat_pieces(elements, paddings, size)

    def _add_whole_states(self) -> None:
        """Add the state of optimizers without partitions."""
        optimizers = [*saved_states.list_optimizers(self.saved, self.models)]
        has_one = len(optimizers) == 1
        groups: list[dict[str, Any]] = []
        for optimizer in optimizers:
            name = "optimizer" if has_one else f"optimizer in {optimizer.file}"
            self.whole_rest = self.whole_rest or optimizer.rest
            if optimizer.flat:
                total = sum(math.prod(shape) for _, shape in optimizer.weights)
                if [flat.shape for flat in optimizer.flat] != [(total,)]:
                    why = "its flat buffers are ambiguous: they are of several groups"
                    self.values.unread.append((name, why))
                    continue
                self._add_fused(optimizer)
                own = [parameter for parameter, _ in optimizer.weights]
                saved_states.merge_groups(
                    groups, [{**group, "params": [*own]} for group in optimizer.hyper]
                )
                continue
            names = saved_states.name_parameters(optimizer)
            if names is None and not has_one:
                # A number refers to a different parameter on each rank.
                why = "its parameters have numbers, and their shapes are ambiguous"
                self.values.unread.append((name, why))
                continue
            if names is None:
                self.notes.append(
                    "optimizer state has the numbers of parameters: the shapes of the weights, in "
                    "their order, do not identify them"
                )
                names = {}
            called = {number: names.get(number, str(number)) for number in optimizer.numbers}
            for number, parameter in called.items():
                state: dict[Any, Any] = dict(optimizer.states.get(number, {}))
                if number in optimizer.masters:
                    state = {MASTER: optimizer.masters[number], **state}
                for key, value in state.items():
                    self._add_kept(parameter, str(key), value, optimizer)
            named = [
                {**group, "params": [names.get(n, n) for n in group["params"]]}
                for group in optimizer.hyper
            ]
            saved_states.merge_groups(groups, named)
        self.param_groups = groups or self.param_groups

    def _add_fused(self, optimizer: saved_states.WholeOptimizer) -> None:
        """Add the state of a flat buffer of all parameters."""
        flat = optimizer.flat[0]
        sizes = [math.prod(shape) for _, shape in optimizer.weights]
        pieces = flat_buffers.flat_pieces(sizes, [0] * len(sizes), sum(sizes))
        entries = {MASTER: flat, **next(iter(optimizer.states.values()), {})}
        for (name, shape), own in zip(optimizer.weights, pieces, strict=True):
            for key, value in entries.items():
                if not isinstance(value, ArchivedTensor) or value.shape != flat.shape:
                    self._add_kept(name, str(key), value, optimizer)
                    continue
                state = state_name(name, str(key))
                stored = [(0, self._locate(state, p, optimizer.file, value)) for p in own]
                self.collector.add_pieces(name, state, optimizer.mp, shape, stored)

    def _add_kept(
        self, parameter: str, key: str, value: Any, optimizer: saved_states.WholeOptimizer
    ) -> None:
        """Add optimizer state of a parameter, whole in a file."""
        name, mp, file = state_name(parameter, key), optimizer.mp, optimizer.file
        if not isinstance(value, ArchivedTensor):
            self.values.add(name, value, ("optimizer", "state", parameter, key), file)
        elif math.prod(value.shape) == 1:
            self.collector.add_first(name, file, value, self.slot(mp, 0))
        else:
            self.collector.add_part(parameter, name, mp, self.slot(mp, 0), file, value)

    # Groups and values.

    @property
    def _is_data_first(self) -> bool:
        config = self.first.rest.get("ds_config")
        return isinstance(config, dict) and bool(config.get("use_data_before_expert_parallelism"))

    def _add_hyper(
        self, part: saved_states.Partition, groups: tuple[Mapping[str, saved_states.Shape], ...]
    ) -> None:
        names = [
            [
                name
                for copy in flat_buffers.spread(
                    [*group], self._count_partitions(part, i), self.ranks, self._is_data_first
                )
                for name in copy.names
            ]
            for i, group in enumerate(groups)
        ]
        if part.stage in (1, 2):
            # In stages 1 and 2, the order of the buffers differs from the model's groups.
            names = [self._in_own_order(buffer) for buffer in names]
        # An elastic checkpoint lacks hyper-parameters.
        hypers = part.hyper or tuple({"params": [number]} for number in range(len(groups)))
        saved_states.merge_groups(self.param_groups, saved_states.name_members(hypers, names))

    def _count_partitions(self, part: saved_states.Partition, group: int) -> int:
        """Return the number of ranks over which a group is partitioned."""
        return part.counts[group] if group < len(part.counts) else self.ranks

    def _in_own_order(self, names: list[str]) -> list[str]:
        """Restore the order of the model if gradients were distributed round robin."""
        config = self.first.rest.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        if not isinstance(zero, dict) or not zero.get("round_robin_gradients"):
            return names
        order = flat_buffers.deal_round_robin(len(names), self.ranks)
        by_number = dict(zip(order, names, strict=True))
        return [by_number[number] for number in range(len(names))]

    def _add_values(self) -> None:
        values, model = self.values, self.first
        saved_states.add_model_values(values, model, self.collector.add_first)
        rest, file = self.whole_rest, model.file
        if self.partitions:
            rest, file = self.partitions[0, 0].rest, self.partitions[0, 0].file
        if rest:
            values.add_state(
                saved_states.plain_scalers(rest), ("optimizer",), file, self.collector.add_first
            )
        if self.param_groups:
            values.add(GROUPS, self.param_groups, label=file)
        for (mp, rank), other in self.models.items():
            if (mp, rank) != (0, 0):
                skipped = {INFO} if self.tensor_ranks > 1 else set()
                rest = {key: value for key, value in other.rest.items() if key not in skipped}
                values.unread += saved_states.list_differences(model.rest, rest, other.file)


def _find_own(elements: list[int], count: int) -> list[tuple[Region, ...]]:
    """Return the pieces of the parameters of a sub-group of stage 3."""
    pieces, offset = [], 0
    for element in elements:
        pieces.append(flat_buffers.own_pieces(element, count, offset))
        offset += flat_buffers.part_size(element, count)
    return pieces


_TIED = "tied_modules."


def name_layer(
    layer: int, tensors: Mapping[str, ArchivedTensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, ArchivedTensor]:
    """Return the tensors of a layer by their names in the whole model, with parameters of `shapes`.

    A name that the optimizer lacks belongs to a tied layer, if a single tied parameter fits.
    """
    named = {}
    for name, archived in tensors.items():
        own = f"{layer}.{name}"
        if own not in shapes:
            tied = [
                other
                for other, shape in shapes.items()
                if other.startswith(_TIED)
                and other.removeprefix(_TIED).partition(".")[2] == name
                and shape == archived.shape
            ]
            own = tied[0] if len(tied) == 1 else own
        named[own] = archived
    return named
