"""Options that several commands share. Parameters have the names they have in the library."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

import click

from reshard.binding import REPLICAS
from reshard.checkpoint.contents import CHECK_COPIES
from reshard.checkpoint.files.resident_memory import DEFAULT_EXTRA_BYTES
from reshard.checkpoint.formats.registry import describe_broken_formats, written_names
from reshard.checkpoint.training.styles import STYLES
from reshard.elements import CAST_TYPES, QUANTIZATIONS, cast_type
from reshard.errors import UsageError
from reshard.recipes.overrides import ALLOWANCES, DIFFERING_COPIES, FORMER_ALLOWANCES

Command = TypeVar("Command", bound=Callable[..., Any])

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)", re.ASCII)


def size_bytes(text: str) -> int:
    """The bytes that a size means: a number, with or without a unit.

    Raises:
        UsageError: another unit, no number, or less than one byte.

    >>> size_bytes("256MiB"), size_bytes("1GB"), size_bytes("1.5GiB"), size_bytes("4096")
    (268435456, 1000000000, 1610612736, 4096)
    """
    match = _SIZE.fullmatch(text.strip())
    units = {unit.casefold(): factor for unit, factor in _UNITS.items()}
    factor = units.get(match[2].casefold()) if match else None
    # A Fraction is exact; a float would lose bytes of large sizes.
    size = int(Fraction(match[1]) * factor) if match and factor else 0
    if size < 1:
        raise UsageError(
            f"{text!r} is no size; write 256MiB, 1.5GiB (units of 1024), 1GB (of 1000), or a "
            "number of bytes"
        )
    return size


def as_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """The callback of an option that is a size. Raises `click.BadParameter`."""
    if value is None:
        return None
    try:
        return size_bytes(value)
    except UsageError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def as_path(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """The callback of a path: an empty one is an unset variable of a shell, not a folder.

    Raises `click.BadParameter`.
    """
    if not value:
        raise click.BadParameter(
            "an empty path; write `.` for the folder you are in", context, parameter
        )
    return value


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout instead of text."
)
quiet_option = click.option(
    "--quiet", "-q", is_flag=True, help="Show no progress and no report; errors are still shown."
)
threads_option = click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="At most N threads per process. [default: 4 for local files, 16 for a URL]",
)
memory_option = click.option(
    "--memory",
    "extra_bytes",
    callback=as_size,
    default=f"{DEFAULT_EXTRA_BYTES // 1024**2}MiB",
    show_default=True,
    metavar="SIZE",
    help="Limit on the memory that the run allocates for buffers.",
)
dry_run_option = click.option(
    "--dry-run",
    is_flag=True,
    help="List what would be written, tensor by tensor, and write nothing. Fails for the same "
    "reasons as the run would.",
)
staging_option = click.option(
    "--staging",
    metavar="FOLDER",
    help="The local folder for files that are to be uploaded. [default: in the user's cache]",
)
_RUN_OPTIONS = (
    memory_option,
    threads_option,
    click.option(
        "--overwrite",
        is_flag=True,
        help="Replace the checkpoint at TARGET, once the new one is complete.",
    ),
    click.option(
        "--discard-others",
        is_flag=True,
        help="With --overwrite: delete also files that are no part of the checkpoint at TARGET.",
    ),
    click.option(
        "--restart", is_flag=True, help="Discard what an interrupted run left, and start over."
    ),
    staging_option,
    click.option(
        "--wait-for-ranks",
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        help="How long to wait until all processes of torchrun have started. [default: 300]",
    ),
)


class FormatChoice(click.Choice[str]):
    """The name of a format that is written; the error has plug-ins that could not be loaded."""

    def get_invalid_choice_message(self, value: object, ctx: click.Context | None) -> str:
        """The message for a name that is none."""
        return super().get_invalid_choice_message(value, ctx) + describe_broken_formats()


def check_picture(drawn: str | None, as_json: bool, quiet: bool = False) -> None:
    """Refuse a picture in JSON, or where nothing is shown. Raises `click.UsageError`."""
    for option, is_given in (("--json", as_json), ("--quiet", quiet)):
        if drawn is not None and is_given:
            raise click.UsageError(
                f"--picture draws text and {option} writes none; leave one of them out",
                click.get_current_context(),
            )


rule_option = click.option(
    "--rule",
    "rules",
    multiple=True,
    metavar="PATTERN=SPEC",
    help="How to cut the tensors whose names match ('*.weight=tp, -'). Repeatable; the first "
    "rule that matches applies.",
)
option_option = click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set an option of the recipe: a cut (vocabulary=pad128, layer=bytes), or the mesh axes "
    "for one of its axes ('ep=dp tp'). Repeatable; see `reshard recipe show NAME`.",
)
allow_option = click.option(
    "--allow",
    multiple=True,
    type=click.Choice((*ALLOWANCES, *FORMER_ALLOWANCES)),
    metavar=f"[{'|'.join(ALLOWANCES)}]",
    callback=lambda context, parameter, words: tuple(FORMER_ALLOWANCES.get(w, w) for w in words),
    help="Accept an error: cuts that ranks cannot compute with (uncomputable), tensors that no "
    "rule matches or the architecture lacks (unknown), missing tensors of the architecture "
    "(incomplete), copies that differ, of which the lowest rank's are read (differing-copies), "
    "quantized weights without their scales, which stay as they are (unscaled), a mesh axis that "
    "shards nothing (replicas). Repeatable.",
)


class CastTypeChoice(click.Choice[str]):
    """A type to cast to, by its short name, or by that of PyTorch and config.json."""

    def __init__(self) -> None:
        super().__init__([name for name in CAST_TYPES if len(name) < 5])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the short name, which journals have. Raises `click.BadParameter`."""
        try:
            full = cast_type(value).name
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return next(name for name in self.choices if CAST_TYPES[name] == full)


