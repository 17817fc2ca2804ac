"""Sources and targets of commands: their options, opening a source, planning a conversion.

`plan` and `convert` show the same of a planned conversion, by the functions at the end.

`--for` names a program whose format determines what is written. It takes some of the other options;
any other option is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from reshard.checkpoint.contents import CHECK_COPIES
from reshard.checkpoint.options import PRETRAINED_OPTIONS, SELECTION_OPTIONS
from reshard.cli import output
from reshard.cli.options import Command
from reshard.errors import UsageError
from reshard.mesh import DeviceMesh
from reshard.recipes.overrides import DIFFERING_COPIES
from reshard.text import bytes_text, count_text

if TYPE_CHECKING:
    from reshard.checkpoint.contents import Checkpoint
    from reshard.checkpoint.conversion.conversion import Conversion


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
_OPTIONS = (
    click.option(
        "--source-mesh",
        metavar="MESH",
        help="The mesh that wrote the source, if its files lack an axis, as plain tensors in a "
        "file per rank do: tp=2.",
    ),
    click.option(
        "--source-rule",
        "source_rules",
        multiple=True,
        metavar="GLOB=SPEC",
        help="How --source-mesh sharded the tensors: '*.weight=tp, -'. Repeatable; the first rule "
        "that matches applies.",
    ),
    click.option(
        "--source-recipe",
        metavar="NAME|FILE|auto",
        help="Instead of --source-rule: the rules of a recipe.",
    ),
    check_copies_option,
)


def source_options(command: Command) -> Command:
    """Add the options of `open_source`: how the source is sharded, and how copies are compared."""
    # Decorators apply from the last to the first: reversed, the help lists them in order.
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_source_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of `source_options` from a command's arguments, and return them."""
    names = ("source_mesh", "source_rules", "source_recipe", "check_copies")
    return {name: arguments.pop(name) for name in names}


def open_selected_source(path: str, select: str | None, **source_cut: Any) -> Checkpoint:
    """Open the checkpoint at a path, or the model of it that `--select` names.

    Raises:
        UsageError: rules or a recipe without a mesh; a prefix that no tensor has.
    """
    from reshard.checkpoint.formats.opening import open_checkpoint

    source = open_source(path, **source_cut) if source_cut else path
    opened = open_checkpoint(source) if isinstance(source, str) else source
    if select is None:
        return opened
    from reshard.checkpoint.naming.selection import TensorSelection, select_from

    return select_from(opened, TensorSelection(select=select))


def open_source(
    path: str,
    source_mesh: str | None = None,
    source_rules: tuple[str, ...] = (),
    source_recipe: str | None = None,
    check_copies: str = CHECK_COPIES[0],
    allow: Iterable[str] = (),
) -> str | Checkpoint:
    """Open the checkpoint at a path as the options specify; return the path if they do not.

    Raises:
        UsageError: rules or a recipe without a mesh.
    """
    from reshard.checkpoint.formats.opening import open_checkpoint

    if source_mesh is None:
        if source_rules or source_recipe is not None:
            option = "--source-rule" if source_rules else "--source-recipe"
            raise UsageError(f"{option} without --source-mesh; give the mesh of the ranks: tp=2")
        if check_copies == CHECK_COPIES[0] and not allow:
            return path
    return open_checkpoint(
        path,
        mesh=source_mesh,
        rules=source_rules,
        recipe=source_recipe,
        check_copies=check_copies,
        allow=allow,
    )


_SHARDED_STATE = "vllm-sharded-state"


def _plan_for_hf(
    source: str,
    target: str,
    to: str | None = None,
    most_file_bytes: int | None = None,
    **others: Any,
) -> Conversion:
    from reshard.checkpoint.pretrained.conversion import MAX_FILE_BYTES, plan_for_pretrained

    if to not in (None, "full"):
        raise UsageError(
            f"--for hf with --to {to}: its tensors are whole; leave --to out, or --for hf for "
            "files of ranks"
        )
    most = MAX_FILE_BYTES if most_file_bytes is None else most_file_bytes
    return plan_for_pretrained(source, target, most_file_bytes=most, **others)


