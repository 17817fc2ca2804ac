"""Presets: known machines, and their TOML files.

A preset has the number of ranks of a host, the links between ranks, and the collective library. The
format of its file is::

    name = "my-cluster"
    description = "What it is"          # optional
    library = "nccl"                    # whose algorithms: a key of reshard.cost.LIBRARIES
    ranks_per_host = 8
    hosts_per_rack = 32                 # optional, with [between_racks]

    [within_host]
    bandwidth_bytes_per_s = 450e9       # of a rank, in one direction
    latency_s = 3e-6

    [between_hosts]                     # optional
    bandwidth_bytes_per_s = 50e9
    latency_s = 14e-6

    [overhead]                          # optional, as all below: see reshard.topology.Overhead
    call_s = 2e-3
    step_s = 1e-4
    combining = 2.0                     # times copying

    [overhead.copies]                   # of a rank; latency_s is that of a run of bytes
    bandwidth_bytes_per_s = 4e9
    latency_s = 1e-8

    [overhead.shared_messages]          # of all ranks of a host together
    bandwidth_bytes_per_s = 3e9
    latency_s = 50e-6

    [overhead.shared_copies]
    bandwidth_bytes_per_s = 6e9
    latency_s = 1e-8

    [overhead.shared_network]           # of all ranks of a host to and from other hosts
    bandwidth_bytes_per_s = 12.5e9
    latency_s = 0.0

    [overhead.shared_uplink]            # of all hosts of a rack to and from other racks
    bandwidth_bytes_per_s = 50e9
    latency_s = 0.0

    [overhead.collectives.all-reduce]   # the link between ranks of a host for this kind
    bandwidth_bytes_per_s = 5e8
    latency_s = 200e-6

    [device]                            # optional: of a rank, see reshard.topology.Device
    memory_bytes_per_s = 3.35e12

    [device.operations_per_s]           # optional: additions and multiplications, by element type
    bfloat16 = 989e12
    float32 = 67e12
"""

from __future__ import annotations

import json
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from reshard._records import Record
from reshard.cost.formulas import check_kind, check_library
from reshard.dtypes import dtype
from reshard.errors import LayoutError, UsageError
from reshard.topology import LEVELS, NO_OVERHEAD, Device, Link, Overhead, Topology


class Preset(Record):
    """The links of a kind of machine. `load_preset` reads a preset from a file.

    Args:
        name: for display.
        description: of the machine, in a line.
        library: a key of `reshard.cost.LIBRARIES`.
        ranks_per_host: number of ranks connected by the fastest links.
        within_host: the link between ranks of a host.
        between_hosts: the link between hosts; None for a machine of a single host.
        hosts_per_rack: number of hosts connected by `between_hosts`; all if None.
        between_racks: the link between racks.
        overhead: time in addition to messages; none by default.
        device: the speed of a rank's device; None if unknown.

    Raises:
        LayoutError: a number of ranks or hosts below 1, or racks without a link between them.
        UsageError: an unknown library, or an unknown kind of collective.
    """

    name: str
    description: str
    library: str
    ranks_per_host: int
    within_host: Link
    between_hosts: Link | None = None
    hosts_per_rack: int | None = None
    between_racks: Link | None = None
    overhead: Overhead = NO_OVERHEAD
    device: Device | None = None

    def __post_init__(self) -> None:
        check_library(self.library)
        for kind, _ in self.overhead.collectives:
            check_kind(kind)
        if (self.hosts_per_rack is None) != (self.between_racks is None):
            raise LayoutError(
                f"preset {self.name!r} has only one of hosts_per_rack and between_racks; give both "
                "or none"
            )
        # A topology validates the numbers of ranks and hosts.
        self.topology()

    def topology(self, hosts: int = 1) -> Topology:
        """Return the topology of a number of hosts.

        Raises LayoutError for a number below 1, or more hosts than there are links for.

        >>> Preset("one", "", "gloo", 4, Link(1e9)).topology()
        <Topology of 4 ranks on 1 hosts>
        """
        if hosts != 1 and self.between_hosts is None:
            raise LayoutError(
                f"preset {self.name!r} has a single host, {hosts!r} were requested; write a preset "
                "with a table [between_hosts]"
            )
        return Topology.of(
            hosts=hosts,
            ranks_per_host=self.ranks_per_host,
            hosts_per_rack=self.hosts_per_rack,
            within_host=self.within_host,
            between_hosts=self.between_hosts,
            between_racks=self.between_racks,
            overhead=self.overhead,
            device=self.device,
        )


