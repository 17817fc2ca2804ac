"""The readers fed with bytes that a coverage-guided fuzzer chooses (atheris), or chance.

1. There is one target for each reader: the header of a safetensors file, the `.metadata` of a
   distributed checkpoint, the archive of a tensor, the pickle in such an archive, and an archive
   that is compressed.
2. A case runs the fuzzer on one of them in a process of its own, for a fixed number of inputs.
   What it finds lies in a file, which the message names: `python -m soak.fuzzing TARGET FILE`.
3. Without atheris, the inputs of the corpus are changed at random places.
"""

from __future__ import annotations

import importlib.util
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from soak.wrong import Wrong

TARGETS = ("header", "metadata", "archive", "pickle", "packed")
SECONDS_S = 20
LONGEST_INPUT_BYTES = 8192
HAS_ATHERIS = importlib.util.find_spec("atheris") is not None


class Fuzzing:
    """The campaign: a case is one target, for some seconds."""

    goal = "fuzzers"
    is_in_memory = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not HAS_ATHERIS:
            print("atheris is not installed: inputs are changed by chance alone", flush=True)

    def run(self, seed: int) -> Counter[str]:
        target = TARGETS[seed % len(TARGETS)]
        done = subprocess.run(
            [sys.executable, "-m", "soak.fuzzing", target, "--fuzz", str(seed), self._folder],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS_S * 4,
            check=False,
        )
        output = done.stdout + done.stderr
        if done.returncode:
            raise Wrong(f"{target}: {output[-6000:]}\n{self._keep(target)}")
        inputs = [line.split()[1] for line in output.splitlines() if line.startswith("inputs ")]
        reached = [line for line in output.splitlines() if " cov: " in line]
        edges = int(reached[-1].split("cov: ")[1].split()[0]) if reached else 0
        return Counter(
            {"fuzzers": 1, f"{target}: inputs": int(inputs[-1]), f"{target}: {edges} edges": 1}
        )

    def _keep(self, target: str) -> str:
        """Save what was found from the end of the campaign, and say how to read it again."""
        found = [path for path in self._folder.glob(f"{target}-*") if path.is_file()]
        kept = Path(tempfile.mkdtemp(prefix=f"reshard-soak-{target}-"))
        names = [shutil.copy(path, kept) for path in found]
        return "\n".join(f"python -m soak.fuzzing {target} {name}" for name in names)


def _corpus(target: str, folder: Path) -> list[bytes]:
    """Inputs that the reader accepts, to begin with."""
    from soak.mutations import an_archive, small_checkpoints

    found = [path for _, path in small_checkpoints(folder)]
    archive, pickle = an_archive()
    if target == "header":
        return [path.read_bytes() for one in found for path in one.glob("*.safetensors")]
    if target == "metadata":
        return [path.read_bytes() for one in found for path in one.glob("*.metadata")]
    return [pickle if target == "pickle" else archive]


def _reader(target: str, folder: Path) -> Callable[[bytes], str]:
    from soak import damaged_inputs
    from soak.mutations import an_archive

    if target == "header":
        return lambda content: damaged_inputs.read_damaged_header(content, folder / "fuzzed")
    if target == "metadata":
        return lambda content: damaged_inputs.read_damaged_metadata(content, folder)
    if target == "archive":
        return lambda content: damaged_inputs.read_damaged_archive(content, folder)
    if target == "packed":
        return lambda content: damaged_inputs.read_damaged_packed_archive(content, folder)
    archive, _ = an_archive()
    return lambda content: damaged_inputs.read_damaged_archive(
        damaged_inputs.archive_with(archive, content), folder
    )


def _fuzz(target: str, seed: int, kept: Path) -> None:
    """Run a fuzzer until something is wrong, or for `SECONDS_S`."""
    if HAS_ATHERIS:
        import atheris

        with atheris.instrument_imports(include=["reshard.checkpoint", "json"]):
            import reshard.checkpoint  # noqa: F401  (with counters in it)
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(dir=kept))
    (folder / "made").mkdir()
    corpus = _corpus(target, folder / "made")
    read = _reader(target, folder)
    for content in corpus:
        if read(content) != "accepted":
            raise Wrong(f"{target}: what is right is refused")
    if not HAS_ATHERIS:
        _by_chance(read, corpus, seed, kept / f"{target}-{seed}")
        return
    (folder / "corpus").mkdir()
    for number, content in enumerate(corpus):
        (folder / "corpus" / str(number)).write_bytes(content)
    options = [
        f"-max_total_time={SECONDS_S}",
        f"-seed={seed % 2**31 or 1}",
        f"-max_len={LONGEST_INPUT_BYTES}",
        f"-artifact_prefix={kept}/{target}-",
        "-timeout=20",
        "-rss_limit_mb=4096",
    ]
    inputs = 0

    def one(content: bytes) -> None:
        nonlocal inputs
        inputs += 1
        read(content)
        if inputs % 1000 == 0:
            print(f"inputs {inputs}", flush=True)

    atheris.Setup([target, *options, str(folder / "corpus")], one)
    atheris.Fuzz()


def _by_chance(read: Callable[[bytes], str], corpus: list[bytes], seed: int, kept: Path) -> None:
    choose = random.Random(seed)
    end_s = time.monotonic() + SECONDS_S
    inputs = 0
    while time.monotonic() < end_s:
        content = bytearray(choose.choice(corpus))
        for _ in range(choose.choice([1, 1, 2, 4, 16])):
            at = choose.randrange(len(content) + 1)
            piece = choose.randbytes(choose.choice([1, 1, 2, 4, 8]))
            content[at : at + choose.choice([0, len(piece), len(piece)])] = piece
        inputs += 1
        try:
            read(bytes(content))
        except Exception as error:
            kept.write_bytes(content)
            raise Wrong(f"the input is in {kept}") from error
    print(f"inputs {inputs}")


def main() -> int:
    target, what, *rest = sys.argv[1:]
    if what == "--fuzz":
        _fuzz(target, int(rest[0]), Path(rest[1]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        print(_reader(target, Path(folder))(Path(what).read_bytes()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
