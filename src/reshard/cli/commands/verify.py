"""`reshard verify`: whether two checkpoints hold the same tensors."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from reshard._validation import check_used
from reshard.checkpoint.options import CompareOptions
from reshard.cli import output
from reshard.cli.endpoints import (
    allow_copies_option,
    config_option,
    open_source,
    source_options,
    take_source_options,
)
from reshard.cli.options import as_path, json_option, options_of, quiet_option
from reshard.cli.program import DIFFERS, DONE
from reshard.cli.progress import shown_progress
from reshard.errors import UsageError
from reshard.text import bytes_text, count_text, duration_text, printable

if TYPE_CHECKING:
    from reshard.checkpoint.comparison import Comparison
    from reshard.checkpoint.contents import Checkpoint


@click.command()
@click.argument("left", type=click.Path(), callback=as_path)
@click.argument("right", type=click.Path(), callback=as_path)
@options_of(CompareOptions)
@click.option(
    "--for",
    "target_kind",
    type=click.Choice(("hf",)),
    help="Compare what `convert --for hf` would make of LEFT with the model folder RIGHT: names, "
    "ties and padding of the vocabulary.",
)
@config_option
@source_options
@allow_copies_option
@click.option(
    "--all",
    "shows_all",
    is_flag=True,
    help=f"List all differences. [default: the first {output.MAX_LISTED}]",
)
@json_option
@quiet_option
def verify(
    left: str,
    right: str,
    target_kind: str | None,
    config: str | None,
    shows_all: bool,
    as_json: bool,
    quiet: bool,
    allow: tuple[str, ...],
    **arguments: Any,
) -> int:
    """Check whether LEFT and RIGHT have the same tensors.

    Every byte of both is read and compared, whatever the layouts and the formats are; names,
    dtypes and shapes are compared too. The exit code is 0 if they are the same, and 1 if they
    differ. The first differences are listed, with their number by kind; --all lists all, and so
    does --json.

    With --left-names, --right-names or --recipe, tensors are compared under the recipe's own names,
    and fused tensors by their members. If experts are separate on one side and stacked on the
    other, --recipe auto recognises it.

    --source-mesh, --source-rule and --source-recipe describe how LEFT is sharded, if its files do
    not.

    Copies of a part in the files of several ranks that differ from each other are differences too;
    --check-copies sets how they are compared, and --allow differing-copies accepts them.

    --select, --dtype, --adapter, --source-layout, --strip-prefix and --rename apply to LEFT, as in
    the conversion that made RIGHT from it; --include and --exclude then select from LEFT, and
    otherwise from both. With --for hf all options of names apply to LEFT, and the config.json of
    RIGHT, or --config, is used.

    \b
    Examples:
      reshard verify llama-3-8b llama-tp4
      reshard verify llama-3-8b llama-megatron --right-names megatron
      reshard verify llama-3-8b llama-tp4 --quiet && echo same
      reshard verify llama-3-8b llama-tp4 --recipe auto
      reshard verify llama-megatron llama-3-8b --for hf

    \b
    Keys of --json:
      left, right, same, compared_bytes, seconds_s
      differences [{tensor, problem, elements, first_index}]
      digests {tensor: digest} (of the tensors that are the same), notes
    """
    from reshard.checkpoint.comparison import compare
    from reshard.checkpoint.pretrained.conversion import compare_pretrained

    check_used("--all", not (shows_all and quiet), "with --quiet nothing is listed")
    began_s = time.monotonic()
    source_cut = take_source_options(arguments)
    first = open_source(left, **source_cut, allow=allow)
    second = open_source(right, check_copies=source_cut["check_copies"], allow=allow)
    options = CompareOptions(**arguments)
    # With any of these options, the hints about other names would repeat what was given.
    are_named = options.is_by_recipe or target_kind is not None
    if target_kind is not None and options.right_names is not None:
        raise UsageError("--right-names with --for hf: RIGHT has the architecture's own names")
    if target_kind is None and config is not None:
        raise UsageError("--config is for --for hf; --recipe auto reads that of RIGHT or LEFT")
    with shown_progress("comparing", quiet) as progress:
        if target_kind is None:
            comparison = compare(first, second, options.replace(progress=progress))
        else:
            del arguments["right_names"]
            names = arguments.pop("left_names")
            comparison = compare_pretrained(
                first, second, progress=progress, config=config, source_names=names, **arguments
            )
    seconds_s = time.monotonic() - began_s
    if as_json:
        output.write_json(_as_json(left, right, comparison, seconds_s))
    elif not quiet:
        output.write("\n".join(_as_text(comparison, seconds_s, shows_all)))
        if not (comparison.is_same or are_named) and _is_one_stacked(first, second):
            output.write(
                "one side has stacked experts, the other not: compare them with --recipe auto"
            )
        elif not (comparison.is_same or are_named or comparison.digests) and _have_other_names(
            comparison
        ):
            output.write(
                "no name is in both: --left-names and --right-names compare under a recipe's "
                "names, --for hf what LEFT is as a model folder"
            )
    return DONE if comparison.is_same else DIFFERS


def _is_one_stacked(left: str | Checkpoint, right: str | Checkpoint) -> bool:
    """Return whether only the left or only the right checkpoint has stacked experts."""
    from reshard.checkpoint.formats.opening import open_checkpoint, read_config
    from reshard.checkpoint.naming.renaming import find_stacked_names
    from reshard.recipes.library import choose_recipe

    opened = [open_checkpoint(side) if isinstance(side, str) else side for side in (left, right)]
    config = next((c for c in map(read_config, opened) if c is not None), None)
    recipe = choose_recipe(config) if config is not None else None
    stacked = [find_stacked_names(side, recipe, config) is not None for side in opened]
    return sum(stacked) == 1


def _have_other_names(comparison: Comparison) -> bool:
    """Return whether every difference is a tensor that only one side has."""
    tensors = [difference for difference in comparison.differences if difference.is_tensor]
    return bool(tensors) and all(tensor.kind.startswith("only in ") for tensor in tensors)


def _as_text(comparison: Comparison, seconds_s: float, shows_all: bool) -> list[str]:
    shown = comparison.differences if shows_all else comparison.differences[: output.MAX_LISTED]
    lines = [
        f"{printable(difference.name)} {printable(difference.problem)}"
        if difference.elements is None
        else f"{printable(difference.name)}: {difference.problem}"
        for difference in shown
    ]
    if more := len(comparison.differences) - len(shown):
        lines.append(f"... and {count_text(more, 'more difference')}; --all lists them")
    lines += output.noted(comparison.notes)
    compared = f"compared {bytes_text(comparison.compared_bytes)} in {duration_text(seconds_s)}"
    same = len(comparison.digests)
    if comparison.is_same:
        return [*lines, f"the same {count_text(same, 'tensor')}, bit for bit; {compared}"]
    tensors = sum(difference.is_tensor for difference in comparison.differences)
    values = len(comparison.differences) - tensors
    differ = f"{tensors} of {count_text(same + tensors, 'tensor')} differ"
    if values:
        others = count_text(values, "value")
        differ = f"{differ}, and {others}" if tensors else f"{others} differ{'s' * (values == 1)}"
    kinds = Counter(difference.kind for difference in comparison.differences)
    counted = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    return [*lines, f"{differ}: {counted}; {compared}"]


def _as_json(left: str, right: str, comparison: Comparison, seconds_s: float) -> dict[str, Any]:
    return {
        "left": left,
        "right": right,
        "same": comparison.is_same,
        "compared_bytes": comparison.compared_bytes,
        "seconds_s": seconds_s,
        "differences": [
            {
                "tensor": difference.name,
                "problem": difference.problem,
                "elements": difference.elements,
                "first_index": None
                if difference.first_index is None
                else list(difference.first_index),
            }
            for difference in comparison.differences
        ],
        "digests": comparison.digests,
        "notes": list(comparison.notes),
    }
