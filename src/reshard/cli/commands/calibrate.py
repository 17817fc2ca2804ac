"""`reshard calibrate`: measure the links between the ranks of a job, and write them as a preset."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reshard.cli import output
from reshard.cli.options import as_size, json_option, quiet_option
from reshard.cli.program import DONE, FAILED, WRONG_USE
from reshard.cli.progress import every_few_seconds
from reshard.errors import MissingExtraError, ReshardError, RunError, UsageError
from reshard.text import bytes_text, duration_text, rate_text

if TYPE_CHECKING:
    from reshard.topology import Link
    from reshard.torch.calibration import Calibration

# The variables that torchrun sets for every rank.
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_WORST_SHOWN = 3


@click.command()
@click.option(
    "--output",
    "output_path",
    metavar="FILE",
    help="Write the preset to FILE.toml; without it, to stdout.",
)
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@click.option("--name", default="calibrated", show_default=True, help="The name of the preset.")
@click.option(
    "--seconds",
    "seconds_s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="S",
    help="The approximate duration of the measurements.",
)
@click.option(
    "--largest",
    "largest_bytes",
    callback=as_size,
    default="64MiB",
    show_default=True,
    metavar="SIZE",
    help="The largest part of a tensor on a rank; about three times as much memory is used.",
)
@click.option(
    "--backend",
    type=click.Choice(["gloo", "nccl"]),
    help="The backend of the messages. [default: nccl if every rank has a GPU, else gloo]",
)
@json_option
@quiet_option
def calibrate(
    output_path: str | None,
    overwrite: bool,
    name: str,
    seconds_s: float,
    largest_bytes: int,
    backend: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Measure the links between the ranks of a job.

    Writes a preset for estimates and for the choice between methods: how long messages, copies and
    collectives take. Start it with torchrun, with as many ranks on every host as the job will have.
    The first rank writes the file; reshard.cost.load_preset reads it. Give the same file to all
    ranks of a job, so that they make the same choices.

    \b
    Examples:
      torchrun --nproc-per-node 4 -m reshard calibrate --output here.toml
      torchrun --nnodes 2 --nproc-per-node 8 ... -m reshard calibrate --output cluster.toml
      reshard explain "x, -" "-, x" --mesh x=4 --shape 4096x4096 --topology here.toml

    \b
    Keys of --json:
      output (null without --output), preset (the text of the TOML file), rounds, seconds_s
      typical_error (the median relative error of the estimates)
      measurements [{subject, name, messages, size_bytes, runs, copied_bytes,
                     combined_bytes, seconds_s, estimate_s}]
    """
    from reshard.cost.preset import preset_text

    _check_launched()
    is_first = os.environ["RANK"] == "0"
    with _process_group(backend):
        if not _all_can_go_on(lambda: _check_output(output_path, overwrite), is_first):
            return WRONG_USE
        from reshard.torch.calibration import calibrate as measure

        shown = None
        if is_first and not quiet:
            total = f"of about {duration_text(seconds_s)}"
            shown = every_few_seconds(
                lambda taken_s, rounds, _: (
                    f"measured {rounds} times, {duration_text(taken_s)} {total}"
                )
            )
        calibration = measure(
            name, seconds_s=seconds_s, largest_bytes=largest_bytes, progress=shown
        )
        text = preset_text(calibration.preset, _comment(calibration))
        if output_path is not None and not _all_can_go_on(
            lambda: output.write_whole(Path(output_path), text, overwrite, "preset"), is_first
        ):
            return FAILED
        if is_first and as_json:
            output.write_json(_as_json(calibration, text, output_path))
        elif is_first and output_path is None:
            output.write(text.rstrip("\n"))
        elif is_first and not quiet:
            output.write("\n".join(_as_text(calibration, output_path)))
    return DONE


def _check_launched() -> None:
    """Raise UsageError if torchrun did not start this process, or its variables are not numbers."""
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise UsageError(
            f"{missing[0]} is not set: calibrate measures between ranks, and this process is not a "
            "rank. Start it with torchrun --nproc-per-node N -m reshard calibrate ..."
        )
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if not os.environ[name].isdecimal():
            raise UsageError(f"{name}={os.environ[name]!r}; torchrun sets it to a number")
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise UsageError("WORLD_SIZE=1: a single rank sends nothing; start 2 ranks or more")


