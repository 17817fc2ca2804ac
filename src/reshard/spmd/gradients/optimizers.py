"""Optimizers: SGD and AdamW, whose states are sharded arrays like the parameters.

The sharding of a state determines which rank stores which part of it:

                parameters            gradients             states
    replicas    -, -                  all-reduced           -, -
    ZeRO 1      -, -                  all-reduced           dp, -
    ZeRO 2      -, -                  reduce-scattered      dp, -
    ZeRO 3      dp, -                 reduce-scattered      dp, -

An update runs in the sharding of the states: gradients are resharded to it, and new parameters are
resharded to that of the parameters. Under ZeRO 1 and 2 the latter is an all-gather. Sources:
Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019; Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.dtypes import dtype as as_dtype
from reshard.errors import SpecError, UsageError
from reshard.mesh import DeviceMesh
from reshard.sharding import DimSpec, ShardingSpec
from reshard.spmd.arrays.argument_tree import leaves, leaves_like, replaced, shardings_like
from reshard.spmd.gradients.tape import ended, is_real_floating
from reshard.spmd.ops.data_types import astype
from reshard.spmd.ops.elementwise import sqrt
from reshard.spmd.ops.filling import zeros_like
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import placed

State = dict[str, Any]
"""A state: `step`, and trees like the parameters by PyTorch's names (`exp_avg`).

`step` is a number, or an array without dimensions, which `sp.jit` does not trace anew at each step.
"""


def specs_over(parameters: Any, mesh: DeviceMesh, axis: str) -> Any:
    """Return the shardings of parameters, each sharded over a further axis of the mesh.

    The axis is added to the first dimension that it divides evenly, after the axes that already
    shard it. A parameter without such a dimension, or that is sharded over the axis already,
    keeps its sharding.

    Args:
        parameters: arrays, and lists, tuples and dictionaries of them.
        mesh: the mesh that the parameters are sharded over.
        axis: an axis of the mesh, such as "dp".

    Raises:
        SpecError: an axis that the mesh does not have, or a parameter over another mesh.

    >>> import reshard.spmd as sp
    >>> from reshard import spec
    >>> mesh = DeviceMesh.of(dp=2, tp=2)
    >>> w = sp.ones((4, 8), spec=spec(mesh, "tp, -"))
    >>> found = specs_over({"w": w, "b": sp.ones((3,))}, mesh, "dp")
    >>> str(found["w"]), str(found["b"])
    ('tp dp, -', '-')
    """
    if not isinstance(mesh, DeviceMesh) or axis not in mesh.axis_names:
        raise SpecError(f"axis {axis!r} of {mesh!r}; give a mesh, and the name of an axis of it")
    size = mesh.shape[mesh.axis_names.index(axis)]

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, ArrayValue):
            return None
        spec = leaf.type.spec
        if spec is not None and spec.mesh is not mesh:
            raise SpecError(
                f"a parameter over {spec.mesh!r}, and the axis {axis!r} of {mesh!r}; give "
                "parameters over the one mesh, or without a sharding"
            )
        dims = [DimSpec()] * leaf.type.ndim if spec is None else list(spec.dim_specs)
        used = {ref.name for dim in dims for ref in dim.axes}
        for index, (dim, length) in enumerate(zip(dims, leaf.type.shape, strict=True)):
            names = [str(ref) for ref in dim.axes]
            parts = size
            for ref in dim.axes:
                parts *= mesh.shape[mesh.axis_names.index(ref.name)]
            # Uneven or strided levels lack equal parts to divide further.
            is_plain = dim == DimSpec(names)
            # Even parts alone: with uneven ones, ranks would hold states of different sizes.
            if axis not in used and is_plain and length % parts == 0 and length:
                dims[index] = DimSpec([*names, axis])
                break
        return ShardingSpec(mesh, dims)

    return replaced(parameters, cut)


class _Optimizer:
    """A base class of optimizers: states like parameters, updates in the states' shardings."""

    @property
    def _slots(self) -> tuple[str, ...]:
        """The names of the state's arrays, each like the parameters."""
        return ()

    def init(self, parameters: Any, specs: Any = None) -> State:
        """Create the state before the first step.

        Args:
            parameters: arrays of real floating-point numbers, and lists, tuples and dictionaries of
                them.
            specs: shardings of the state, in the structure of the parameters (None for that of a
                parameter), or None for those of all parameters; see `specs_over`.

        Raises:
            UsageError: parameters that are not such arrays.
            SpecError: shardings that do not have the structure of the parameters.
        """
        arrays = list(_read_leaves("parameters", parameters))
        requested: list[ShardingSpec | None] = [None] * len(arrays)
        if specs is not None:
            requested = shardings_like(specs, parameters, "specs of states")
        state: State = {"step": 0}
        for slot in self._slots:
            slot_arrays = [
                zeros if zeros is None or spec is None else placed(zeros, spec)
                for zeros, spec in zip(map(_make_zeros, arrays), requested, strict=True)
            ]
            state[slot] = _fill(parameters, slot_arrays)
        if not self._slots:
            # An update without states also runs in the requested shardings, so they are stored.
            state["specs"] = None if specs is None else _fill(parameters, requested)
        return state

    def update(self, parameters: Any, gradients: Any, state: State) -> tuple[Any, State]:
        """Compute the parameters and the state after one step. The arguments are not modified.

        Raises:
            UsageError: gradients, or a state, whose structure or shapes differ from the parameters.
        """
        arrays = list(_read_leaves("parameters", parameters))
        slopes = _read_leaves_like(parameters, "gradients", gradients)
        if not isinstance(state, dict) or {"step", *self._slots} - set(state):
            raise UsageError(
                f"the state of {type(self).__name__} with "
                f"{sorted(state) if isinstance(state, dict) else type(state).__name__}; "
                f"{['step', *self._slots]} were expected: make one by init"
            )
        slots = [_read_leaves_like(parameters, slot, state[slot]) for slot in self._slots]
        step = state["step"]
        if not isinstance(step, float) and not hasattr(step, "__index__"):
            raise UsageError(
                f"the state of {type(self).__name__} with step={step!r}, a {type(step).__name__}; "
                "a whole number was expected, or an array without dimensions"
            )
        step = step + 1
        moved: list[Any] = []
        new_slots: list[list[Any]] = [[] for _ in self._slots]
        where: list[ShardingSpec | None] = [None] * len(arrays)
        if state.get("specs") is not None:
            where = shardings_like(state["specs"], parameters, "specs of the state")
        for number, (parameter, slope) in enumerate(zip(arrays, slopes, strict=True)):
            own_slots = [slot[number] for slot in slots]
            if parameter is None or slope is None:
                updated, after = parameter, own_slots
            else:
                at = own_slots[0].type.spec if own_slots else where[number] or parameter.type.spec
                wide = own_slots[0].type.dtype if own_slots else parameter.type.dtype
                # Moved before they are widened, because the narrower type has fewer bytes.
                here, there = (
                    astype(array.reduced() if at is None else placed(array, at), wide)
                    for array in (parameter, slope)
                )
                updated, after = self._move(here, there, own_slots, step)
                # Narrow parameters are rounded once, after all arithmetic in the state's type.
                updated = astype(updated, parameter.type.dtype)
                updated, *after = (
                    new if old.type.spec is None else ended(new, old.type.spec, old)
                    for new, old in zip((updated, *after), (parameter, *own_slots), strict=True)
                )
            moved.append(updated)
            for new_slot, value in zip(new_slots, after, strict=True):
                new_slot.append(value)
        after_step = {**state, "step": step}
        for name, values in zip(self._slots, new_slots, strict=True):
            after_step[name] = _fill(parameters, values)
        return _fill(parameters, moved), after_step

    def _move(self, x: Any, slope: Any, slots: list[Any], step: Any) -> tuple[Any, list[Any]]:
        raise NotImplementedError


