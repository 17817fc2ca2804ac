"""Compiled work: the computation between two movements, as a `torch.compile` function.

    r4 = matmul(r3, r1)             def work(r3, r1, r7):
    r5 = tanh(r4)                       r4 = matmul(r3, r1)
    r6 = add(r5, r7)                    r5 = tanh(r4)
    free r3, r4, r5                     return (add(r5, r7),)

1. Consecutive local steps are joined into a function.
2. It is compiled when it first runs, once for all ranks whose shards have the same shapes.
3. If that fails, it is halved, down to the operators that cannot be compiled: these run without
   compilation, and a warning names them.
4. If it fails because of elements, the steps run separately, so that the error names the operator.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from reshard.errors import UsageError
from reshard.spmd.programs.steps import Action, ProgramStep, Registers, Run
from reshard.spmd.shards.runner import Runner

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def compiler(backend: bool | str, runner: Runner) -> Compile:
    """Return a function that compiles another, by a backend of `torch.compile`.

    Raises UsageError for shards of NumPy, and for an unknown backend.
    """
    if runner.library.name != "torch":
        raise UsageError(
            f"sp.jit(compile={backend!r}) of arrays of {runner!r}; torch.compile takes PyTorch's "
            "shards: make them with sp.running(sp.in_process('torch')), or leave compile away"
        )
    name = backend if isinstance(backend, str) else "inductor"
    # By default the list lacks backends for debugging, such as "eager".
    backends = torch.compiler.list_backends(())
    if name not in backends:
        raise UsageError(f"compile={backend!r} is not a backend; it is True or one of {backends}")

    def compile_whole(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(
            # `fullgraph` raises for operators that cannot be compiled, so that they are found. The
            # shapes of shards do not change within a program.
            function,
            backend=name,
            fullgraph=True,
            dynamic=False,
        )
        return compiled

    return compile_whole


def compiled_runs(
    order: Sequence[Action],
    steps: Sequence[ProgramStep],
    constants: dict[int, Any],
    runs: Sequence[tuple[Run, tuple[int, ...]]],
    compile_whole: Compile,
) -> Iterator[tuple[Run, tuple[int, ...]]]:
    """Yield the steps of a program, with consecutive local computation compiled.

    Args:
        order: what is done of the steps.
        steps: all of them.
        constants: numbers for all ranks, by register.
        runs: what each action does, and the registers that nobody reads after it.
        compile_whole: compiles a function.
    """
    is_work = [
        # Nothing is computed for a mesh without a rank in this process.
        action.kind == "run" and bool(step.functions) and step.transport == "here"
        for action, step in ((action, steps[action.step]) for action in order)
    ]
    number = 0
    while number < len(order):
        end = number
        while end < len(order) and is_work[end]:
            end += 1
        if end < number + 2:
            # A call of a compiled function costs more than a call of an operator.
            yield runs[number]
            number += 1
            continue
        joined = [steps[action.step] for action in order[number:end]]
        frees = {register for action in order[number:end] for register in action.frees}
        produced = {register for step in joined for register in step.makes}
        work = _CompiledWork(joined, produced - frees, constants, compile_whole)
        yield work, tuple(frees)
        number = end


class _CompiledWork:
    """Consecutive steps, which are compiled when they first run.

    Args:
        steps: in their order.
        needed: registers that are read after them.
        constants: numbers for all ranks, by register.
        compile_whole: compiles a function.
    """

    def __init__(
        self,
        steps: Sequence[ProgramStep],
        needed: Collection[int],
        constants: dict[int, Any],
        compile_whole: Compile,
    ) -> None:
        self._steps = steps
        self._constants = constants
        self._compile = compile_whole
        produced = {register for step in steps for register in step.makes}
        reads = (register for step in steps for register in step.reads)
        self._makes = sorted(produced.intersection(needed))
        self._reads = [
            register
            for register in dict.fromkeys(reads)
            if register not in produced | set(constants)
        ]
        self._functions: list[Callable[..., Any]] | None = None
        self._run: Run = self._run_first

    def __call__(self, values: Registers) -> None:
        """Run the steps on registers."""
        self._run(values)

    def _run_first(self, values: Registers) -> None:
        try:
            with warnings.catch_warnings():
                # Warnings of PyTorch's compiler about PyTorch.
                warnings.simplefilter("ignore")
                self._functions = self._make_functions(values)
                self._compute(self._functions, values)
        except Exception as error:
            # Raises where elements are why it failed.
            self._run_steps(values)
            self._give_up(values, error)
        else:
            self._run = self._run_compiled

    def _run_compiled(self, values: Registers) -> None:
        try:
            self._compute(self._functions or (), values)
        except Exception:
            self._run_steps(values)

    def _run_steps(self, values: Registers) -> None:
        for step in self._steps:
            step.run(values)

    def _compute(self, functions: Sequence[Callable[..., Any]], values: Registers) -> None:
        columns = [values[register] for register in self._reads]
        rows = [function(*row) for function, *row in zip(functions, *columns, strict=True)]
        for register, shards in zip(self._makes, zip(*rows, strict=True), strict=True):
            values[register] = shards

    def _give_up(self, values: Registers, error: Exception) -> None:
        """Split it into halves; a single step runs without compilation."""
        if len(self._steps) == 1:
            (step,) = self._steps
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            warnings.warn(
                f"sp.jit(compile=...): {step.name} runs without being compiled: {reason}",
                UserWarning,
                stacklevel=2,
            )
            self._run = step.run
            return
        middle = len(self._steps) // 2
        first, second = self._steps[:middle], self._steps[middle:]
        between = {register for step in second for register in step.reads}
        halves = [
            _CompiledWork(first, between.union(self._makes), self._constants, self._compile),
            _CompiledWork(second, self._makes, self._constants, self._compile),
        ]

        def run(values: Registers) -> None:
            for half in halves:
                half(values)

        run(values)
        self._run = run

    def _make_functions(self, values: Registers) -> list[Callable[..., Any]]:
        """Return the function of each local rank; equal functions on equal shapes are shared."""
        compiled: dict[Any, Callable[..., Any]] = {}
        functions = []
        for rank_index in range(len(self._steps[0].functions or ())):
            rank_functions = [(step.functions or ())[rank_index] for step in self._steps]
            shapes = tuple(tuple(values[register][rank_index].shape) for register in self._reads)
            key = (tuple(map(id, rank_functions)), shapes)
            if key not in compiled:
                compiled[key] = self._compile(self._write_function(rank_functions, rank_index))
            functions.append(compiled[key])
        return functions

    def _write_function(self, functions: Sequence[Callable[..., Any]], rank_index: int) -> Any:
        """Write the steps of a rank as a function with a code object of its own."""
        # `torch.compile` limits how often it compiles a code object.
        names: dict[str, Any] = {}
        lines = [f"def work({', '.join(map(_name, self._reads))}):"]
        for number, (step, function) in enumerate(zip(self._steps, functions, strict=True)):
            names[f"f{number}"] = function
            for register in self._constants.keys() & set(step.reads):
                names[_name(register)] = self._constants[register][rank_index]
            results = ", ".join(map(_name, step.makes))
            if not step.is_single:
                results += ","
            lines.append(f"    {results} = f{number}({', '.join(map(_name, step.reads))})")
        lines.append(f"    return ({''.join(_name(register) + ', ' for register in self._makes)})")
        exec("\n".join(lines), names)
        return names["work"]


def _name(register: int) -> str:
    return f"r{register}"
