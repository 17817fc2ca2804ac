"""Transforms: gradients of functions of sharded arrays, as functions.

    loss, gradients = sp.value_and_grad(f)(parameters, batch)

The function is executed once, its operations are recorded (`tape.py`), and the backward pass runs
through them. Every gradient has the sharding of its parameter, so a parameter that is sharded over
data parallel ranks gets its gradient by a reduce-scatter. The transforms execute ordinary
operations: they run over processes, and can be traced and differentiated again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from reshard.errors import UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.arrays.argument_tree import leaves, leaves_like, replaced, shardings_like
from reshard.spmd.arrays.sharded_array import array
from reshard.spmd.core.array_type import without_partial
from reshard.spmd.core.backend import library_of
from reshard.spmd.gradients.tape import Cotangents, Tape, ended, is_real_floating
from reshard.spmd.ops.filling import ones_like, zeros_like
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.error_translation import check_function
from reshard.spmd.shards.operation_call import call, recording

Function = Callable[..., Any]
Places = int | Sequence[int]


def vjp(function: Function, *primals: Any, has_aux: bool = False) -> Any:
    """Return the value of a function and its pullback, which maps cotangents to the arguments.

    Args:
        function: a function of arrays, and of lists, tuples and dictionaries of them, which returns
            such values.
        primals: its arguments, which consist of real floating-point numbers.
        has_aux: whether the function returns a pair of the value and auxiliary output.

    Returns:
        The value and the pullback; with `has_aux` also the auxiliary output. The pullback takes
        cotangents with the structure of the value (None for zeros), and returns a tuple of one per
        argument.

    Raises:
        UsageError: arguments of other element types, or an operator without a derivative.

    >>> import reshard.spmd as sp
    >>> value, pullback = sp.vjp(lambda x: x * x, sp.array([1.0, 2.0]))
    >>> pullback(sp.array([1.0, 10.0]))[0].to_dense().tolist()
    [2.0, 40.0]
    """
    check_function("vjp", function, "sp.vjp(f), then its arguments")
    value, aux, pullback = _run(function, primals, has_aux, "vjp")
    return (value, pullback, aux) if has_aux else (value, pullback)


def value_and_grad(
    function: Function,
    argnums: Places = 0,
    has_aux: bool = False,
    *,
    specs: Any = None,
) -> Function:
    """Return a function that computes the value and the gradient of a function.

    Args:
        function: a function that returns one real number, as a zero-dimensional array.
        argnums: the positions of the arguments to differentiate with respect to: one, or several.
        has_aux: whether the function returns a pair of the number and auxiliary output.
        specs: shardings for the gradients, in the structure of the parameters, if they differ from
            those of the parameters: sharded over data parallel ranks, for instance.

    Returns:
        A function of the same arguments. It returns the value and the gradients. The gradients have
        the tree structure of the argument, or are a tuple for several arguments. With `has_aux` the
        value is the pair.

    Raises, when it is called:
        UsageError: an argument that does not consist of real floating-point numbers, a value that
            is not one such number, or an operator without a derivative.

    >>> import reshard.spmd as sp
    >>> loss, slope = sp.value_and_grad(lambda w: sp.sum(w * w))(sp.array([1.0, 3.0]))
    >>> float(loss), slope.to_dense().tolist()
    (10.0, [2.0, 6.0])
    """
    check_function("value_and_grad", function, "sp.value_and_grad(f), then its arguments")

    @functools.wraps(function)
    def differentiated(*arguments: Any, **options: Any) -> Any:
        places = _read_places(argnums, len(arguments))

        def of_chosen(*chosen: Any) -> Any:
            inputs = list(arguments)
            for place, argument in zip(places, chosen, strict=True):
                inputs[place] = argument
            return function(*inputs, **options)

        chosen = [arguments[place] for place in places]
        value, aux, pullback = _run(of_chosen, chosen, has_aux, "grad")
        _check_value(value)
        gradient_specs = (specs,) if isinstance(argnums, int) and specs is not None else specs
        cotangents = pullback(ones_like(value), specs=gradient_specs)
        gradients = cotangents[0] if isinstance(argnums, int) else cotangents
        return ((value, aux) if has_aux else value), gradients

    return differentiated


def grad(
    function: Function,
    argnums: Places = 0,
    has_aux: bool = False,
    *,
    specs: Any = None,
) -> Function:
    """Return a function that computes the gradient of a function. See `value_and_grad`.

    With `has_aux` it returns the gradient and the auxiliary output of the function.

    >>> import reshard.spmd as sp
    >>> from reshard import DeviceMesh, spec
    >>> w = sp.array([[1.0, 2.0]] * 4, spec(DeviceMesh.of(x=2), "x, -"))
    >>> slope = sp.grad(lambda w: sp.sum(w**3))(w)
    >>> slope.type, slope.to_dense()[0].tolist()
    (ArrayType(float64[4, 2], 'x, -'), [3.0, 12.0])
    """
    check_function("grad", function, "sp.grad(f), then its arguments")
    both = value_and_grad(function, argnums, has_aux, specs=specs)

    @functools.wraps(function)
    def differentiated(*arguments: Any, **options: Any) -> Any:
        value, gradients = both(*arguments, **options)
        return (gradients, value[1]) if has_aux else gradients

    return differentiated


def vjp_in_two(
    function: Function, parameters: Any, inputs: Any, specs: Any = None
) -> tuple[Any, Callable[[Any], tuple[Any, Callable[[], Any]]]]:
    """Return a function's value, and a pullback that computes inputs' cotangents first.

    Args:
        function: of parameters and inputs.
        parameters, inputs: trees of arrays of real floating numbers; None as inputs for a function
            of parameters alone.
        specs: shardings for the cotangents of parameters, in their places; their own when None.

    Returns:
        The value and the pullback. The pullback takes the value's cotangents, and returns the
        inputs' cotangents and a function that returns the parameters' cotangents.

    Raises UsageError as `vjp`.

    >>> import reshard.spmd as sp
    >>> value, pullback = vjp_in_two(lambda w, x: w * x, sp.array([3.0]), sp.array([5.0]))
    >>> slope, rest = pullback(sp.array([1.0]))
    >>> slope.to_dense().tolist(), rest().to_dense().tolist()
    ([3.0], [5.0])
    """
    tape, watched = _watch([parameters, inputs], "vjp")
    towards = [leaf for _, leaf in leaves(watched[1]) if leaf is not None]
    with recording(tape):
        value = function(watched[0]) if inputs is None else function(*watched)

    def pullback(cotangents: Any) -> tuple[Any, Callable[[], Any]]:
        accumulated, pull_rest = tape.pulled_back_in_two(_pair(value, cotangents), towards)

        def parameters_too() -> Any:
            pull_rest()
            return _end_all(watched[0], accumulated, specs)

        return _end_all(watched[1], accumulated, None), parameters_too

    return value, pullback


def _read_places(argnums: Places, count: int) -> tuple[int, ...]:
    numbers = tuple(argnums) if isinstance(argnums, list | tuple) else (argnums,)
    # The type itself, since True is an int, too.
    wrong = [n for n in numbers if type(n) is not int or not -count <= n < count]
    if wrong or len({n % count for n in numbers}) != len(numbers):
        raise UsageError(
            f"argnums={argnums!r} of a function that was called with {count} arguments by place; "
            f"give different whole numbers of 0 to {count - 1}"
        )
    return tuple(n % count for n in numbers)


def _check_value(value: Any) -> None:
    kind = value.type if isinstance(value, ArrayValue) else None
    if kind is None or kind.shape != () or not is_real_floating(kind.dtype):
        said = f"a {type(value).__name__}" if kind is None else str(kind)
        raise UsageError(
            f"the gradient of a function that returned {said}; one real number was expected, an "
            "array without dimensions: take sp.sum or sp.mean of it, give has_aux=True where it "
            "returns a pair, or use sp.vjp"
        )


def as_parameter(leaf: Any, asked: str) -> Any:
    """Return a leaf of arguments as an array to differentiate with respect to; None for None.

    Raises UsageError if it is not an array of real floating numbers.
    """
    if leaf is None:
        return None
    is_array = isinstance(leaf, ArrayValue) or library_of(leaf) is not None
    if not is_array and not isinstance(leaf, float):
        raise UsageError(
            f"sp.{asked} by {leaf!r}, a {type(leaf).__name__}; arrays of real floating numbers "
            "were expected: leave it out of the arguments that argnums names"
        )
    parameter = leaf if isinstance(leaf, ArrayValue) else array(leaf)
    if not is_real_floating(parameter.type.dtype):
        raise UsageError(
            f"sp.{asked} by an array of {parameter.type}; real floating numbers were expected: "
            "cast it with sp.astype, or leave it out of the arguments that argnums names"
        )
    # A new object with the same numbers: an array that is passed twice, or that the function also
    # has from elsewhere, is a different array there.
    return call("identity", (parameter,))


def _watch(tree: Any, asked: str) -> tuple[Tape, Any]:
    """Return a tape that watches the arrays of a tree, and the tree with these arrays."""
    tape = Tape()
    watched = replaced(tree, lambda leaf: as_parameter(leaf, asked))
    for _, leaf in leaves(watched):
        if leaf is not None:
            tape.watch(leaf)
    return tape, watched


def _run(
    function: Function, primals: Sequence[Any], has_aux: bool, asked: str
) -> tuple[Any, Any, Function]:
    """Return a function's value, its auxiliary output, and its pullback."""
    tape, watched = _watch(list(primals), asked)
    with recording(tape):
        value = function(*watched)
    aux = None
    if has_aux:
        if not isinstance(value, tuple) or len(value) != 2:
            raise UsageError(
                f"has_aux=True, but the function returned a {type(value).__name__}; a pair of its "
                "value and what is passed on was expected"
            )
        value, aux = value

    def pullback(cotangents: Any, *, specs: Any = None) -> tuple[Any, ...]:
        return tuple(_end_all(watched, tape.pulled_back(_pair(value, cotangents)), specs))

    return value, aux, pullback