def _read_leaves(what: str, tree: Any) -> Iterator[Any]:
    """Return the arrays of a tree, in order, with None for missing arrays."""
    for path, leaf in leaves(tree):
        is_number = isinstance(leaf, ArrayValue) and is_real_floating(leaf.type.dtype)
        if leaf is not None and not is_number:
            said = str(leaf.type) if isinstance(leaf, ArrayValue) else type(leaf).__name__
            raise UsageError(
                f"{what}{path} of {said}; arrays in shards of real floating numbers were expected"
            )
        yield leaf


def _fill(tree: Any, values: Sequence[Any]) -> Any:
    """Return a tree with its leaves replaced by other values, in order."""
    left = iter(values)
    return replaced(tree, lambda _: next(left))


def _read_leaves_like(parameters: Any, what: str, tree: Any) -> list[Any]:
    """Return the arrays of a tree with the structure, order and shapes of the parameters."""
    arrays = leaves_like(tree, parameters, what)
    # Consumed for its errors: leaves of other kinds.
    list(_read_leaves(what, tree))
    for (path, parameter), array in zip(leaves(parameters), arrays, strict=True):
        kind = None if parameter is None else parameter.type
        if array is not None and (kind is None or array.type.shape != kind.shape):
            raise UsageError(
                f"{what}{path} of {array.type} for a parameter of {kind}; give an array of the "
                "parameter's shape"
            )
    return arrays


def _make_zeros(parameter: Any) -> Any:
    """Return zeros for a state: float32 at least, since narrower types would lose small steps."""
    if parameter is None:
        return None
    is_narrow = parameter.type.dtype.itemsize_bytes < 4
    return zeros_like(parameter, dtype=as_dtype("float32") if is_narrow else None)