dtype_option = click.option(
    "--dtype",
    type=CastTypeChoice(),
    help="Cast floating-point tensors, except those of quantised weights and the float32 tensors "
    "of a 16-bit model.",
)
source_layout_option = click.option(
    "--source-layout",
    metavar="FILE",
    help="Convert an engine's parameters (sharded_state) back to the model's tensors, by a layout "
    "file of `reshard recipe derive`. [default: the one beside the source]",
)
adapter_option = click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="PATH",
    help="Merge a PEFT adapter into the weights: a folder with adapter_config.json. Repeatable; "
    "adapters are merged in order.",
)
select_option = click.option(
    "--select",
    metavar="PREFIX",
    help="Of several models in one checkpoint, take the one under this prefix (ema_state_dict), "
    "and remove the prefix from its names. Applied before --include.",
)
_SELECTION_OPTIONS = (
    select_option,
    click.option(
        "--include",
        multiple=True,
        metavar="GLOB",
        help="Take only tensors and values whose names match ('model.*'). Repeatable.",
    ),
    click.option(
        "--exclude",
        multiple=True,
        metavar="GLOB",
        help="Leave out tensors and values whose names match. Repeatable.",
    ),
    click.option(
        "--strip-prefix",
        multiple=True,
        metavar="PREFIX",
        help="Remove a prefix from the names that have it (model.). Repeatable; applied in order.",
    ),
    click.option(
        "--rename",
        multiple=True,
        metavar="PATTERN=NAME",
        help="Rename: each `*` stands for the same text on both sides "
        "('layers.*.w1=model.layers.*.gate'); use {1} {2} to change their order. Repeatable; the "
        "first pattern that matches applies.",
    ),
)
_CONVERSION_OPTIONS = (
    click.option(
        "--to",
        metavar="MESH",
        help="The target: a mesh (tp=2,dp=2), a number of ranks (3), or `full` for whole tensors. "
        "[default: layouts, format and number of files stay]",
    ),
    click.option(
        "--mesh-order",
        metavar="AXES",
        help="The axes of --to, from the one along which ranks are consecutive to the slowest "
        "(tp,pp,dp), or `text` for the order of --to, the last one fastest. [default: tp, cp, ep, "
        "fsdp, dp, pp, then others]",
    ),
    click.option(
        "--layout",
        metavar="FILE",
        help="Instead of --to: cut as an engine's own loader reads weights, by a layout file of "
        "`reshard recipe derive`.",
    ),
    *_SELECTION_OPTIONS,
    rule_option,
    click.option(
        "--recipe",
        metavar="NAME|FILE|auto|none",
        help="Rules for a model family: a shipped recipe, a TOML file, `auto` (by config.json), or "
        "`none`. [default for a mesh without --rule, --strategy and --layout: auto]",
    ),
    option_option,
    allow_option,
    click.option(
        "--source-names",
        metavar="NAME",
        help="The naming convention of the source, with its fused tensors: one of the recipe, such "
        "as megatron. [default: the recipe's own, Hugging Face's]",
    ),
    click.option(
        "--target-names",
        metavar="NAME",
        help="The naming convention of the target: megatron, vllm.",
    ),
    dtype_option,
    click.option(
        "--dequantize",
        is_flag=True,
        help="Dequantize weights, to --dtype or to the type in config.json.",
    ),
    click.option(
        "--quantize",
        type=click.Choice(QUANTIZATIONS),
        help="Quantize the layers' matrices to float8, with a scale per block of 128 by 128.",
    ),
    source_layout_option,
    adapter_option,
    click.option(
        "--strategy",
        metavar="NAME",
        help="Instead of rules, place tensors by a policy: simple (whole, in turn), balanced "
        "(whole, by bytes), sharded (rows over all ranks), recipe (by config.json). [default for a "
        "number: simple]",
    ),
    click.option(
        "--format",
        type=FormatChoice(written_names()),
        metavar="FORMAT",
        help=f"The target's format: {', '.join(written_names())}. [default: safetensors for "
        "`full`, else sharded-safetensors]",
    ),
    click.option(
        "--training",
        type=click.Choice([*STYLES]),
        help="Convert training state to that of another program: names, 32-bit weights, steps, "
        "groups. fsdp2: for torch.distributed.checkpoint. [default: the format's, or the source's]",
    ),
    click.option(
        "--replicas",
        type=click.Choice(REPLICAS),
        help="Store equal shards once, or a copy for every rank, so that a rank's file is enough "
        "for that rank. [default: every for sharded-safetensors, else once]",
    ),
    click.option(
        "--max-file",
        "most_file_bytes",
        callback=as_size,
        metavar="SIZE",
        help="With `--to full`: the largest size of a file.",
    ),
)


