"""Expert routing: tokens are sent to the experts that they chose, and the results come back.

The number of rows per expert depends on the data. Ranks exchange these counts, then exactly the
rows that exist: none is padded, and none is dropped unless there is a capacity.

    choose      which[t, k]: the experts of each token
    send        rows to the ranks that have their experts, sorted by expert
    multiply    each row by the matrix of its expert, any number of times
    back        the result of each row, to its token

The operations on rows are linear, and their pullbacks are built from the same operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import numpy as np

from reshard._validation import check_int
from reshard.cut_rules import CutRule, Joined, Sizes
from reshard.dtypes import dtype as as_dtype
from reshard.errors import ArrayIndexError, MeshError, SpecError, UsageError
from reshard.mesh import Axis
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.spmd.core.array_type import ArrayType, replicated
from reshard.spmd.core.backend import Library, records_gradient
from reshard.spmd.core.local_work import parts_of
from reshard.spmd.core.operator import JointPullback, TapeStep
from reshard.spmd.core.result_types import kind_of
from reshard.spmd.gradients.rematerialization import without
from reshard.spmd.gradients.tape import add_step, find_tapes
from reshard.spmd.graph import Body, BodyCosts
from reshard.spmd.ops.arguments import of_arrays
from reshard.spmd.ops.elementwise import operands
from reshard.spmd.ops.movement import expand_dims, matrix_transpose
from reshard.spmd.ops.reductions import sum as sum_over
from reshard.spmd.shards.operation_call import placed
from reshard.spmd.tracing.abstract_runner import uses_abstract_values
from reshard.spmd.tracing.graph_recording import listening_recorder

_COUNTS = as_dtype("int64")


@of_arrays
def expert_routing(
    which: Any, /, count: int, *, axes: str | Sequence[str] = (), capacity: int | None = None
) -> ExpertRouting:
    """Compute the routing of tokens to experts, given the experts that each token chose.

    It reads the elements of `which`, so in a traced function it must be inside a function decorated
    with `@sp.eagerly`.

    Args:
        which: integers `[tokens]` or `[tokens, k]`, the experts; for example from `sp.top_k`.
        count: the number of experts.
        axes: the mesh axes over which experts are sharded.
        capacity: the maximum number of rows per expert: those of the first tokens are used, and the
            results of the others are zeros. No maximum when None.

    Raises:
        ArrayIndexError: an invalid expert number, on every process.
        MeshError: axes that the mesh of `which` does not have.
        SpecError: a wrong number of dimensions.
        UsageError: not integers, or an array of a traced function.

    >>> import reshard.spmd as sp
    >>> routing = sp.expert_routing(sp.array([1, 0, 1]), count=2)
    >>> rows = routing.send(sp.array([[1.0], [2.0], [3.0]]))
    >>> rows.to_dense().tolist(), routing.counts.tolist()
    ([[2.0], [1.0], [3.0]], [1, 2])
    >>> products = routing.multiply(rows, sp.array([[[10.0]], [[100.0]]]))
    >>> routing.back(products).to_dense().tolist()
    [[100.0], [20.0], [300.0]]
    """
    if which.ndim not in (1, 2):
        raise SpecError(f"experts of shape {list(which.shape)}; [tokens] or [tokens, k] expected")
    if kind_of(which.dtype) not in ("signed integer", "unsigned integer"):
        raise UsageError(f"experts of {which.dtype}; give an array of whole numbers")
    if which.runner.is_abstract and not uses_abstract_values():
        raise UsageError(
            "sp.expert_routing in a traced function: how many rows an expert gets is known from "
            "elements alone; put what is done with its rows into a function under @sp.eagerly, "
            "which is given all arrays that it reads"
        )
    if capacity is not None:
        capacity = check_int(capacity, "capacity of an expert")
    if not isinstance(axes, Iterable):
        raise UsageError(f"experts over axes={axes!r}; give names of axes of the mesh")
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    return ExpertRouting(which, check_int(count, "number of experts", minimum=1), names, capacity)


class ExpertRouting:
    """A routing of tokens to experts. Create it with `sp.expert_routing`."""

    def __init__(
        self, which: Any, count: int, names: tuple[str, ...], capacity: int | None
    ) -> None:
        spec = which.type.spec
        self.mesh = None if spec is None else spec.mesh
        axis_names = () if self.mesh is None else self.mesh.axis_names
        if not set(names) <= set(axis_names) or len(set(names)) < len(names):
            raise MeshError(
                f"experts over {', '.join(names)}; different axes of a mesh of "
                f"{', '.join(axis_names) or 'none'} were expected"
            )
        if not which.runner.has_everyone(self.mesh):
            raise MeshError(
                f"experts over {self.mesh!r}, in which some processes have no place: how many rows "
                "there are would not be known there; use a mesh of all processes"
            )
        self.count = count
        self.tokens = int(which.shape[0])
        self.chosen = which.shape[1] if which.ndim == 2 else None
        self.runner = which.runner
        self._which = which
        # Tokens are sharded over the experts' axes too, so that each row has a single sender.
        cut = () if spec is None else spec.dim_specs[0].axes
        # Parts of an expert axis are left out, since the whole axis follows.
        tokens = [axis for axis in cut if axis.name not in names or axis in map(Axis, names)]
        self._expert_axes = tuple(map(Axis, names))
        self._axes = (*tokens, *(axis for axis in self._expert_axes if axis not in tokens))
        which = self._cut_over_parts(which)
        if self.runner.is_abstract:
            counts = self._suppose_counts(which)
            self._rows = ExpertRows(_limit_counts(counts, capacity), self._find_owners())
            return
        experts = [self.runner.library.numpy(shard).reshape(-1) for shard in which._shards]
        counts = self._exchange_counts(experts)
        limits = None if capacity is None else _share_out(counts, capacity)
        self._rows = ExpertRows(_limit_counts(counts, capacity), self._find_owners())
        self._orders = [
            self._rows.order_to_send(part, part_experts, None if limits is None else limits[part])
            for part, part_experts in zip(self._parts, experts, strict=True)
        ]

    @property
    def counts(self) -> Integers:
        """The number of rows of each expert: `[experts]`."""
        counts: Integers = self._rows.counts.sum(0)
        return counts

    @property
    def moved_rows(self) -> int:
        """The number of rows sent to another rank, counted once for all replicas."""
        return self._rows.moved

    def send(self, x: Any, /) -> Any:
        """Send the rows of tokens to their experts, sorted by expert: `[rows, d]`.

        Args:
            x: `[tokens, d]`, whose rows are sent to all experts of their token; or
                `[tokens, k, d]`, with one row for each expert.
        """
        x = self._take(x)
        lead = (self.tokens,) if x.ndim == 2 else self._lead
        if x.ndim not in (2, 3) or tuple(x.shape[:-1]) != lead:
            raise SpecError(
                f"rows of shape {list(x.shape)} for {self.tokens} tokens; [tokens, d] or "
                "[tokens, k, d] were expected"
            )
        is_repeated = x.ndim == 2 and self.chosen is not None
        x = self._cut_over_parts(x)

        def compute() -> list[Any]:
            space, each = self.runner.library.namespace, self.chosen or 1
            shards = []
            for shard, order in zip(x._shards, self._orders, strict=True):
                rows = shard if x.ndim == 2 else shard.reshape((-1, x.shape[-1]))
                # Rows are numbered by token, and within a token by choice.
                taken = order // each if is_repeated else order
                shards.append(space.take(rows, self._indices(taken, shard), axis=0))
            arrived = self._move(x.dtype, shards, self._rows.own, self._rows.sent)
            for number, part in enumerate(self._parts):
                order = self._indices(self._rows.sorted_at(part), arrived[number])
                arrived[number] = space.take(arrived[number], order, axis=0)
            return arrived

        def pull_back(step: TapeStep, g: Any) -> list[Any]:
            cotangent = self.back(g)
            return [sum_over(cotangent, axis=1) if is_repeated else cotangent]

        kind = ArrayType((int(self.counts.sum()), x.shape[-1]), x.dtype, self._row_spec)
        return self._carry_out("expert_rows_sent", (x,), kind, compute, pull_back, moves=True)

    def back(self, rows: Any, weights: Any = None, /) -> Any:
        """Return rows to their tokens: `[tokens, k, d]`, or `[tokens, d]` without k.

        Rows that exceeded the capacity of an expert are zeros.

        Args:
            rows: `[rows, d]`, as from `send` and `multiply`.
            weights: `[tokens, k]`: the weights of a weighted sum over `k`, which gives
                `[tokens, d]`.
        """
        rows = self._take_rows(rows)
        width = rows.shape[-1]

        def compute() -> list[Any]:
            library = self.runner.library
            shards = []
            for shard, part in zip(rows._shards, self._parts, strict=True):
                # The inverse permutation, which undoes the sort by expert.
                order = np.argsort(self._rows.sorted_at(part))
                shards.append(library.namespace.take(shard, self._indices(order, shard), axis=0))
            arrived = self._move(rows.dtype, shards, self._rows.sent, self._rows.own)
            outputs = []
            for shard, order, part in zip(arrived, self._orders, self._parts, strict=True):
                tokens = self._tokens_of(part)
                each = self.chosen or 1
                scattered = library.filled((tokens * each, width), 0, shard)
                scattered[self._indices(order, shard)] = shard
                scattered = library.linked(scattered, shard)
                outputs.append(scattered.reshape((tokens, *self._lead[1:], width)))
            return outputs

        def pull_back(step: TapeStep, g: Any) -> list[Any]:
            return [self.send(g)]

        kind = ArrayType((*self._lead, width), rows.dtype, self._spec(len(self._lead) + 1))
        output = self._carry_out("expert_rows_back", (rows,), kind, compute, pull_back, moves=True)
        if weights is None:
            return output
        _, weights = operands(rows, weights)
        if tuple(weights.shape) != self._lead:
            raise SpecError(f"weights of shape {list(weights.shape)}; {list(self._lead)} expected")
        output = output * expand_dims(weights, axis=-1)
        return output if self.chosen is None else sum_over(output, axis=1)

    def multiply(self, rows: Any, matrices: Any, /) -> Any:
        """Multiply each row `[rows, d]` by the matrix of its expert, `[experts, d, e]`."""
        rows, matrices = self._take_rows(rows), self._take(matrices)
        spec = self._cut_experts(matrices.ndim)
        matrices = matrices if spec is None else placed(matrices, spec)
        if matrices.ndim != 3 or tuple(matrices.shape[:2]) != (self.count, rows.shape[-1]):
            raise SpecError(
                f"matrices of shape {list(matrices.shape)} for rows of {rows.shape[-1]} elements; "
                f"[{self.count}, {rows.shape[-1]}, e] were expected"
            )

        compute = partial(self._compute_grouped, grouped_product, rows, matrices)

        def pull_back(step: TapeStep, g: Any) -> list[Any]:
            return [self.multiply(g, matrix_transpose(matrices)), self._outer(rows, g)]

        kind = ArrayType((rows.shape[0], matrices.shape[-1]), rows.dtype, self._row_spec)
        return self._carry_out("expert_product", (rows, matrices), kind, compute, pull_back)

    def _outer(self, rows: Any, others: Any) -> Any:
        """Return for each expert the sum of its rows' products with others: `[experts, d, e]`."""
        rows, others = self._take_rows(rows), self._take_rows(others)
        shape = self.count, rows.shape[-1], others.shape[-1]

        compute = partial(self._compute_grouped, grouped_outer, rows, others)

        def pull_back(step: TapeStep, g: Any) -> list[Any]:
            return [self.multiply(others, matrix_transpose(g)), self.multiply(rows, g)]

        kind = ArrayType(shape, rows.dtype, self._cut_experts(len(shape), pending=True))
        return self._carry_out("expert_outer_product", (rows, others), kind, compute, pull_back)

    def _compute_grouped(self, function: Callable[..., Any], left: Any, right: Any) -> list[Any]:
        """Return the results of a function of both shards and the experts' ends, of each part."""
        return [
            function(self.runner.library, *shards, self._ends(part))
            for part, *shards in zip(self._parts, left._shards, right._shards, strict=True)
        ]

    @property
    def _lead(self) -> tuple[int, ...]:
        return (self.tokens,) if self.chosen is None else (self.tokens, self.chosen)

    @property
    def _parts(self) -> list[int]:
        """The part of the tokens of each local rank."""
        if self.mesh is None or not self._axes:
            return [0] * len(self.runner.ranks(self.mesh))
        of_devices = self.mesh.coordinates(self._axes).tolist()
        part_of = dict(zip(self.mesh.devices, of_devices, strict=True))
        return [part_of[rank] for rank in self.runner.ranks(self.mesh)]

    @property
    def _sizes(self) -> list[int]:
        return [] if self.mesh is None else [self.mesh.axis_size(axis) for axis in self._axes]

    def _spec(self, ndim: int, rule: CutRule | None = None) -> ShardingSpec | None:
        """Return a sharding of the first dimension over the tokens' axes, by a rule or evenly."""
        if self.mesh is None:
            return None
        levels = [Level(self._axes, rule)] if self._axes else []
        first = DimSpec(self._axes) if rule is None else DimSpec(levels)
        return ShardingSpec(self.mesh, [first, *[DimSpec()] * (ndim - 1)])

    @property
    def _row_spec(self) -> ShardingSpec | None:
        """The sharding of rows that are sorted at their experts."""
        return self._spec(2, self._rows.at_experts)

    def _cut_experts(self, ndim: int, pending: bool = False) -> ShardingSpec | None:
        """Return a sharding of the first dimension over the experts' axes."""
        if self.mesh is None:
            return None
        dims = [DimSpec(self._expert_axes), *[DimSpec()] * (ndim - 1)]
        # Each part of the tokens along the other axes has a contribution.
        waiting = [axis for axis in self._axes if axis not in self._expert_axes]
        return ShardingSpec(self.mesh, dims, partial_axes=waiting if pending else ())

    def _find_owners(self) -> Integers:
        """Return the part to which each part sends rows of each expert, `[parts, experts]`."""
        sizes = self._sizes
        parts = int(np.prod(sizes, dtype=np.int64))
        coordinates = np.array(np.unravel_index(np.arange(parts), sizes)) if sizes else None
        if self.mesh is None or not self._expert_axes or coordinates is None:
            return np.tile(np.arange(parts)[:, None], (1, self.count))
        spec = ShardingSpec(self.mesh, [DimSpec(self._expert_axes)])
        lengths = [stop - start for start, stop in parts_of(spec, 0, self.count)]
        of_expert = np.repeat(np.arange(len(lengths)), lengths)
        expert_coordinates = np.unravel_index(
            of_expert, [self.mesh.axis_size(axis) for axis in self._expert_axes]
        )
        owner_coordinates = np.repeat(coordinates[:, :, None], self.count, axis=2)
        for axis, coordinate in zip(self._expert_axes, expert_coordinates, strict=True):
            owner_coordinates[self._axes.index(axis)] = coordinate
        owners: Integers = np.ravel_multi_index(tuple(owner_coordinates), sizes)
        return owners

    def _exchange_counts(self, experts: Sequence[Integers]) -> Integers:
        """Return the counts `[parts, experts]`. All ranks return them, or raise ArrayIndexError."""
        rows = []
        for numbers in experts:
            # Compared in their own type, because a uint64 may exceed the range of int64.
            bad = numbers[(numbers < 0) | (numbers >= self.count)]
            good = numbers[(numbers >= 0) & (numbers < self.count)].astype(np.int64)
            first = int(bad[0]) if len(bad) else 0
            # The number is sent with the counts, so it has to fit into their type.
            invalid = [len(bad), max(min(first, 2**63 - 1), -(2**63))]
            counts = np.bincount(good, minlength=self.count)
            rows.append(np.concatenate([counts, invalid]).astype(np.int64)[None])
        shards = tuple(self.runner.library.array(row) for row in rows)
        spec = self._spec(2)
        if spec is not None and self._axes:
            parts = int(np.prod(self._sizes))
            kind = ArrayType((parts, self.count + 2), _COUNTS, spec)
            shards = self.runner.movement(kind, replicated(spec.mesh, 2))(shards)
        exchanged = self.runner.library.numpy(shards[0])
        wrong = np.flatnonzero(exchanged[:, -2])
        if len(wrong):
            raise self.runner.collective_error(
                ArrayIndexError(
                    f"expert {exchanged[wrong[0], -1]} of {self.count}; give one of 0 to "
                    f"{self.count - 1}"
                )
            )
        counted: Integers = exchanged[:, :-2].astype(np.int64)
        return counted

    def _take(self, x: Any) -> Any:
        """Return an array over the mesh of this routing."""
        _, x = operands(self._which, x)
        spec = x.type.spec
        if x.runner is not self.runner or (spec is not None and spec.mesh is not self.mesh):
            raise MeshError(
                f"{x.type} of {x.runner!r}; an array over the mesh and of the runner of the "
                "experts' numbers was expected"
            )
        return x

    def _cut_over_parts(self, x: Any) -> Any:
        spec = self._spec(x.ndim)
        return x if spec is None else placed(x, spec)

    def _take_rows(self, rows: Any) -> Any:
        rows = self._take(rows)
        if rows.ndim != 2 or rows.shape[0] != self.counts.sum():
            raise SpecError(
                f"rows of shape {list(rows.shape)}; [{self.counts.sum()}, d] of routing.send were "
                "expected"
            )
        spec = self._row_spec
        return rows if spec is None else placed(rows, spec)

    def _ends(self, part: int) -> Integers:
        """Return where the rows of each expert of a part end."""
        counts = self._rows.counts_at(part)[np.any(self._rows.owners == part, axis=0)]
        return np.cumsum(counts)

    def _tokens_of(self, part: int) -> int:
        spec = self._spec(1)
        if spec is None or not self._axes:
            return self.tokens
        start, stop = parts_of(spec, 0, self.tokens)[part]
        return stop - start

    def _indices(self, order: Integers, like: Any) -> Any:
        return self.runner.library.array(order.astype(np.int64), like=like)

    def _move(
        self, dtype: Any, shards: Sequence[Any], before: CutRule, after: CutRule
    ) -> list[Any]:
        """Return rows in another sharding."""
        source, target = self._spec(2, before), self._spec(2, after)
        total = int(self.counts.sum())
        if source is None or target is None or not self._axes or not total:
            return list(shards)
        kind = ArrayType((total, int(shards[0].shape[-1])), dtype, source)
        return list(self.runner.moved_once(kind, target, tuple(shards)))

    def _carry_out(
        self,
        name: str,
        inputs: tuple[Any, ...],
        kind: ArrayType,
        compute: Callable[[], list[Any]],
        pull_back: Callable[[TapeStep, Any], list[Any]],
        moves: bool = False,
    ) -> Any:
        """Compute the result, or an abstract one, and record it as a single step on the tapes."""
        with without(find_tapes(inputs)):
            if self.runner.is_abstract:
                row_bytes = kind.shape[-1] * kind.dtype.itemsize_bytes
                moved_bytes = self.moved_rows * self._copies * row_bytes if moves else 0
                result = self._suppose(name, inputs, kind, moved_bytes)
            else:
                result = type(self._which).of_shards(kind, tuple(compute()), self.runner)
        add_step(TapeStep(name, {}, inputs, (result,), JointPullback(pull_back)))
        return result

    def _suppose(
        self, name: str, inputs: tuple[Any, ...], kind: ArrayType, moved_bytes: int
    ) -> Any:
        """Return an array without elements, as an operation of the traced function."""
        wrap = type(self._which)

        def run(arrays: Sequence[Any], runner: Any) -> list[Any]:
            return [runner.array(kind, wrap)]

        recorder = listening_recorder()
        if recorder is None:
            return run(inputs, self.runner)[0]
        body = Body(run, lambda _: BodyCosts(moved_bytes))
        return recorder.add_body(name, body, inputs, [kind])[0]

    def _suppose_counts(self, which: Any) -> Integers:
        """Return counts `[parts, experts]` as if all experts were chosen equally often."""
        parts = int(np.prod(self._sizes, dtype=np.int64))
        numbers = ArrayType((parts, self.count + 2), _COUNTS)
        received_bytes = (parts - 1) * (self.count + 2) * _COUNTS.itemsize_bytes
        self._suppose("expert_counts", (which,), numbers, received_bytes * parts * self._copies)
        rows = np.array([self._tokens_of(part) for part in range(parts)]) * (self.chosen or 1)
        some, more = np.divmod(rows, self.count)
        counts: Integers = some[:, None] + (np.arange(self.count) < more[:, None])
        return counts

    @property
    def _copies(self) -> int:
        """Return the number of ranks that have each part of the tokens."""
        return 1 if self.mesh is None else self.mesh.size // int(np.prod(self._sizes, dtype=int))