def _check_numbers(name: str, **numbers: Any) -> None:
    for what, value in numbers.items():
        if what == "learning_rate" and isinstance(value, ArrayValue):
            if value.type.shape != () or not is_real_floating(value.type.dtype):
                raise UsageError(
                    f"{name} with a learning_rate of {value.type}; one real number was expected, "
                    "an array without dimensions"
                )
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # `not value >= 0` refuses NaN, which `value < 0` would accept.
        if not is_number or not value >= 0:
            raise UsageError(f"{name} with {what}={value!r}; a number of 0 or more was expected")


@dataclass(frozen=True)
class SGD(_Optimizer):
    """Stochastic gradient descent with optional momentum, as PyTorch's `SGD`.

    Args:
        learning_rate: a number, or a zero-dimensional array, whose changes do not cause a program
            to be traced again.
        momentum: the momentum factor; the state is `momentum_buffer`. No state when 0.
        weight_decay: the factor of the parameter that is added to its gradient.

    Raises:
        UsageError: a negative number, or not a number.

    >>> import reshard.spmd as sp
    >>> sgd, w = SGD(0.5), sp.array([1.0, 2.0])
    >>> w, state = sgd.update(w, sp.array([1.0, -1.0]), sgd.init(w))
    >>> w.to_dense().tolist(), state["step"]
    ([0.5, 2.5], 1)
    """

    learning_rate: float | ArrayValue
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(
            "SGD",
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )

    @property
    def _slots(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def _move(self, x: Any, slope: Any, slots: list[Any], step: Any) -> tuple[Any, list[Any]]:
        if self.weight_decay:
            slope = slope + x * self.weight_decay
        if slots:
            slope = slots[0] * self.momentum + slope
        return x - slope * _rate_like(self.learning_rate, x), [slope] if slots else []


@dataclass(frozen=True)
class AdamW(_Optimizer):
    """Adam with decoupled weight decay, as PyTorch's `AdamW`.

    The state has `exp_avg` and `exp_avg_sq`, running averages of the gradient and of its square.

    Args:
        learning_rate: a number, or a zero-dimensional array, as for `SGD`.
        betas: the decay rates of the two averages.
        epsilon: added to the square root of the second average.
        weight_decay: the weight decay coefficient, multiplied by the learning rate.

    Raises:
        UsageError: a negative number, or not a number; betas that are not a pair of numbers below
            1.

    >>> import reshard.spmd as sp
    >>> adam, w = AdamW(0.5, weight_decay=0.0), sp.array([1.0, 2.0])
    >>> w, state = adam.update(w, sp.array([1.0, -1.0]), adam.init(w))
    >>> [round(x, 6) for x in w.to_dense().tolist()], sorted(state)
    ([0.5, 2.5], ['exp_avg', 'exp_avg_sq', 'step'])
    """

    learning_rate: float | ArrayValue = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        _check_numbers(
            "AdamW",
            learning_rate=self.learning_rate,
            epsilon=self.epsilon,
            weight_decay=self.weight_decay,
        )
        is_pair = isinstance(self.betas, tuple) and len(self.betas) == 2
        if not is_pair or not all(isinstance(b, int | float) and 0 <= b < 1 for b in self.betas):
            raise UsageError(
                f"AdamW with betas={self.betas!r}; a pair of numbers of 0 or more, below 1, was "
                "expected"
            )

    @property
    def _slots(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _move(self, x: Any, slope: Any, slots: list[Any], step: Any) -> tuple[Any, list[Any]]:
        first, second = self.betas
        mean, square = slots
        mean = mean * first + slope * (1 - first)
        square = square * second + (slope * slope) * (1 - second)
        rate = _rate_like(self.learning_rate, mean)
        # PyTorch decays the old parameter, before the step.
        decayed = x * (1 - rate * self.weight_decay) if self.weight_decay else x
        # Averages start at 0, so they are divided by the total weight of the gradients in them.
        root = sqrt(square) * _over_rest(1.0, second, step, 0.5, square) + self.epsilon
        moved = decayed - (mean / root) * _over_rest(rate, first, step, 1.0, mean)
        return moved, [mean, square]


def _rate_like(rate: Any, x: Any) -> Any:
    """Return a learning rate; a rate in an array is cast to the type of another array."""
    return astype(rate, x.type.dtype) if isinstance(rate, ArrayValue) else rate


def _over_rest(number: Any, beta: float, step: Any, power: float, like: Any) -> Any:
    """Return `number / (1 - beta**step) ** power`; a step in an array is cast to another's type."""
    if not isinstance(step, ArrayValue):
        return number / (1 - beta**step) ** power
    # In float64, since `1 - beta**step` cancels: of 0.999 and the first step float32 keeps few
    # digits.
    return astype(number / (1.0 - beta ** astype(step, "float64")) ** power, like.type.dtype)
