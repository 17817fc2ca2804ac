"""Records models that programs saved: `PYTHONPATH=src:tests python -m engines.pretrained.record`.

Each program runs in its environment under `.engines`; transformers' own model, which DeepSpeed
trains, comes from that of transformers. RESHARD_ENGINES names another folder of environments.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from engines.pretrained.small_llama import write_record
from live_processes import TESTS, run_rank_programs

ENGINES = Path(os.environ.get("RESHARD_ENGINES", TESTS.parent / ".engines"))


@dataclass(frozen=True)
class Run:
    """One run: a program of this folder, in an environment, by so many ranks."""

    engine: str
    script: str
    ranks: int
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def make(self, folder: Path) -> None:
        """Run it, for `folder`."""
        folder.mkdir(parents=True)
        found = next((ENGINES / "transformers" / "lib").glob("python3*/site-packages"))
        paths = [TESTS.parent / "src", TESTS, *([found] if self.engine == "deepspeed" else [])]
        program = [ENGINES / self.engine / "bin" / "python", Path(__file__).with_name(self.script)]
        run_rank_programs(
            [*program, *self.before, folder, *self.after],
            self.ranks,
            {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        )


RUNS = {
    "fsdp2": Run("transformers", "torch_ranks.py", 2, ("fsdp2",)),
    "zero-1-bf16": Run("deepspeed", "torch_ranks.py", 2, ("zero-1-bf16",)),
    "zero-2-fp32-tied": Run("deepspeed", "torch_ranks.py", 2, ("zero-2-fp32-tied",)),
    "zero-3-bf16": Run("deepspeed", "torch_ranks.py", 2, ("zero-3-bf16",)),
    "megatron-tp": Run("megatron", "megatron_rank.py", 2, (), ('{"tp": 2}', "untied")),
    "megatron-pp": Run("megatron", "megatron_rank.py", 2, (), ('{"pp": 2}', "tied")),
    "torch-bin": Run("transformers", "torch_ranks.py", 1, ("bin",)),
    "torch-pt": Run("transformers", "torch_ranks.py", 1, ("pt-tied",)),
}


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for name, run in RUNS.items():
            if not names or name in names or (name == "fsdp2" and "orbax" in names):
                run.make(Path(scratch) / name)
                write_record(name, Path(scratch) / name)
        if not names or "orbax" in names:
            # It saves a model that another program trained.
            before = (str(Path(scratch) / "fsdp2"),)
            Run("orbax", "orbax_saving.py", 1, before).make(Path(scratch) / "orbax")
            write_record("orbax", Path(scratch) / "orbax")


if __name__ == "__main__":
    main(sys.argv[1:])
