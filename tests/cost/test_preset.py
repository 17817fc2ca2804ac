"""Presets read from files and written to them."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.cost import FORMULAS, LIBRARIES, Preset, load_preset, preset_text, shipped_presets
from reshard.cost.preset import read_preset
from reshard.errors import LayoutError, ReshardError, UsageError
from reshard.topology import NO_OVERHEAD, Device, Link, Overhead

CLUSTER = """
name = "mine"
library = "nccl"
ranks_per_host = 4
hosts_per_rack = 2
[within_host]
bandwidth_bytes_per_s = 4e9
latency_s = 1e-6
[between_hosts]
bandwidth_bytes_per_s = 2e9
latency_s = 2e-6
[between_racks]
bandwidth_bytes_per_s = 1000
latency_s = 0
"""


@pytest.mark.parametrize("name", shipped_presets())
def test_shipped_presets_load_and_give_their_sources(name: str) -> None:
    preset = load_preset(name)
    assert preset.name == name
    assert preset.description
    text = (resources.files("reshard.cost") / "presets" / f"{name}.toml").read_text()
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert len(comments) >= 5
    assert preset.topology().ranks == preset.ranks_per_host
    assert preset.device is not None and preset.topology().device is preset.device
    assert preset.device.operations_for("float32") is not None
    if preset.between_hosts is not None:
        near, far = preset.within_host, preset.between_hosts
        assert near.bandwidth_bytes_per_s > far.bandwidth_bytes_per_s
        assert near.latency_s < far.latency_s
        assert preset.topology(hosts=3).hosts == 3


def test_presets_have_their_numbers() -> None:
    h100 = load_preset("h100-8")
    assert (h100.ranks_per_host, h100.library) == (8, "nccl")
    assert h100.within_host.bandwidth_bytes_per_s == 450e9
    assert h100.between_hosts == Link(50e9, 14e-6)
    assert h100.device is not None
    assert h100.device.operations_for("bfloat16") == 989e12
    # Of a type that is not listed, as of the slowest that is.
    assert h100.device.operations_for("int32") == 67e12
    assert load_preset("gb200-nvl72").topology(hosts=2).ranks == 144
    assert load_preset("tpu-v5p").library == "xla"
    assert load_preset("gloo-host").topology().ranks == 4


def test_a_preset_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CLUSTER)
    for where in (path, str(path)):
        preset = load_preset(where)
        assert preset == Preset(
            "mine", "", "nccl", 4, Link(4e9, 1e-6), Link(2e9, 2e-6), 2, Link(1000, 0)
        )
    topology = preset.topology(hosts=4)
    assert (topology.ranks, topology.racks) == (16, 2)
    assert topology.between_racks == Link(1000)


def test_a_preset_of_a_single_host_has_no_second() -> None:
    with pytest.raises(LayoutError, match="'gloo-host' has a single host, 2 were requested"):
        load_preset("gloo-host").topology(hosts=2)
    with pytest.raises(LayoutError, match="hosts 0 must be at least 1"):
        load_preset("h100-8").topology(hosts=0)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("ranks_per_host = 4", "", "no 'ranks_per_host'"),
        ("ranks_per_host = 4", "ranks_per_host = 0", "f.toml: ranks_per_host 0 must be at least 1"),
        ("ranks_per_host = 4", "ranks_per_host = true", "ranks_per_host is True; int was expected"),
        ("ranks_per_host = 4", "ranks_per_host = '4'", "ranks_per_host is '4'; int was expected"),
        ("hosts_per_rack = 2", "", "give both or none"),
        ("hosts_per_rack = 2", "hosts_a_rack = 2", "unknown key 'hosts_a_rack'"),
        ("name =", "name", "f.toml is not TOML"),
        ("latency_s = 0", "", r"\[between_racks\] has the keys"),
        ("latency_s = 0", "latency_s = -1", r"\[between_racks\]: latency_s of a link is -1"),
        ("= 1000", "= 'fast'", "bandwidth_bytes_per_s of a link is 'fast'"),
        ("= 1000", "= inf", "bandwidth_bytes_per_s of a link is inf"),
        ("[within_host]", "[between_planets]", "unknown key 'between_planets'"),
    ],
)
def test_invalid_presets_are_refused(before: str, after: str, message: str) -> None:
    assert before in CLUSTER
    with pytest.raises(LayoutError, match=message):
        read_preset(CLUSTER.replace(before, after).encode(), "f.toml")


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"f\.toml is not TOML"):
        read_preset(b"\xff\xfe", "f.toml")


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown preset 'h200'; .* h100-8"):
        load_preset("h200")
    with pytest.raises(UsageError, match="unknown library 'mpi'"):
        read_preset(CLUSTER.replace('"nccl"', '"mpi"').encode(), "f.toml")
    with pytest.raises(LayoutError, match="cannot be read: No such file"):
        load_preset(tmp_path / "none.toml")


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
def test_written_texts_are_read_back(preset: Preset, comment: str) -> None:
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
def test_invalid_overheads_are_refused(text: str, error: type[ReshardError], message: str) -> None:
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
def test_invalid_devices_are_refused(text: str, message: str) -> None:
    # A key stands above all tables.
    content = START + text if text.startswith("[") else text + START
    with pytest.raises(LayoutError, match=message):
        read_preset(content.encode(), "it.toml")
