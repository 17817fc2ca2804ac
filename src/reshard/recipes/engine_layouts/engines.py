"""Engines whose layouts can be derived, a row each.

An engine has a function that takes a model's folder and the sizes of its parallelism by name, and
returns the layout of all ranks. Its module is loaded when it is used: an engine that is not
installed does not affect the others.

To add an engine: a module with such a function, and a row in `ENGINES`; or `register_engine`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, cast

from reshard._records import Record
from reshard.errors import UsageError
from reshard.mesh import DeviceMesh
from reshard.recipes.engine_layouts.engine_layout import EngineLayout

DeriveFunction = Callable[..., EngineLayout]
Sources = Mapping[str, tuple[str, tuple[int, ...]]]


class Engine(Record):
    """An engine, and the function that derives its layouts.

    Attributes:
        name: for `--engine` and `--against`.
        description: in a few words.
        function: derives a layout; or `module:function`, which is imported when used.
    """

    name: str
    description: str
    function: DeriveFunction | str

    def derive(
        self,
        model: str | os.PathLike[str],
        sizes: Mapping[str, int],
        dtype: str | None = None,
        sources: Sources | None = None,
    ) -> EngineLayout:
        """Derive the layout of all ranks.

        Args:
            model: a folder with config.json and the checkpoint, whose headers are read.
            sizes: of the parallelism, by name: `{"tp": 8}`.
            dtype: the type of the engine's parameters; the engine chooses if None.
            sources: the tensors instead of those of the folder: type and shape by name.

        Raises:
            UsageError: sizes that the engine lacks; a type or sources that it does not take.
            ReshardError: the engine cannot derive it.
        """
        function = self._load()
        # Sizes are the parameters that are 1 by default; other parameters are options.
        axes = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            # True equals 1 in Python, so the type is compared as well.
            if parameter.default == 1 and type(parameter.default) is int
        ]
        for axis in sizes:
            if axis not in axes:
                raise UsageError(
                    f"the axis {axis!r} of a layout of {self.name}; it has {', '.join(axes)}"
                )
        arguments: dict[str, Any] = {"dtype": dtype, "sources": sources}
        options = {option: value for option, value in arguments.items() if value is not None}
        for option, value in options.items():
            if option not in inspect.signature(function).parameters:
                text = "other tensors than those of the folder"
                text = text if option == "sources" else f"{option} {value!r}"
                raise UsageError(f"{text} for a layout of {self.name}, which takes none")
        return function(model, **sizes, **options)

    def _load(self) -> DeriveFunction:
        if not isinstance(self.function, str):
            return self.function
        module, _, name = self.function.partition(":")
        return cast("DeriveFunction", getattr(import_module(module), name))


ENGINES: dict[str, Engine] = {}


def register_engine(name: str, description: str, function: DeriveFunction | str) -> None:
    """Add or replace an engine.

    Args:
        name: for `reshard recipe derive --engine NAME`.
        description: in a few words.
        function: takes a model's folder, and sizes by name that are 1 by default; or
            `module:function`.

    Raises:
        UsageError: an invalid name or function.

    >>> def whole(model, tp: int = 1):
    ...     raise NotImplementedError
    >>> register_engine("mine", "an engine of my own", whole)
    >>> "mine" in ENGINES
    True
    >>> del ENGINES["mine"]
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise UsageError(f"an engine called {name!r}; give a word, such as 'vllm'")
    if not callable(function) and not (isinstance(function, str) and ":" in function):
        raise UsageError(f"{function!r} for {name!r}; give a function, or 'module:function'")
    ENGINES[name] = Engine(name, description, function)


def derive_layout(
    engine: str,
    model: str | os.PathLike[str],
    sizes: Mapping[str, int] | DeviceMesh | str,
    *,
    dtype: str | None = None,
    sources: Sources | None = None,
) -> EngineLayout:
    """Return the layout of a model on every rank of an engine, derived from the engine itself.

    Args:
        engine: a name in `ENGINES`.
        model: a folder with config.json and the checkpoint.
        sizes: of its parallelism: `{"tp": 8}`, `"tp=8,ep=8"` or a mesh.
        dtype: the type of its parameters, such as `"float32"`; the engine chooses if None.
        sources: the tensors instead of those of the folder: type and shape by name.

    Raises:
        UsageError: an unknown engine, or sizes, a type or sources that it does not take.
        ReshardError: the engine cannot derive it.
    """
    if engine not in ENGINES:
        raise UsageError(
            f"no engine {engine!r} is known; it is one of {', '.join(ENGINES) or 'none'}"
        )
    mesh: Any = DeviceMesh.parse(sizes) if isinstance(sizes, str) else sizes
    if isinstance(mesh, DeviceMesh):
        mesh = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    return ENGINES[engine].derive(model, mesh, dtype, sources)


register_engine("vllm", "vLLM, by its own load_weights", "reshard.torch.vllm.layouts:layouts")
register_engine(
    "transformers", "transformers' own plans and loading", "reshard.torch.transformers:layouts"
)
