"""Presets written and read back, and overheads in files that cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.cost import FORMULAS, LIBRARIES, Preset, load_preset, preset_text, shipped_presets
from reshard.cost.preset_file import read_preset
from reshard.errors import LayoutError, ReshardError, UsageError
from reshard.topology import NO_OVERHEAD, Device, Link, Overhead

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
    shared_network=maybe,
    shared_uplink=maybe,
    collectives=st.dictionaries(st.sampled_from(sorted(FORMULAS)), links).map(
        lambda found: tuple(found.items())
    ),
)
rates = st.floats(1e-3, 1e18)
devices = st.builds(
    Device,
    rates,
    st.dictionaries(st.sampled_from(["bfloat16", "float32", "int8", "float8_e4m3fn"]), rates).map(
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
        device=st.none() | devices,
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


def test_a_device_may_be_given_in_part() -> None:
    preset = read_preset((START + "[device]\nmemory_bytes_per_s = 2").encode(), "it")
    assert preset.device == Device(2.0) == preset.topology(1).device
    assert Device(2.0).operations_for("float32") is None
    assert read_preset(START.encode(), "it").topology().device is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[device]\nspeed = 1", r"\[device\] has the keys \['speed'\]; memory_bytes_per_s"),
        ("[device.operations_per_s]\nint8 = 1", r"\[device\] has the keys \['operations_per_s'\]"),
        ("[device]\nmemory_bytes_per_s = 0", r"\[device\]: memory_bytes_per_s of a device is 0"),
        ('[device]\nmemory_bytes_per_s = "fast"', "memory_bytes_per_s of a device is 'fast'"),
        ("[device]\nmemory_bytes_per_s = true", "memory_bytes_per_s of a device is True"),
        ("[device]\nmemory_bytes_per_s = inf", "memory_bytes_per_s of a device is inf"),
        ("device = 3", "device is 3; dict was expected"),
        ("[device]\nmemory_bytes_per_s = 1\noperations_per_s = 3", "operations_per_s = 3"),
        (
            "[device]\nmemory_bytes_per_s = 1\n[device.operations_per_s]\nbfloat16 = -1",
            "operations_per_s of bfloat16 of a device is -1",
        ),
        (
            "[device]\nmemory_bytes_per_s = 1\n[device.operations_per_s]\nfloat33 = 1",
            r"\[device\]: .*float33",
        ),
    ],
)
def test_devices_that_cannot_be(text: str, message: str) -> None:
    # A key stands above all tables.
    content = START + text if text.startswith("[") else text + START
    with pytest.raises(LayoutError, match=message):
        read_preset(content.encode(), "it.toml")
