"""The presets that come with reshard, and files that are none."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from reshard.cost import Preset, load_preset, shipped_presets
from reshard.cost.preset_file import read_preset
from reshard.errors import LayoutError, UsageError
from reshard.topology import Link

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


def test_what_they_say() -> None:
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


def test_a_file_of_ones_own(tmp_path: Path) -> None:
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


def test_one_host_is_all_that_some_have() -> None:
    with pytest.raises(LayoutError, match="'gloo-host' is of one host, 2 were asked for"):
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
def test_what_is_no_preset_is_refused(before: str, after: str, message: str) -> None:
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
