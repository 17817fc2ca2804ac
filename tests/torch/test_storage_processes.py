"""FSDP2 loads from every format, saves, and loads what it saved under another mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import live_processes
from checkpoint.checkpoint_files import Tensor, write_file
from live_processes import expect_all_end_well, run_ranks
from reshard import checkpoint
from reshard.dtypes import dtype
from selection import keep_covering

torch = pytest.importorskip("torch")


def model(folder: Path) -> Path:
    folder.mkdir()
    shapes = {"0.weight": (13, 7), "0.bias": (13,), "1.weight": (5, 13)}
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    write_file(
        folder / "model.safetensors",
        {
            name: Tensor(dtype("float32"), value.numpy().view("uint32"))
            for name, value in values.items()
        },
    )
    return folder


@pytest.mark.parametrize(
    "format", ["torch-dcp", "sharded-safetensors", "safetensors", "torch-pickle"]
)
def test_fsdp2_loads_and_saves_on_two_ranks(tmp_path: Path, format: str) -> None:
    original = model(tmp_path / "model")
    folders = [original]
    for name, to, how in (
        ("parts", "full", {"most_file_bytes": 100}),
        ("tp3", "tp=3", {"rules": ["*=tp, ..."]}),
        ("dcp", "tp=2", {"rules": ["*.weight=-, tp", "*=..."], "format": "torch-dcp"}),
    ):
        folders.append(tmp_path / name)
        checkpoint.convert(original, folders[-1], to=to, **how)
    target = tmp_path / "saved"
    expect_all_end_well(run_ranks("storage_process.py", 2, original, format, target, *folders))
    found = checkpoint.open(target)
    assert found.format == format and not checkpoint.check_digests(found).damaged
    assert found["model.0.weight"].shape == (13, 7)


@pytest.mark.parametrize(
    ("format", "hosts"),
    keep_covering(
        1,
        [
            ("torch-dcp", 2),
            ("torch-dcp", 1),
            ("sharded-safetensors", 1),
            ("sharded-safetensors", 2),
            ("safetensors", 1),
            ("torch-pickle", 1),
        ],
        "the same format from another number of ranks that save",
    ),
)
def test_fsdp2_on_two_ranks_saves_to_a_store(
    tmp_path: Path, format: str, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("obstore", "boto3", "moto"):
        pytest.importorskip(package)
    from bucket_server import BUCKET, bucket_server

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOSTS_OF_THEIR_OWN", "" if hosts == 1 else "1")
    original = model(tmp_path / "model")
    with bucket_server(monkeypatch.setenv) as server:
        target = f"s3://{BUCKET}/saved"
        expect_all_end_well(run_ranks("storage_process.py", 2, original, format, target, original))
        assert checkpoint.open(target).format == format
        assert not server.pending
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_failing_case_of_ranks_is_an_item_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "cases.py"
    script.write_text(
        "from rank_cases import report_each\n"
        "def first(): pass\n"
        "def second():\n"
        "    try: int('x')\n"
        "    except ValueError as error: raise RuntimeError('wrong') from error\n"
        "def main(): report_each([first, second])\n"
        "main()\n"
    )
    ended = run_ranks(str(script), 1)
    assert [(rank.code, rank.cases("failed")) for rank in ended] == [(1, ["second"])]
    names = []

    @contextlib.contextmanager
    def subtest(name: str) -> Iterator[None]:
        names.append(name)
        if name == "first":
            yield
            return
        with pytest.raises(AssertionError, match="RuntimeError: wrong"):
            yield

    monkeypatch.setattr(live_processes, "subtest", subtest)
    with pytest.raises(AssertionError, match="ranks failed in second"):
        expect_all_end_well(ended)
    assert names == ["first", "second"]
