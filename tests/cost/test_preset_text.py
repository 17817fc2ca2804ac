"""Presets written and read back, and overheads in files that cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.cost import FORMULAS, LIBRARIES, Preset, load_preset, preset_text, shipped_presets
from reshard.cost.preset_file import read_preset
from reshard.errors import LayoutError, ReshardError, UsageError
from reshard.topology import NO_OVERHEAD, Link, Overhead

links = st.builds(Link, st.floats(1e-3, 1e15), latency_s=st.floats(0, 1e3))
maybe = st.none() | links
overheads = st.builds(
    Overhead,
    call_s=st.floats(0, 10),
    step_s=st.floats(0, 10),
    copies=maybe,
    combining=st.floats(1, 10),
    shared_messages=maybe,
    shared_copies=maybe,
    collectives=st.dictionaries(st.sampled_from(sorted(FORMULAS)), links).map(
        lambda found: tuple(found.items())
    ),
)
# Lone surrogates are no text of a file.
texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    st.builds(
        Preset,
        texts,
        texts,
        st.sampled_from(sorted(LIBRARIES)),
        st.integers(1, 1000),
        links,
        maybe,
        overhead=st.just(NO_OVERHEAD) | overheads,
    ),
    texts,
)
def test_what_is_written_is_read_back(preset: Preset, comment: str) -> None:
    plain = "".join(letter if letter.isprintable() else " " for letter in comment)
    content = preset_text(preset, plain).encode()
    assert read_preset(content, "it") == preset


def test_racks_are_written() -> None:
    near, far = Link(3.0), Link(1.0, 2.0)
    preset = Preset("racks", "", "any", 2, near, far, 4, far)
    assert read_preset(preset_text(preset).encode(), "it") == preset


@pytest.mark.parametrize("name", shipped_presets())
def test_shipped_presets_have_no_overhead(name: str) -> None:
    preset = load_preset(name)
    assert preset.overhead is NO_OVERHEAD and preset.topology().overhead is NO_OVERHEAD
    assert "overhead" not in preset_text(preset)


START = """
name = "mine"
library = "gloo"
ranks_per_host = 4
[within_host]
bandwidth_bytes_per_s = 4e9
latency_s = 1e-6
"""


def test_an_overhead_may_be_given_in_part() -> None:
    preset = read_preset((START + "[overhead]\ncall_s = 2").encode(), "it")
    assert preset.overhead == Overhead(2.0) == preset.topology(1).overhead


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[overhead]\nspeed = 1", LayoutError, r"\[overhead\] has the key 'speed'"),
        ("[overhead]\ncall_s = -1", LayoutError, r"\[overhead\]: call_s is -1"),
        ("[overhead]\ncopies = 3", LayoutError, "overhead.copies is 3; a table"),
        ("[overhead.copies]\nlatency_s = 1", LayoutError, r"\[overhead.copies\] has the keys"),
        ("[overhead]\ncollectives = 3", LayoutError, "collectives = 3; tables were expected"),
        ("[overhead.collectives]\npermute = 3", LayoutError, "collectives.permute is 3"),
        (
            "[overhead.collectives.gossip]\nbandwidth_bytes_per_s = 1\nlatency_s = 0",
            UsageError,
            "unknown kind of collective 'gossip'",
        ),
    ],
)
def test_overheads_that_cannot_be(text: str, error: type[ReshardError], message: str) -> None:
    with pytest.raises(error, match=message):
        read_preset((START + text).encode(), "it.toml")
