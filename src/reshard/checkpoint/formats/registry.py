"""The formats of checkpoints, by name.

The formats of this package are rows of a table, imported when formats are first requested.
Installed packages add formats by the entry points `reshard.formats` (`reshard.plugins`), and
programs by `register_format`. No other module has a list of formats.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from reshard.errors import UsageError
from reshard.plugins import FORMATS, Plugin, describe_broken, load_plugins

if TYPE_CHECKING:
    from reshard.checkpoint.formats.format import Capability, CheckpointFormat

# The modules with a `FORMAT`, by its name, in the order of detection. `safetensors` is last: it
# accepts any single file.
_MODULES = {
    "torch-dist": "reshard.checkpoint.formats.megatron.torch_dist",
    "megatron-legacy": "reshard.checkpoint.formats.megatron.legacy",
    "megatron-fsdp": "reshard.checkpoint.formats.megatron.fsdp_dtensor",
    "torch-dcp": "reshard.checkpoint.formats.torch_dcp",
    "orbax": "reshard.checkpoint.formats.orbax",
    "deepspeed-zero1": "reshard.checkpoint.formats.deepspeed:ZERO1",
    "deepspeed-zero3": "reshard.checkpoint.formats.deepspeed:ZERO3",
    "deepspeed-universal": "reshard.checkpoint.formats.deepspeed:UNIVERSAL",
    "vllm-sharded-state": "reshard.checkpoint.formats.vllm_sharded_state",
    "sharded-safetensors": "reshard.checkpoint.formats.safetensors.sharded",
    "rank-files": "reshard.checkpoint.formats.rank_files",
    "torch-pickle": "reshard.checkpoint.formats.torch_pickle",
    "safetensors": "reshard.checkpoint.formats.safetensors.huggingface",
}
# Listed here, so that the help of a command imports no format.
_READ_ONLY = frozenset({"megatron-fsdp"})
_DEFAULT_OF_SHARDS, _DEFAULT_OF_WHOLE = "sharded-safetensors", "safetensors"
_registered: list[CheckpointFormat] = []


def all_formats() -> tuple[CheckpointFormat, ...]:
    """Return all formats in the order of detection.

    Registered formats come first, then those of plug-ins: they may be more specific than ours.
    """
    added = (one.value for one in _plug_in() if not one.problem)
    return (*_registered, *added, *shipped_formats())


@cache
def shipped_formats() -> tuple[CheckpointFormat, ...]:
    """Return the formats of this package."""
    return tuple(map(_load, _MODULES.values()))


def _load(address: str) -> CheckpointFormat:
    module, _, name = address.partition(":")
    format: CheckpointFormat = getattr(import_module(module), name or "FORMAT")
    return format


@cache
def _plug_in() -> tuple[Plugin, ...]:
    """Return the plug-ins for formats; `problem` is set for those that are not usable."""
    found: list[Plugin] = []
    taken = {*_MODULES}
    plugins = load_plugins(FORMATS)
    if plugins:
        from reshard.checkpoint.formats.format import CheckpointFormat
    for plugin in plugins:
        value, problem = plugin.value, plugin.problem
        if not problem and not isinstance(value, CheckpointFormat):
            problem = f"{value!r} is not an instance of a class of CheckpointFormat"
        elif not problem and value.name in taken:
            problem = f"there is a format {value.name!r} already"
        elif not problem:
            taken.add(value.name)
        found.append(plugin.replace(problem=problem))
    return tuple(found)


def describe_broken_formats() -> str:
    """Return the text that an error about formats adds for plug-ins that could not be used."""
    return describe_broken(_plug_in())


def register_format(format: CheckpointFormat) -> None:
    """Add a format, for opening checkpoints and as the `format` of a conversion.

    Raises:
        UsageError: an object that is not a format, or a name that is taken.
    """
    from reshard.checkpoint.formats.format import CheckpointFormat

    if not isinstance(format, CheckpointFormat):
        raise UsageError(f"the format {format!r}; give an instance of a class of CheckpointFormat")
    if any(format.name == known.name for known in all_formats()):
        raise UsageError(f"there is a format {format.name!r} already; choose another name")
    _registered.append(format)


def find_format(name: str) -> CheckpointFormat | None:
    """Return the format of a name, or None if it is unknown."""
    return next((format for format in all_formats() if format.name == name), None)


def written_format(name: str | None, *, to_whole: bool) -> CheckpointFormat:
    """Return the format of a new checkpoint; by default that for whole tensors or for shards.

    Raises:
        UsageError: an unknown or a read-only format.
    """
    if name is None:
        name = _DEFAULT_OF_WHOLE if to_whole else _DEFAULT_OF_SHARDS
    format = find_format(name)
    if format is None or name not in written_names():
        what = "unknown format" if format is None else "read-only format"
        raise UsageError(
            f"{what} {name!r}; expected one of {', '.join(written_names())}"
            f"{describe_broken_formats()}"
        )
    return format


def written_names(*capabilities: Capability) -> tuple[str, ...]:
    """Return the names of the formats that can be written and have all of the capabilities."""
    if capabilities:
        return tuple(
            sorted(
                format.name
                for format in all_formats()
                if format.is_written and format.capabilities.issuperset(capabilities)
            )
        )
    added = (*_registered, *(one.value for one in _plug_in() if not one.problem))
    names = [format.name for format in added if format.is_written]
    return tuple(sorted([*names, *(name for name in _MODULES if name not in _READ_ONLY)]))
