"""Records what DeepSpeed and FSDP2 save of one model: `python -m engines.training.record`.

Of each run the checkpoint after some steps, and its float32 weights then and after its own next
step. `make test` converts each into the other's, and takes that step.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from deepspeed_records import STEPS_OF_BOTH
from engines.deepspeed import ranks as jobs
from engines.deepspeed.record import pack
from engines.training.test_deepspeed import train, train_fsdp2


def main() -> None:
    os.environ.update(jobs.ENVIRONMENT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "runs"
        folder.mkdir()
        for stage in (1, 2, 3):
            log = Path(name) / f"zero{stage}.log"
            jobs.run_ranks(train, 2, log, stage, "fp32", "adamw", str(folder / f"zero{stage}"))
        jobs.run_ranks(train_fsdp2, 2, Path(name) / "log", "adamw", str(folder / "fsdp2"))
        for script in folder.rglob("zero_to_*.py"):
            script.unlink()
        pack(folder, STEPS_OF_BOTH)


if __name__ == "__main__":
    main()
