"""The formats of checkpoints, by name.

The formats of this package are rows of a table, each imported when it may match a path.
Installed packages add formats by the entry points `reshard.formats` (`reshard.plugins`), and
programs by `register_format`. No other module has a list of formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from reshard.errors import UsageError
from reshard.plugins import FORMATS, Plugin, describe_broken, load_plugins

if TYPE_CHECKING:
    from reshard.checkpoint.formats.format import Capability, CheckpointFormat, Listing

# The shipped formats in the order of detection. `safetensors` is last: it accepts any single file.
# A command imports only the formats that may match its source and target: each row has the
# module with a `FORMAT`, and names in a folder, the name of a single file, and names of files that
# belong to its checkpoints. Without such a name, `detect` and `has_file` are False. `*` is any
# text, and "!" negates.
_STEPS = "latest_checkpointed_iteration.txt"
_DEEPSPEED_FILES = "*model_states.pt *optim_states.pt"
_DEEPSPEED = f"latest latest_universal {_DEEPSPEED_FILES}"
_SHIPPED: dict[str, tuple[str, str, str, str]] = {
    "torch-dist": ("megatron.torch_dist", f"{_STEPS} metadata.json .metadata", "", "*.distcp"),
    "megatron-legacy": (
        "megatron.legacy",
        f"{_STEPS} mp_rank_*",
        "",
        "model_optim_rng.pt model_rng.pt distrib_optim.pt",
    ),
    "megatron-fsdp": ("megatron.fsdp_dtensor", f"{_STEPS} .metadata", "", ""),
    "torch-dcp": (
        "torch_dcp",
        ".metadata __*.metadata",
        ".metadata __*.metadata",
        "*.distcp __*.metadata",
    ),
    "orbax": ("orbax", "_METADATA checkpoint", "_METADATA manifest.ocdbt", ""),
    "deepspeed-zero1": ("deepspeed:ZERO1", _DEEPSPEED, "", _DEEPSPEED_FILES),
    "deepspeed-zero3": ("deepspeed:ZERO3", _DEEPSPEED, "", _DEEPSPEED_FILES),
    "deepspeed-universal": ("deepspeed:UNIVERSAL", _DEEPSPEED, "", _DEEPSPEED_FILES),
    "vllm-sharded-state": ("vllm_sharded_state", "model-*-part-*.safetensors", "", "*.safetensors"),
    "sharded-safetensors": ("safetensors.sharded", "*.safetensors", "*", "*.safetensors"),
    "rank-files": ("rank_files", "*rank* consolidated.*", "", ""),
    "torch-pickle": (
        "torch_pickle",
        "pytorch_model.bin.index.json *.bin *.pt *.pth *.ckpt",
        "!*.safetensors",
        "pytorch_model.bin.index.json",
    ),
    "safetensors": (
        "safetensors.huggingface",
        "*.safetensors model.safetensors.index.json",
        "*",
        "*.safetensors model.safetensors.index.json",
    ),
}
# Formats whose checkpoints may be in folders of any name inside the folder.
_IN_FOLDERS = frozenset({"orbax"})
# Listed here, so that the help of a command imports no format.
_READ_ONLY = frozenset({"megatron-fsdp"})
_DEFAULT_OF_SHARDS, _DEFAULT_OF_WHOLE = "sharded-safetensors", "safetensors"
_registered: list[CheckpointFormat] = []


def all_formats() -> tuple[CheckpointFormat, ...]:
    """Return all formats in the order of detection.

    Registered formats come first, then the formats of plug-ins: they may be more specific than
    ours.
    """
    return (*_added_formats(), *shipped_formats())


def _added_formats() -> tuple[CheckpointFormat, ...]:
    """Return registered formats, then the formats of plug-ins."""
    return (*_registered, *(plugin.value for plugin in _plug_in() if not plugin.problem))


def shipped_formats() -> tuple[CheckpointFormat, ...]:
    """Return the formats of this package."""
    return tuple(map(_load, _SHIPPED))


@cache
def _load(name: str) -> CheckpointFormat:
    module, _, attribute = _SHIPPED[name][0].partition(":")
    imported = import_module(f"reshard.checkpoint.formats.{module}")
    format: CheckpointFormat = getattr(imported, attribute or "FORMAT")
    return format


def detect_format(listing: Listing) -> CheckpointFormat | None:
    """Return the first format that detects a path, or None."""
    # Added formats come first: they may be more specific than ours.
    for format in _added_formats():
        if format.detect(listing):
            return format
    names = listing.names if listing.is_folder else (listing.path.name,)
    for key, (_, in_folder, as_file, _) in _SHIPPED.items():
        is_named = _any_matches(names, in_folder if listing.is_folder else as_file)
        if (is_named or (key in _IN_FOLDERS and listing.has_folders)) and (
            format := _load(key)
        ).detect(listing):
            return format
    return None


def is_format_file(name: str) -> bool:
    """Return whether a file of that name belongs to checkpoints of any format.

    >>> is_format_file("model.safetensors"), is_format_file("config.json")
    (True, False)
    """
    shipped = (key for key, (*_, files) in _SHIPPED.items() if _any_matches([name], files))
    return any(format.has_file(name) for format in (*_added_formats(), *map(_load, shipped)))


def _any_matches(names: Sequence[str], patterns: str) -> bool:
    """Return whether a name matches one of the patterns, which spaces separate.

    >>> _any_matches(["__0.metadata"], ".metadata __*.metadata"), _any_matches(["a.bin"], "!*.bin")
    (True, False)
    """
    # Without `fnmatch`, which compiles a regular expression for each pattern at each start.
    for pattern in patterns.split():
        first, *others = pattern.removeprefix("!").split("*")
        if not others:
            is_found = first in names
        else:
            last = others.pop()
            is_found = any(
                name.startswith(first)
                and name.endswith(last)
                and all(part in name for part in others)
                for name in names
            )
        if is_found != pattern.startswith("!"):
            return True
    return False


@cache
def _plug_in() -> tuple[Plugin, ...]:
    """Return the plug-ins for formats; `problem` is set for plug-ins that are not usable."""
    checked: list[Plugin] = []
    taken = {*_SHIPPED}
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
        checked.append(plugin.replace(problem=problem))
    return tuple(checked)


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
    if any(format.name == other.name for other in all_formats()):
        raise UsageError(f"there is a format {format.name!r} already; choose another name")
    _registered.append(format)


def find_format(name: str) -> CheckpointFormat | None:
    """Return the format of a name, or None if it is unknown."""
    added = next((format for format in _added_formats() if format.name == name), None)
    return _load(name) if added is None and name in _SHIPPED else added


def written_format(name: str | None, *, to_whole: bool) -> CheckpointFormat:
    """Return the format of a new checkpoint; by default the format for whole tensors or for shards.

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
    names = [format.name for format in _added_formats() if format.is_written]
    return tuple(sorted([*names, *(name for name in _SHIPPED if name not in _READ_ONLY)]))