def _limit_counts(counts: Integers, capacity: int | None) -> Integers:
    """Return the counts of rows that experts take."""
    return counts if capacity is None else np.minimum(counts, _share_out(counts, capacity))


def _share_out(counts: Integers, capacity: int) -> Integers:
    """Return how many rows each part may send, `[parts, experts]`; earlier parts come first."""
    before = np.cumsum(counts, axis=0) - counts
    limits: Integers = np.clip(capacity - before, 0, None)
    return limits


Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


_NARROW = ("float32", "float16", "bfloat16")


# PyTorch's grouped product refuses rows whose lengths are not a multiple of this.
_ALIGNED_BYTES = 16


class ExpertRows:
    """A description of the rows of all parts.

    Args:
        counts: `[parts, experts]`, rows that each part sends to each expert.
        owners: `[parts, experts]`, the part that has the expert to which a part sends.

    >>> rows = ExpertRows(np.array([[2, 0, 1, 1], [0, 2, 0, 2]]), np.array([[0, 0, 1, 1]] * 2))
    >>> rows.sent.sizes, [rule.sizes for rule in rows.sent.rules], rows.at_experts.sizes
    ((4, 4), [(2, 2), (2, 2)], (4, 4))
    >>> rows.sorted_at(1).tolist(), rows.counts_at(1).tolist()
    ([0, 1, 2, 3], [0, 0, 1, 3])
    """

    def __init__(self, counts: Integers, owners: Integers) -> None:
        self.counts = counts
        self.owners = owners
        self._sorted: dict[int, Integers] = {}

    @property
    def moved(self) -> int:
        """The number of rows that are sent to another part."""
        parts = np.arange(len(self.counts))
        return int(self.counts[self.owners != parts[:, None]].sum())

    @cached_property
    def _exchanged(self) -> Integers:
        """The number of rows from each part to each other, `[from, to]`."""
        exchanged = np.zeros((len(self.counts),) * 2, np.int64)
        parts = np.repeat(np.arange(len(self.counts)), self.counts.shape[1])
        np.add.at(exchanged, (parts, self.owners.ravel()), self.counts.ravel())
        return exchanged

    @property
    def own(self) -> Sizes:
        """The sharding of rows at their tokens."""
        return Sizes(tuple(self._exchanged.sum(1).tolist()))

    @property
    def sent(self) -> Joined:
        """The sharding of the same rows at their experts."""
        some = [tuple(row) for row in self._exchanged.tolist() if sum(row)]
        return Joined(tuple(map(sum, some)), tuple(map(Sizes, some)))

    @property
    def at_experts(self) -> Sizes:
        """The sharding of rows that are sorted at their experts."""
        return Sizes(tuple(self._exchanged.sum(0).tolist()))

    def order_to_send(self, part: int, experts: Integers, capacity: Integers | None) -> Integers:
        """Return which rows a part sends, in order.

        Args:
            part: of the tokens.
            experts: the experts of its rows.
            capacity: the maximum number of rows that each expert accepts from this part, the first
                rows; all when None.
        """
        # The positions of experts in an order by owner, then by expert.
        place = np.argsort(np.argsort(self.owners[part], kind="stable"), kind="stable")
        order = np.argsort(place[experts], kind="stable")
        if capacity is None:
            return order
        of_sorted = experts[order]
        # Among rows of the same expert, how many come before.
        changes = np.flatnonzero(np.diff(of_sorted, prepend=-1))
        lengths = np.diff(np.append(changes, len(of_sorted)))
        before = np.arange(len(of_sorted)) - np.repeat(changes, lengths)
        return order[before < capacity[of_sorted]]

    def sorted_at(self, part: int) -> Integers:
        """Return the order that sorts the rows arriving at a part by expert, then by sender."""
        if part not in self._sorted:
            self._sorted[part] = self._sort_at(part)
        return self._sorted[part]

    def _sort_at(self, part: int) -> Integers:
        senders, experts = np.nonzero(self.owners == part)
        order = np.argsort(self.owners, axis=1, kind="stable")
        places = np.argsort(order, axis=1, kind="stable")
        # As they arrive: by sender, and as the sender had them.
        arriving = np.lexsort((places[senders, experts], senders))
        senders, experts = senders[arriving], experts[arriving]
        lengths = self.counts[senders, experts]
        starts = np.cumsum(lengths) - lengths
        by_expert = np.lexsort((senders, experts))
        pieces = [np.arange(starts[n], starts[n] + lengths[n]) for n in by_expert]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def counts_at(self, part: int) -> Integers:
        """Return how many rows a part has of each expert."""
        counts: Integers = np.where(self.owners == part, self.counts, 0).sum(0)
        return counts