def _plan_for_vllm(
    source: str | Checkpoint,
    target: str,
    to: str | None = None,
    layout: str | None = None,
    dtype: str | None = None,
    most_file_bytes: int | None = None,
    allow: tuple[str, ...] = (),
    **selected: Any,
) -> Conversion:
    from reshard.checkpoint.engines.conversion import plan_for_vllm
    from reshard.checkpoint.formats.opening import open_checkpoint
    from reshard.checkpoint.naming.selection import TensorSelection, select_from
    from reshard.checkpoint.training.model_sets import expect_one_model, find_model_sets
    from reshard.checkpoint.training.state import shapes_without_state
    from reshard.elements import cast_type
    from reshard.recipes.engine_layouts.document import read_layout_file
    from reshard.recipes.engine_layouts.engines import derive_layout
    from reshard.recipes.rank_order import describe_order

    selection = TensorSelection(**selected)
    if (to is None) == (layout is None):
        raise UsageError(
            "--for vllm takes the engine's parallelism (--to tp=8), or a file of `reshard "
            "recipe derive` (--layout): give one of them"
        )
    model = source if isinstance(source, str) else str(source.folder)
    source = open_checkpoint(source) if isinstance(source, str) else source
    chosen = select_from(source, selection)
    expect_one_model(source.folder, find_model_sets(shapes_without_state(chosen)))
    if layout is not None:
        if dtype is not None:
            raise UsageError(
                f"--dtype {dtype} with --layout, which has the types of all parameters; derive "
                "another one (`reshard recipe derive --dtype`), or give --to instead"
            )
        derived = read_layout_file(layout)
    else:
        name = None if dtype is None else cast_type(dtype).name
        sources = None
        if selection:
            sources = {
                key: (tensor.dtype.name, tensor.shape) for key, tensor in chosen.tensors.items()
            }
        derived = derive_layout("vllm", model, to or "", dtype=name, sources=sources)
    planned = plan_for_vllm(
        source,
        target,
        derived,
        most_file_bytes=most_file_bytes,
        allow=allow,
        selection=selection,
    )
    if to is None:
        return planned
    order = describe_order(derived.mesh, DeviceMesh.parse(to), can_change=False)
    notes = (*planned.source.notes, *order)
    return planned.replace(source=planned.source.replace(notes=notes))


# By name: the options that a target takes, why it takes no others, the function that plans it, and
# the format that it writes, which may be given too.
_TARGETS: dict[str, tuple[tuple[str, ...], str, Callable[..., Conversion], str]] = {
    "hf": (
        (
            *("to", "config", "recipe", "source_names", "most_file_bytes"),
            *PRETRAINED_OPTIONS,
        ),
        "a model folder has whole weights, in the names and files that transformers reads",
        _plan_for_hf,
        "safetensors",
    ),
    "vllm": (
        ("to", "layout", "dtype", "most_file_bytes", "allow", *SELECTION_OPTIONS),
        "the engine's own loader determines what its ranks hold",
        _plan_for_vllm,
        _SHARDED_STATE,
    ),
}

for_option = click.option(
    "--for",
    "target_kind",
    type=click.Choice(tuple(_TARGETS)),
    help="Write what a program loads. hf: a model folder for `from_pretrained` of transformers, of "
    "any training checkpoint: weights alone, in the architecture's names, with config.json. vllm: "
    "what every rank of vLLM loads as sharded_state, for --to tp=8 (with --dtype for another type "
    "than vLLM chooses) or --layout.",
)
config_option = click.option(
    "--config",
    metavar="DIR|FILE",
    help="For --for hf: the folder of the model that was trained, or its config.json, if SOURCE "
    "has none; its tokenizer files are copied too.",
)