def _pair(value: Any, cotangents: Any) -> list[tuple[Any, Any]]:
    """Return the arrays of a value with their cotangents. Raises UsageError if they do not fit."""
    flat_cotangents = leaves_like(cotangents, value, "cotangents")
    pairs = []
    for (path, output), cotangent in zip(leaves(value), flat_cotangents, strict=True):
        if cotangent is None:
            continue
        if not isinstance(output, ArrayValue):
            raise UsageError(
                f"a cotangent for {output!r}, a {type(output).__name__} that the function "
                "returned; give None for what is no array"
            )
        g = cotangent if isinstance(cotangent, ArrayValue) else array(cotangent)
        if (g.type.shape, g.type.dtype) != (output.type.shape, output.type.dtype):
            raise UsageError(
                f"a cotangent of {g.type} for the value{path} of {output.type}; it has the "
                "value's shape and element type"
            )
        pairs.append((output, g))
    return pairs


def _end_all(parameters: Any, cotangents: Cotangents, specs: Any) -> Any:
    """Return the gradients of a tree of parameters, in their own or in requested shardings."""
    requested: Iterator[ShardingSpec | None] = itertools.repeat(None)
    if specs is not None:
        requested = iter(shardings_like(specs, parameters, "specs of gradients"))

    def end(parameter: Any) -> Any:
        spec = next(requested)
        if parameter is None:
            return None
        cotangent, own_spec = cotangents.of(parameter), parameter.type.spec
        if cotangent is None:
            cotangent = zeros_like(parameter)
        if spec is not None:
            return ended(cotangent, spec)
        if own_spec is None:
            return cotangent.reduced()
        return ended(cotangent, without_partial(own_spec), parameter)

    return replaced(parameters, end)