def grouped_product(library: Library, rows: Any, matrices: Any, ends: Integers) -> Any:
    """Multiply rows `[n, d]` by the matrices of their experts, `[experts, d, e]`: `[n, e]`.

    `ends` is where the rows of each expert stop.

    >>> from reshard.spmd.core.backend import library
    >>> rows, matrices = np.ones((3, 2)), np.array([[[1.0], [1.0]], [[5.0], [5.0]]])
    >>> grouped_product(library("numpy"), rows, matrices, np.array([1, 3]))[:, 0].tolist()
    [2.0, 10.0, 10.0]
    """
    kernel = _find_kernel(library, rows, matrices, ends)
    if kernel is not None and _is_dense(matrices):
        # It takes offsets of this type only.
        return kernel(rows.contiguous(), matrices, offs=library.array(ends.astype(np.int32)))
    products = [
        _multiply(library, rows[a:b], matrices[number])
        for number, (a, b) in enumerate(_list_stretches(ends))
        if b > a
    ]
    # If no expert here has rows, the result still has its width and element type.
    empty = library.filled((0, matrices.shape[-1]), 0, rows)
    product = library.namespace.concat([empty, *products], axis=0)
    # All ranks record the same gradients, including ranks without rows.
    return library.linked(library.linked(product, rows), matrices)


