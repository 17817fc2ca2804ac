"""The main job on real weights: recut a checkpoint twice, put it together, prove it is the same.

`make demo` runs this on all-MiniLM-L6-v2. By hand: `python examples/demo.py MODEL WORK`, where
MODEL is a folder with a BERT checkpoint in safetensors and WORK is a folder to write into.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open

import reshard
from reshard.show import bytes_text, change_picture

PICTURED = "embeddings.word_embeddings.weight"


def heading(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def run(*arguments: str) -> None:
    """Run a reshard command as a user would type it, and show it."""
    print(f"$ reshard {shlex.join(arguments)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "reshard", *arguments], check=False).returncode
    if code:
        raise SystemExit(code)


def show_cut(before: Path, after: Path) -> None:
    """A picture of one tensor, as it was cut and as it is."""
    old, new = (reshard.checkpoint.open(path)[PICTURED] for path in (before, after))
    print(f"\n{PICTURED}, {' x '.join(map(str, new.shape))} {new.dtype.name}:\n")
    titles = (old.spec or "whole", new.spec or "whole")
    plan = reshard.plan(old.layout, new.layout, dtype=new.dtype)
    print(change_picture(old.layout, new.layout, titles=titles, plan=plan), flush=True)


def prove_equal(original: Path, result: Path) -> None:
    """Compare every tensor by the safetensors package, which knows nothing of reshard."""
    with (
        safe_open(original / "model.safetensors", "numpy") as before,
        safe_open(result / "model.safetensors", "numpy") as after,
    ):
        names = sorted(before.keys())
        if names != sorted(after.keys()):
            raise SystemExit("the names of the tensors differ")
        total = 0
        for name in names:
            a, b = before.get_tensor(name), after.get_tensor(name)
            if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
                raise SystemExit(f"tensor {name} differs")
            total += a.nbytes
    print(f"All {len(names)} tensors, {bytes_text(total)}, are bit for bit the original.")


def main(model: Path, work: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    tp4, tp3, whole = work / "tp4", work / "tp3", work / "whole"

    heading("A trained model, in one file")
    run("inspect", str(model), "--tensor", "embeddings.*")

    heading("1. Cut it for 4 tensor-parallel ranks")
    run("convert", str(model), str(tp4), "--to", "tp=4", "--recipe", "bert")
    show_cut(model, tp4)

    heading("2. Cut that for 3 ranks, by other rules")
    rules = ["*word_embeddings.weight=-, tp", "*.weight=tp@balanced, ...", "*=..."]
    options = [word for rule in rules for word in ("--rule", rule)]
    run("convert", str(tp4), str(tp3), "--to", "tp=3", *options)
    show_cut(tp4, tp3)

    heading("3. Put it together again")
    run("convert", str(tp3), str(whole), "--to", "full")

    heading("The proof, by the safetensors package")
    prove_equal(model, whole)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python examples/demo.py MODEL WORK")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