def plan_from_options(
    source: str, target: str, target_kind: str | None, config: str | None, **arguments: Any
) -> Conversion:
    """Plan the conversion that the options of a command specify.

    Raises:
        UsageError: an option that the target does not take.
    """
    from reshard.checkpoint.conversion.plan import plan_conversion

    source_cut = take_source_options(arguments)
    # Copies belong to the source, whatever the target takes.
    allow = arguments.get("allow", ())
    arguments["allow"] = tuple(word for word in allow if word != DIFFERING_COPIES)
    about_copies = [word for word in allow if word == DIFFERING_COPIES]
    opened = open_source(source, **source_cut, allow=about_copies)
    format = arguments.get("format")
    is_for_ranks = arguments.get("to") not in (None, "full") or arguments.get("layout") is not None
    if target_kind is None and format == _SHARDED_STATE and is_for_ranks:
        # Nothing else writes it for ranks.
        target_kind = "vllm"
    if target_kind is None:
        if config is not None:
            raise UsageError("--config is for --for hf; a recipe reads the config.json of SOURCE")
        return plan_conversion(opened, target, **arguments)
    options, reason, plan, target_format = _TARGETS[target_kind]
    if format == target_format:
        arguments["format"] = None
    # Options that were not given have one of these defaults.
    passed = {
        name: value
        for name, value in {**arguments, "config": config}.items()
        if value not in (None, (), False)
    }
    for name in passed:
        if name not in options:
            raise UsageError(
                f"--for {target_kind} with {_name_option(name)}: {reason}; leave it out, or "
                "convert twice"
            )
    return plan(opened, target, **passed)


# Norms and biases are far below this; with more, whole weights are copied for axes such as dp.
_MAX_COPY_SHARE = 0.1


def size_text(size_bytes: int, copy_bytes: int) -> str:
    """Return the size of the tensors of a conversion, and that of the copies in files of ranks."""
    copies = f" and {bytes_text(copy_bytes)} of copies" if copy_bytes else ""
    return bytes_text(size_bytes) + copies


def recipe_text(conversion: Conversion) -> str:
    """Return the recipe that shards the tensors, for the first line of a report."""
    recipe = conversion.recipe_name
    return f" by the recipe {recipe}" if recipe else ""


def matching_lines(conversion: Conversion) -> list[str]:
    """Return the lines about unmatched tensors, rules and axes, and the notes."""
    unknown, total = conversion.unknown, len(conversion.write_plan.tensors)
    lines = []
    size_bytes = int(conversion.work_items.target.tensor_bytes.sum())
    if conversion.write_plan.copy_bytes > _MAX_COPY_SHARE * size_bytes:
        lines.append("several ranks hold the same shards; --replicas once leaves their copies out")
    if unknown and len(unknown) == total:
        lines.append(
            f"replicated, no rule matched: all {count_text(total, 'tensor')}; give --recipe or "
            "--rule to shard them"
        )
    else:
        lines += output.listing("replicated, no rule matched", unknown)
        lines += output.noted(conversion.axis_notes)
    lines += output.listing("rules that decided no tensor", map(str, conversion.unused_rules))
    return lines + output.noted(conversion.plan_notes)


def matching_json(conversion: Conversion) -> dict[str, Any]:
    """Return what `matching_lines` describes, for `--json`."""
    assignment = conversion.assignment
    return {
        "unknown": list(conversion.unknown),
        "unused_rules": [str(rule) for rule in conversion.unused_rules],
        "unused_recipe_rules": [
            str(rule) for rule in (assignment.unused_recipe_rules if assignment else ())
        ],
        "unused_axes": list(assignment.unused_axes if assignment else ()),
        "notes": list(conversion.plan_notes),
    }


def _name_option(parameter: str) -> str:
    """Return the flag of a parameter."""
    context = click.get_current_context(silent=True)
    for item in context.command.params if context is not None else ():
        if item.name == parameter:
            return item.opts[0]
    return f"--{parameter.replace('_', '-')}"