_REQUIRED = {"name": str, "library": str, "ranks_per_host": int, "within_host": dict}
_OPTIONAL = {
    "description": str,
    "hosts_per_rack": int,
    "between_hosts": dict,
    "between_racks": dict,
    "overhead": dict,
    "device": dict,
}
_OVERHEAD_LINKS = (
    "copies",
    "shared_messages",
    "shared_copies",
    "shared_network",
    "shared_uplink",
)
_OVERHEAD_NUMBERS = ("call_s", "step_s", "combining")
_OVERHEAD = {"collectives", *_OVERHEAD_NUMBERS, *_OVERHEAD_LINKS}
_LINK = {"bandwidth_bytes_per_s", "latency_s"}
_DEVICE = {"memory_bytes_per_s", "operations_per_s"}


@cache
def shipped_presets() -> tuple[str, ...]:
    """Return the names of the presets that come with reshard, sorted.

    >>> shipped_presets()
    ('gb200-nvl72', 'gloo-host', 'h100-8', 'tpu-v5p')
    """
    return tuple(
        sorted(
            entry.name.removesuffix(".toml")
            for entry in (resources.files("reshard.cost") / "presets").iterdir()
            if entry.name.endswith(".toml")
        )
    )


def load_preset(name_or_path: str | Path) -> Preset:
    """Return the preset of a shipped name, or of a TOML file.

    A string is a path if it ends in `.toml` or contains a `/`; a `Path` always is.

    Raises:
        UsageError: an unknown name, or an unknown library.
        LayoutError: a file that cannot be read, is not TOML, or has keys that are unknown,
            missing or of the wrong type.

    >>> load_preset("h100-8").topology(hosts=4)
    <Topology of 32 ranks on 4 hosts>
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".toml") or "/" in text:
        try:
            return read_preset(Path(name_or_path).read_bytes(), text)
        except OSError as error:
            raise LayoutError(f"preset file {text} cannot be read: {error.strerror}") from error
    if text not in shipped_presets():
        raise UsageError(
            f"unknown preset {text!r}; those that come with reshard are "
            f"{', '.join(shipped_presets())}; give the path of your own file with its "
            "suffix .toml"
        )
    return _read_shipped(text)


@cache
def _read_shipped(name: str) -> Preset:
    file = resources.files("reshard.cost") / "presets" / f"{name}.toml"
    return read_preset(file.read_bytes(), f"{name}.toml")


def read_preset(content: bytes, where: str) -> Preset:
    """Parse the bytes of a preset file; `where` names it in errors.

    Raises LayoutError or UsageError, see `load_preset`.
    """
    try:
        table = tomllib.loads(content.decode())
    # Both bytes that are not UTF-8 and wrong TOML raise it.
    except ValueError as error:
        raise LayoutError(f"{where} is not TOML: {error}") from error
    types = _REQUIRED | _OPTIONAL
    for key, value in table.items():
        if key not in types:
            raise LayoutError(f"{where}: unknown key {key!r}; it is one of {', '.join(types)}")
        # Not isinstance: True would pass for a number.
        if type(value) is not types[key]:
            raise LayoutError(f"{where}: {key} is {value!r}; {types[key].__name__} was expected")
    for key in _REQUIRED:
        if key not in table:
            raise LayoutError(f"{where} has no {key!r}; add it")
    links = {key: _read_link(table[key], where, key) for key in LEVELS if key in table}
    fields: dict[str, Any] = {"description": ""} | table | links
    if "overhead" in table:
        fields["overhead"] = _read_overhead(table["overhead"], where)
    if "device" in table:
        fields["device"] = _read_device(table["device"], where)
    try:
        return Preset(**fields)
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from error


def preset_text(preset: Preset, comment: str = "") -> str:
    """Return the TOML file of a preset, with lines of comment above; `load_preset` reads it back.

    >>> preset = load_preset("gloo-host")
    >>> print(preset_text(preset, "measured by hand"), end="")
    # measured by hand
    name = "gloo-host"
    description = "4 processes of one host, gloo over loopback TCP; an order of magnitude"
    library = "gloo"
    ranks_per_host = 4
    <BLANKLINE>
    [within_host]
    bandwidth_bytes_per_s = 2000000000.0
    latency_s = 0.0001
    <BLANKLINE>
    [device]
    memory_bytes_per_s = 10000000000.0
    <BLANKLINE>
    [device.operations_per_s]
    float32 = 50000000000.0
    float64 = 25000000000.0
    >>> read_preset(preset_text(preset).encode(), "it") == preset
    True
    """
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    for key in ("name", "description", "library"):
        # A JSON string is a TOML string, except for DEL, which TOML requires escaped.
        text = json.dumps(getattr(preset, key), ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"{key} = {text}")
    lines.append(f"ranks_per_host = {preset.ranks_per_host}")
    if preset.hosts_per_rack is not None:
        lines.append(f"hosts_per_rack = {preset.hosts_per_rack}")
    tables: list[tuple[str, Link | None]] = [(key, getattr(preset, key)) for key in LEVELS]
    overhead = preset.overhead
    # Defaults are omitted, and restored when the file is read.
    if overhead != NO_OVERHEAD:
        lines += ["", "[overhead]"]
        lines += [f"{key} = {getattr(overhead, key)!r}" for key in _OVERHEAD_NUMBERS]
    tables += [(f"overhead.{key}", getattr(overhead, key)) for key in _OVERHEAD_LINKS]
    tables += [(f"overhead.collectives.{kind}", link) for kind, link in overhead.collectives]
    for key, link in tables:
        if link is not None:
            lines += ["", f"[{key}]", f"bandwidth_bytes_per_s = {link.bandwidth_bytes_per_s!r}"]
            lines.append(f"latency_s = {link.latency_s!r}")
    if preset.device is not None:
        lines += ["", "[device]", f"memory_bytes_per_s = {preset.device.memory_bytes_per_s!r}"]
        if preset.device.operations_per_s:
            lines += ["", "[device.operations_per_s]"]
            lines += [f"{name} = {rate!r}" for name, rate in preset.device.operations_per_s]
    return "\n".join([*lines, ""])


def _read_overhead(table: dict[str, Any], where: str) -> Overhead:
    unknown = sorted(set(table) - _OVERHEAD)
    if unknown:
        raise LayoutError(
            f"{where}: [overhead] has the key {unknown[0]!r}; it is one of {sorted(_OVERHEAD)}"
        )
    fields: dict[str, Any] = {key: table[key] for key in _OVERHEAD_NUMBERS if key in table}
    for key in _OVERHEAD_LINKS:
        if key in table:
            fields[key] = _read_link(table[key], where, f"overhead.{key}")
    kinds = table.get("collectives", {})
    if type(kinds) is not dict:
        raise LayoutError(f"{where}: [overhead] has collectives = {kinds!r}; tables were expected")
    collectives = {
        kind: _read_link(link, where, f"overhead.collectives.{kind}")
        for kind, link in kinds.items()
    }
    try:
        return Overhead(**fields, collectives=tuple(collectives.items()))
    except LayoutError as error:
        raise LayoutError(f"{where}: [overhead]: {error}") from error


def _read_device(table: dict[str, Any], where: str) -> Device:
    if "memory_bytes_per_s" not in table or not set(table) <= _DEVICE:
        raise LayoutError(
            f"{where}: [device] has the keys {sorted(table)}; memory_bytes_per_s, and where known "
            "a table [device.operations_per_s], were expected"
        )
    rates = table.get("operations_per_s", {})
    if type(rates) is not dict:
        raise LayoutError(f"{where}: [device] has operations_per_s = {rates!r}; a table by type")
    try:
        # Speeds are looked up by the full names of types, and files may have short ones.
        pairs = tuple((dtype(name).name, rate) for name, rate in rates.items())
        return Device(table["memory_bytes_per_s"], pairs)
    except (LayoutError, UsageError) as error:
        raise LayoutError(f"{where}: [device]: {error}") from error


def _read_link(table: object, where: str, key: str) -> Link:
    if type(table) is not dict:
        raise LayoutError(f"{where}: {key} is {table!r}; a table [{key}] was expected")
    if set(table) != _LINK:
        raise LayoutError(
            f"{where}: [{key}] has the keys {sorted(table)}; {sorted(_LINK)} were expected"
        )
    try:
        return Link(**table)
    except LayoutError as error:
        raise LayoutError(f"{where}: [{key}]: {error}") from error
