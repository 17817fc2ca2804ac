"""Jobs of several ranks, forked from one process that has imported already what ranks import.

Each line of the input is an order: a folder for what the ranks write, the number of ranks, a
script, its arguments and the environment. The job is a process of its own session, whose number
is the first answer; its ranks are forks of it that run the script as `__main__`, and their exit
codes are written into the folder. How the job itself ended is the second answer, and the
milliseconds of processor time that it and its ranks took the third.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from skipped_syncs import skip_syncs

TESTS = Path(__file__).parent
IMPORTED_WHEN_USED = (
    "numpy.ma",
    "numpy.testing",
    "safetensors.torch",
    "torch._dynamo.testing",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
    "torch.distributed.tensor.experimental._attention",
)
"""Modules that functions of torch, NumPy and safetensors import when ranks call them."""
OF_EACH_RANK = {"link_ends"}
"""Modules that read the number of their rank when they are imported."""


def become_rank(rank: int, folder: Path, run: Callable[[], object]) -> None:
    """Run a rank, whose output goes into the folder, and end as it ends."""
    file = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # Whoever forked it may have others.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    code = 1
    try:
        run()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        sys.stderr.write(f"{ended.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Now and then torch 2.13 aborts while the interpreter takes its threads down.
        os._exit(code)


def run_job(folder: Path, ranks: int, script: str, arguments: list[str]) -> None:
    """Fork the ranks, wait for them and write down how they ended."""
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            sys.argv = [script, *arguments]
            become_rank(rank, folder, functools.partial(run_script, script))
        children[child] = rank
    codes = [0] * ranks
    for _ in range(ranks):
        child, status = os.wait()
        codes[children[child]] = os.waitstatus_to_exitcode(status)
    (folder / "codes").write_text(json.dumps(codes))


def run_script(script: str) -> None:
    """Run a script as `__main__`, as `runpy.run_path` does."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = script
    exec(compile_script(script), main.__dict__)


@functools.cache
def compile_script(script: str) -> CodeType:
    """Compile a script and import the modules of `tests` that it names, once for all its ranks."""
    tree = ast.parse(Path(script).read_bytes(), script)
    for node in tree.body:
        for name in names_imported_by(node):
            path = (TESTS / name.replace(".", "/")).with_suffix(".py")
            if path.exists() and name not in OF_EACH_RANK:
                # Ranks raise what is wrong with a module, where it is seen.
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
    gc.freeze()
    return compile(tree, script, "exec")


def names_imported_by(node: ast.stmt) -> list[str]:
    """Return the modules that a statement may import."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def become_job(order: dict[str, Any]) -> None:
    """Run an order in a session of its own, so that the job and its ranks can be ended together."""
    code = 1
    try:
        os.setsid()
        folder = Path(order["folder"])
        written = os.open(folder / "job", os.O_WRONLY | os.O_CREAT)
        nothing = os.open(os.devnull, os.O_RDWR)
        for place, file in enumerate((nothing, nothing, written)):
            os.dup2(file, place)
        os.environ.clear()
        os.environ |= order["environment"]
        run_job(folder, order["ranks"], order["script"], order["arguments"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def load_s3_client() -> None:
    """Load the modules and the service model of a client of S3, half a second of each process."""
    import boto3.session
    import obstore.store  # noqa: F401

    from reshard.checkpoint.storage import s3

    boto3.session.Session(region_name="us-east-1")
    s3._share_loader(None).load_service_model("s3", "service-2")


def main() -> None:
    import array_api_compat.torch  # noqa: F401
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch._dynamo

    import reshard
    from reshard._contexts import pause_gc

    torch._dynamo.list_backends()  # Imports what compiled functions need.
    modules = [module.name for module in pkgutil.walk_packages(reshard.__path__, "reshard.")]
    for name in [*IMPORTED_WHEN_USED, *modules]:
        # A module of an extra that is not installed here, or of another version of torch.
        with contextlib.suppress(ImportError):
            if not name.endswith("__main__"):
                importlib.import_module(name)

    with contextlib.suppress(ImportError):
        load_s3_client()
    sys.path.append(str(TESTS))
    skip_syncs()
    # Collections in the ranks pass over what is here, and leave its pages shared.
    gc.freeze()
    # Counts what is frozen once here, and not in each of the ranks.
    with pause_gc(freeze=True):
        pass
    for line in sys.stdin:
        order = json.loads(line)
        compile_script(order["script"])
        job = os.fork()
        if job == 0:
            become_job(order)
        answer(job)
        _, status, used = os.wait4(job, 0)
        answer(os.waitstatus_to_exitcode(status))
        answer(round(1000 * (used.ru_utime + used.ru_stime)))


if __name__ == "__main__":
    main()
