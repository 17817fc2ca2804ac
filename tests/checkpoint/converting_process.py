"""One process of a conversion, with small blocks; killed after its n-th record if told so.

Arguments: source, target, format of the target; the process to be killed, and the record.
With `HOSTS` in the environment the processes are on as many hosts, by the names that they find.
"""

import json
import os
import signal
import socket
import sys

from reshard.checkpoint import plan_conversion, run_conversion
from reshard.checkpoint.blocks import grid as blocks
from reshard.checkpoint.conversion import run as conversion_run
from reshard.checkpoint.processes import running_processes
from reshard.checkpoint.storage import uploads
from reshard.errors import ReshardError

RULES = ["s=...", "*=tp, ..."]


def main(source: str, target: str, form: str, rank: int = -1, at: int = -1) -> int:
    blocks.BLOCK_BYTES = 4096
    uploads.MIN_PART_BYTES = 4 * 4096
    hosts = int(os.environ.get("HOSTS", "1"))
    if hosts > 1:
        host = int(os.environ["RANK"]) * hosts // int(os.environ["WORLD_SIZE"])
        socket.gethostname = lambda: f"host{host}"
    record = conversion_run._ConversionRun._record
    recorded = 0

    def counted(self: object, done: object) -> None:
        nonlocal recorded
        record(self, done)
        recorded += 1
        if recorded == at:
            os.kill(os.getpid(), signal.SIGKILL)

    if os.environ.get("RANK") == str(rank):
        conversion_run._ConversionRun._record = counted
    try:
        with running_processes(timeout_s=5) as processes:
            conversion = plan_conversion(
                source,
                target,
                format=form,
                **({"to": "full"} if form == "torch-pickle" else {"to": "tp=3", "rules": RULES}),
            )
            report = run_conversion(conversion, processes=processes, sync_bytes=16 * 4096)
    except ReshardError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        return 3
    done_so_far = {
        "by_process": report.by_process,
        "buffers": report.buffers_by_process,
        "resumed": report.resumed_bytes,
    }
    sys.stdout.write(json.dumps(done_so_far) + "\n")
    return 0


if __name__ == "__main__":
    source, target, form, *kill = sys.argv[1:]
    code = main(source, target, form, *map(int, kill))
    sys.stdout.flush()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(code)
