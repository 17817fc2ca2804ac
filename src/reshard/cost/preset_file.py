"""How does a TOML file write a machine, and which machines come with reshard?

::

    name = "my-cluster"
    description = "What it is"          # optional
    library = "nccl"                    # whose algorithms: a key of reshard.cost.LIBRARIES
    ranks_per_host = 8
    hosts_per_rack = 32                 # optional, with [between_racks]

    [within_host]
    bandwidth_bytes_per_s = 450e9       # of one rank, in one direction
    latency_s = 3e-6

    [between_hosts]                     # optional
    bandwidth_bytes_per_s = 50e9
    latency_s = 14e-6
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from reshard.cost.links import LEVELS
from reshard.cost.preset import Preset
from reshard.errors import LayoutError, UsageError
from reshard.topology import Link

_REQUIRED = {"name": str, "library": str, "ranks_per_host": int, "within_host": dict}
_OPTIONAL = {
    "description": str,
    "hosts_per_rack": int,
    "between_hosts": dict,
    "between_racks": dict,
}
_LINK = {"bandwidth_bytes_per_s", "latency_s"}


def shipped_presets() -> tuple[str, ...]:
    """The names of the presets that come with reshard, sorted.

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
    """The preset of a shipped name, or of a TOML file.

    Text is a path when it ends in `.toml` or holds a `/`; a `Path` always is one.

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
            f"{', '.join(shipped_presets())}; write the path of a file of your own with its "
            "ending .toml"
        )
    return _shipped(text)


@cache
def _shipped(name: str) -> Preset:
    file = resources.files("reshard.cost") / "presets" / f"{name}.toml"
    return read_preset(file.read_bytes(), f"{name}.toml")


def read_preset(content: bytes, where: str) -> Preset:
    """The preset that a file's bytes write; `where` is what to call it in errors.

    Raises LayoutError or UsageError, see `load_preset`.
    """
    try:
        table = tomllib.loads(content.decode())
    except ValueError as error:
        raise LayoutError(f"{where} is not TOML: {error}") from error
    known = _REQUIRED | _OPTIONAL
    for key, value in table.items():
        if key not in known:
            raise LayoutError(f"{where}: unknown key {key!r}; it is one of {', '.join(known)}")
        if type(value) is not known[key]:
            raise LayoutError(f"{where}: {key} is {value!r}; {known[key].__name__} was expected")
    for key in _REQUIRED:
        if key not in table:
            raise LayoutError(f"{where} has no {key!r}; add it")
    links = {key: _link(table[key], where, key) for key in LEVELS if key in table}
    fields: dict[str, Any] = {"description": ""} | table | links
    try:
        return Preset(**fields)
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from error


def _link(table: dict[str, object], where: str, key: str) -> Link:
    if set(table) != _LINK:
        raise LayoutError(
            f"{where}: [{key}] has the keys {sorted(table)}; {sorted(_LINK)} were expected"
        )
    try:
        return Link(**table)  # type: ignore[arg-type]
    except LayoutError as error:
        raise LayoutError(f"{where}: [{key}]: {error}") from error