def grouped_outer(library: Library, rows: Any, others: Any, ends: Integers) -> Any:
    """Sum for each expert the outer products of rows `[n, d]` and `[n, e]`: `[experts, d, e]`."""
    space = library.namespace
    kernel = _find_kernel(library, rows, others, ends)
    if kernel is not None:
        turned = space.matrix_transpose(rows.contiguous())
        return kernel(turned, others.contiguous(), offs=library.array(ends.astype(np.int32)))
    products = [
        _multiply(library, space.matrix_transpose(rows[a:b]), others[a:b])
        for a, b in _list_stretches(ends)
    ]
    empty = library.filled((0, rows.shape[-1], others.shape[-1]), 0, rows)
    return space.stack(products, axis=0) if products else empty


def _find_kernel(library: Library, rows: Any, others: Any, ends: Integers) -> Any:
    """Return PyTorch's grouped product if it supports the operands, or None."""
    if library.name != "torch" or not len(ends) or not len(rows) or rows.device.type != "cpu":
        return None
    widths_bytes = [array.shape[-1] * array.itemsize for array in (rows, others)]
    if any(width_bytes % _ALIGNED_BYTES for width_bytes in widths_bytes):
        return None
    # Its gradient does not accept broadcast cotangents, such as the cotangent of a sum.
    if records_gradient(rows) or records_gradient(others):
        return None
    if str(rows.dtype).removeprefix("torch.") not in _NARROW:
        return None
    # Not in every version.
    return getattr(import_module("torch").nn.functional, "grouped_mm", None)


def _is_dense(matrices: Any) -> bool:
    """Return whether each matrix is stored row by row, or column by column."""
    return bool(matrices.is_contiguous() or matrices.transpose(-1, -2).is_contiguous())


def _list_stretches(ends: Integers) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)) if len(ends) else []


def _multiply(library: Library, left: Any, right: Any) -> Any:
    """Multiply matrices, in float32 if NumPy has no product of a narrow type."""
    if library.name == "numpy" and left.dtype.kind == "V":
        return (left.astype(np.float32) @ right.astype(np.float32)).astype(left.dtype)
    return library.namespace.matmul(left, right)