def selection_options(command: Command) -> Command:
    """The options of what is taken of a checkpoint, named as the parameters of `select`."""
    for option in reversed(_SELECTION_OPTIONS):
        command = option(command)
    return command


def run_options(command: Command) -> Command:
    """The options of how a conversion is run, named as the parameters of `run_conversion`."""
    for option in reversed(_RUN_OPTIONS):
        command = option(command)
    return command


check_copies_option = click.option(
    "--check-copies",
    type=click.Choice(CHECK_COPIES),
    default=CHECK_COPIES[0],
    show_default=True,
    help="Compare the copies that several ranks hold of a part: by checksums in the files and "
    "samples of at most 1 % of the bytes, every byte, or not at all.",
)
allow_copies_option = click.option(
    "--allow",
    multiple=True,
    type=click.Choice([DIFFERING_COPIES]),
    help="Accept copies that differ: those of the lowest rank are read.",
)
_SOURCE_CUT_OPTIONS = (
    click.option(
        "--source-mesh",
        metavar="MESH",
        help="The mesh that wrote the source, where its files lack an axis, such as for plain "
        "tensors in one file per rank: tp=2.",
    ),
    click.option(
        "--source-rule",
        "source_rules",
        multiple=True,
        metavar="GLOB=SPEC",
        help="How --source-mesh cut the tensors: '*.weight=tp, -'. Repeatable; the first rule that "
        "matches applies.",
    ),
    click.option(
        "--source-recipe",
        metavar="NAME|FILE|auto",
        help="Instead of --source-rule: the rules of a recipe.",
    ),
    check_copies_option,
)


def source_cut_options(command: Command) -> Command:
    """Add the options of how a source is opened (`sources.open_source`): cuts, and copies."""
    for option in reversed(_SOURCE_CUT_OPTIONS):
        command = option(command)
    return command


def conversion_options(command: Command) -> Command:
    """The options of what to convert to, named as the parameters of `plan_conversion`."""
    # Decorators apply from the last to the first: reversed, the help lists them in order.
    for option in reversed(_CONVERSION_OPTIONS):
        command = option(command)
    return command
