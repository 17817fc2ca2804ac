"""Conversions: every shard of the target is what the oracle says, whatever the cuts."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from checkpoint.checkpoint_files import (
    Cut,
    Tensor,
    check_shards,
    cuts,
    read_file,
    small_folder,
    tensors,
    write_file,
    write_ranks,
)
from reshard import checkpoint
from reshard.recipes.rules import Rule


def convert(source: Path, target: Path, cut: Cut, replicas: str = "once") -> None:
    mesh, specs = cut
    rules = [Rule(name, str(spec) or "...") for name, spec in specs.items()]
    checkpoint.convert(source, target, to=mesh, rules=rules, replicas=replicas, threads=2)


@st.composite
def journeys(draw: st.DrawFn) -> tuple[dict[str, Tensor], Cut, Cut]:
    whole = draw(tensors())
    return whole, draw(cuts(whole)), draw(cuts(whole))


@given(journeys(), st.sampled_from([16, 64, 1000, 4 << 20]), st.sampled_from(["once", "every"]))
def test_whole_to_n_ranks_to_m_ranks_to_whole(
    journey: tuple[dict[str, Tensor], Cut, Cut], block_bytes: int, replicas: str
) -> None:
    whole, first, second = journey
    with small_folder(block_bytes) as folder:
        write_file(folder / "model.safetensors", whole)
        convert(folder / "model.safetensors", folder / "n", first, replicas)
        check_shards(folder / "n", whole, first[1], replicas)
        convert(folder / "n", folder / "m", second)
        check_shards(folder / "m", whole, second[1])
        checkpoint.convert(folder / "m", folder / "full", to="full")
        assert read_file(folder / "full" / "model.safetensors") == whole
        digests = [
            {name: t.digest.tensor for name, t in checkpoint.open(folder / place).tensors.items()}
            for place in ("n", "m", "full")
        ]
        assert digests[0] == digests[1] == digests[2]


@given(journeys(), st.sampled_from([16, 64, 1000]))
def test_shards_with_rubbish_in_their_padding(
    journey: tuple[dict[str, Tensor], Cut, Cut], block_bytes: int
) -> None:
    whole, (mesh, specs), second = journey
    with small_folder(block_bytes) as folder:
        write_ranks(folder / "n", whole, mesh, specs)
        convert(folder / "n", folder / "m", second)
        check_shards(folder / "m", whole, second[1])
