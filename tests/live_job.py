"""All ranks of a job, forked from one process that has imported torch already.

Arguments: a folder for what the ranks write, the number of ranks, a script, and its arguments.
Each rank runs the script as `__main__`. The exit codes are written into the folder.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path


def become_rank(rank: int, folder: Path, script: str, arguments: list[str]) -> None:
    """Run the script, and end as it ends."""
    file = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = [script, *arguments]
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
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


def main(folder: Path, ranks: int, script: str, *arguments: str) -> None:
    import torch.distributed.tensor  # noqa: F401

    import reshard.torch  # noqa: F401

    sys.path.append(str(Path(__file__).parent))
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            become_rank(rank, folder, script, list(arguments))
        children[child] = rank
    codes = [0] * ranks
    for _ in range(ranks):
        child, status = os.wait()
        codes[children[child]] = os.waitstatus_to_exitcode(status)
    (folder / "codes").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
