"""Records what DeepSpeed saves, for `make test`: `python -m engines.deepspeed.record [NAME ...]`.

Of each run an archive: the checkpoint, `held.json` with what its ranks held, and what DeepSpeed's
own `zero_to_fp32` makes of it (`fp32.json`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from deepspeed_records import GOLDEN
from engines.deepspeed.cases import PARALLEL, SAVED
from engines.deepspeed.parallel_training import save_parallel
from engines.deepspeed.ranks import ENVIRONMENT, run_ranks
from engines.deepspeed.training import Case, digest, train_and_save


def make(case: Case, folder: Path) -> None:
    """Run a case into `folder`, with what `zero_to_fp32` makes of it."""
    run_ranks(
        train_and_save, case.ranks, folder.with_name(f"{folder.name}.log"), case, folder, 2, 1
    )
    for script in folder.glob("zero_to_*.py"):
        script.unlink()
    # It does not know the optimizer for bfloat16 that accumulates in float32.
    if case.stage and "data_types" not in case.config:
        (folder / "fp32.json").write_text(json.dumps(merge(folder), indent=0))


def merge(folder: Path) -> dict[str, list[object]]:
    """Digests of what `zero_to_fp32` makes."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return {
        name: [str(value.dtype), list(value.shape), digest(value)] for name, value in state.items()
    }


def convert_to_universal(folder: Path, target: str) -> None:
    """Run `ds_to_universal` on the save that `latest` names, into the folder `target` beside it."""
    from deepspeed.checkpoint.ds_to_universal import main

    source = folder / (folder / "latest").read_text()
    options = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(folder / target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    main(options)


def pack(folder: Path, target: Path) -> None:
    """Put a folder into an archive, without what is not recorded."""
    target.parent.mkdir(parents=True, exist_ok=True)

    def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.mtime = member.uid = member.gid = 0
        member.uname = member.gname = ""
        return None if member.name.endswith("held.pt") else member

    with tarfile.open(target, "w:xz") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name, filter=keep)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of runs; all without")
    names = parser.parse_args().names
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as name:
        for case in SAVED:
            if names and not any(part in case.name for part in names):
                continue
            folder = Path(name) / case.name
            make(case, folder)
            pack(folder, GOLDEN / f"{case.name}.tar.xz")
            if case.is_made_universal:
                convert_to_universal(folder, "universal")
                tag = (folder / "latest").read_text()
                shutil.rmtree(folder / tag)
                (folder / "latest").unlink()
                pack(folder, GOLDEN / f"{case.name}-universal.tar.xz")
            sys.stderr.write(f"recorded {case.name}\n")
        for parallel in PARALLEL:
            if names and not any(part in parallel.name for part in names):
                continue
            folder = Path(name) / parallel.name
            logs = folder.with_name(f"{folder.name}.log")
            run_ranks(save_parallel, parallel.ranks, logs, parallel, folder, 2)
            for script in folder.glob("zero_to_*.py"):
                script.unlink()
            pack(folder, GOLDEN / f"{parallel.name}.tar.xz")
            sys.stderr.write(f"recorded {parallel.name}\n")


if __name__ == "__main__":
    main()