@contextmanager
def _process_group(backend: str | None) -> Iterator[None]:
    """Join the process group, and destroy it on exit.

    Raises:
        MissingExtraError: torch is not installed.
        UsageError: nccl without a GPU for this rank.
        RunError: ranks that do not find each other.
    """
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise MissingExtraError(
            "calibrate needs torch, which is not installed: pip install 'reshard[torch]'"
        ) from error
    place = int(os.environ["LOCAL_RANK"])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend is None:
        # NCCL does not support two ranks on a GPU: every rank of the host needs its own.
        needed = int(os.environ.get("LOCAL_WORLD_SIZE", place + 1))
        backend = "nccl" if devices >= needed and dist.is_nccl_available() else "gloo"
    if backend == "nccl":
        if place >= devices:
            raise UsageError(
                f"--backend nccl and {devices} GPUs for rank {place} of this host; start at most "
                "a rank per GPU, or use --backend gloo"
            )
        torch.cuda.set_device(place)
    else:
        # Ranks of a host share its processors.
        torch.set_num_threads(1)
    try:
        dist.init_process_group(backend)
    except (RuntimeError, ValueError) as error:
        raise RunError(f"the ranks did not find each other: {error}") from error
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _all_can_go_on(action: Callable[[], None], is_first: bool) -> bool:
    """Run an action on the first rank, and return on every rank whether it succeeded.

    On the first rank, raises the error of the action.
    """
    import torch
    import torch.distributed as dist

    from reshard.torch.exchange.agreement import device_of

    problem: ReshardError | None = None
    if is_first:
        try:
            action()
        except ReshardError as error:
            problem = error
    # All ranks take part, also when the first has failed: the others would wait for it.
    failed = torch.tensor([problem is not None], dtype=torch.int64, device=device_of(None))
    dist.broadcast(failed, 0)
    if problem is not None:
        raise problem
    return not failed.item()


def _check_output(output_path: str | None, overwrite: bool) -> None:
    """Raise UsageError for an output that cannot be written, before anything is measured."""
    if output_path is None:
        if overwrite:
            raise UsageError("--overwrite needs a file; give --output FILE too")
        return
    path = Path(output_path)
    if not output_path.endswith(".toml"):
        raise UsageError(
            f"--output {output_path!r}: its ending distinguishes it from a shipped preset; write "
            f"{output_path or 'machine'}.toml"
        )
    output.check_place(path, overwrite, "preset", "machine.toml")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path.parent} is not writable; write elsewhere")


def _comment(calibration: Calibration) -> str:
    return (
        f"Written by reshard calibrate: medians of {calibration.rounds} rounds. Half of its "
        f"{len(calibration.measurements)} measurements are\nexplained within "
        f"{calibration.fitted.typical_error:.0%}. All ranks of a job must have the same file."
    )


def _as_text(calibration: Calibration, output_path: str | None) -> list[str]:
    preset, overhead = calibration.preset, calibration.preset.overhead
    links: list[tuple[str, Link | None]] = [
        ("within a host", preset.within_host if preset.ranks_per_host > 1 else None),
        ("between hosts", preset.between_hosts),
        ("copies of a rank", overhead.copies),
        ("messages of a host", overhead.shared_messages),
        ("copies of a host", overhead.shared_copies),
        ("network of a host", overhead.shared_network),
        ("uplink of a rack", overhead.shared_uplink),
        *overhead.collectives,
    ]
    lines = [
        f"{what:18}  {rate_text(link.bandwidth_bytes_per_s):>10}  {duration_text(link.latency_s)}"
        for what, link in links
        if link is not None
    ]
    lines.append(f"{'a call':18}  {'':10}  {duration_text(overhead.call_s)}")
    worst = sorted(
        zip(calibration.measurements, calibration.fitted.ratios, strict=True),
        # An estimate of twice the time is as wrong as an estimate of half the time.
        key=lambda pair: max(pair[1], 1 / pair[1]) if pair[1] else float("inf"),
        reverse=True,
    )[:_WORST_SHOWN]
    worst_text = ", ".join(
        f"{run.name} of {bytes_text(run.size_bytes or run.copied_bytes)} ({ratio:.2f})"
        for run, ratio in worst
    )
    return [
        *lines,
        f"half of {len(calibration.measurements)} measurements are explained within "
        f"{calibration.fitted.typical_error:.0%}; the worst: {worst_text}",
        f"wrote {output_path} from {calibration.rounds} rounds in "
        f"{duration_text(calibration.seconds_s)}",
    ]


def _as_json(calibration: Calibration, text: str, output_path: str | None) -> dict[str, Any]:
    return {
        "output": output_path,
        "preset": text,
        "rounds": calibration.rounds,
        "seconds_s": calibration.seconds_s,
        "typical_error": calibration.fitted.typical_error,
        "measurements": [
            {
                "subject": measurement.subject,
                "name": measurement.name,
                "messages": measurement.messages,
                "size_bytes": measurement.size_bytes,
                "runs": measurement.runs,
                "copied_bytes": measurement.copied_bytes,
                "combined_bytes": measurement.combined_bytes,
                "seconds_s": measurement.seconds_s,
                "estimate_s": ratio * measurement.seconds_s,
            }
            for measurement, ratio in zip(
                calibration.measurements, calibration.fitted.ratios, strict=True
            )
        ],
    }
