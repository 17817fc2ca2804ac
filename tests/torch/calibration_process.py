"""One rank of a job that is calibrated, by the function or by the command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from reshard.cli import main
from reshard.cost import load_preset, preset_text
from reshard.cost.fitting import SHARED, SUBJECTS
from reshard.errors import UsageError
from reshard.torch.calibration import calibrate


def by_command(folder: Path) -> None:
    path = folder / "machine.toml"
    options = ["--output", str(path), "--seconds", "0.5", "--largest", "64KiB", "--name", "ours"]
    assert main(["calibrate", *options]) == 0
    assert not dist.is_initialized()


def again(folder: Path) -> None:
    """The file is there: refused before anything is measured, on all ranks."""
    began = (folder / "machine.toml").read_bytes()
    code = main(["calibrate", "--output", str(folder / "machine.toml"), "--seconds", "1000"])
    assert code == 2
    assert (folder / "machine.toml").read_bytes() == began
    sys.exit(0)


def hosts(folder: Path) -> None:
    """Four ranks that say they live on two hosts."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    told = []
    found = calibrate(
        "two",
        seconds_s=0.5,
        largest_bytes=1 << 14,
        host_name=f"host-{rank // 2}",
        progress=lambda elapsed_s, rounds: told.append(rounds),
    )
    preset = found.preset
    assert (preset.ranks_per_host, preset.library) == (2, "gloo")
    assert preset.between_hosts is not None and preset.within_host != preset.between_hosts
    assert [kind for kind, _ in preset.overhead.collectives] == ["all-reduce"]
    subjects = {one.subject for one in found.measurements}
    assert subjects == {*SUBJECTS, "all-reduce"}
    assert found.rounds >= 2 and len(found.fitted.ratios) == len(found.measurements)
    # A shift among two ranks is two messages a host; the host is counted, not the job.
    shifts = [one for one in found.measurements if one.name == "shift" and one.subject == SHARED]
    assert {one.messages for one in shifts} == {2}
    assert max(one.size_bytes for one in shifts) == 2 << 14
    assert told == (list(range(found.rounds + 1)) if rank == 0 else [])
    # All ranks have the same.
    texts: list[str] = [""] * 4
    dist.all_gather_object(texts, preset_text(preset))
    assert len(set(texts)) == 1
    if rank == 0:
        path = folder / "two.toml"
        path.write_text(preset_text(preset, "two hosts"))
        assert load_preset(path) == preset
        assert load_preset(path).topology(hosts=2).ranks == 4
    # Where ranks are not numbered host by host, all of them refuse.
    for names in ("abab", "aaab"):
        with pytest.raises(UsageError, match="numbered host by host"):
            calibrate(host_name=names[rank])
    dist.destroy_process_group()


if __name__ == "__main__":
    {"by_command": by_command, "again": again, "hosts": hosts}[sys.argv[1]](Path(sys.argv[2]))
