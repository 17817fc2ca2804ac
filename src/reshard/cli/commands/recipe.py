"""`reshard recipe`: recipes, their shardings of a checkpoint, and layouts of engines.

`show` lists recipes, `check` applies a recipe and can compare it with an engine's layout, and
`derive` writes the layout that an engine's own loader has.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reshard.checkpoint.options import SHORT_CAST_TYPES, ConversionRequest
from reshard.cli import output
from reshard.cli.endpoints import open_selected_source
from reshard.cli.options import as_path, cast_type_choice, json_option, options_of
from reshard.cli.program import DIFFERS, DONE, Commands
from reshard.errors import UsageError
from reshard.mesh import DeviceMesh
from reshard.recipes.overrides import ALLOWANCES, IDLE_AXES
from reshard.recipes.rank_order import describe_order, order_axes
from reshard.text import bytes_text, count_text, duration_text, printable, rank_text, table

if TYPE_CHECKING:
    from reshard.checkpoint.contents import Checkpoint
    from reshard.layout import Layout
    from reshard.recipes.assignment import Assignment
    from reshard.recipes.engine_layouts import EngineLayout
    from reshard.recipes.recipe import Recipe
    from reshard.recipes.rules import Rule


@click.group(cls=Commands, invoke_without_command=True)
@click.pass_context
def recipe(context: click.Context) -> int:
    """Show recipes, and apply them to a checkpoint.

    \b
    Examples:
      reshard recipe show
      reshard recipe show mixtral
      reshard recipe check llama-3-8b --to tp=4,pp=2
    """
    if context.invoked_subcommand is None:
        output.write(context.get_help())
    return DONE


@recipe.command()
@click.argument("name", required=False, metavar="[NAME|FILE]")
@json_option
def show(name: str | None, as_json: bool) -> int:
    """Show the rules and options of a recipe, or list all recipes.

    \b
    Examples:
      reshard recipe show
      reshard recipe show deepseek_v3
      reshard recipe show ./mine.toml --json

    \b
    Keys of --json:
      recipes [{name, description, model_types}] (without a name), or
      name, description, model_types, axes, storage, stand_ins, cuts
      coupled {of each: the counts of its members, the unit first}
      sizes {of each: its expression}
      numbers {of each: axis, count, cut, beyond_last, behind}
      rules [{pattern, spec, at, when, note}]
    """
    from reshard.recipes.library import known_recipes, load_recipe

    if name is None:
        recipes = [load_recipe(recipe_name) for recipe_name in known_recipes()]
        if as_json:
            output.write_json({"recipes": [_summary_json(item) for item in recipes]})
        else:
            rows = [(item.name, ", ".join(item.model_types), item.description) for item in recipes]
            output.write(table(rows, ("recipe", "model types", "description")))
        return DONE
    shown = load_recipe(name)
    if as_json:
        output.write_json(_recipe_json(shown))
    else:
        output.write("\n".join(_recipe_lines(shown)))
    return DONE


@recipe.command()
@click.argument("checkpoint", type=click.Path(), callback=as_path)
@click.option("--to", required=True, metavar="MESH", help="The mesh to shard over (tp=2,pp=2).")
@click.option(
    "--recipe",
    "name",
    metavar="NAME|FILE|auto",
    help="A shipped recipe, a TOML file, or by config.json. [default: auto, none with --rule]",
)
@options_of(ConversionRequest, "select", "rules", "options")
@click.option(
    "--against",
    metavar="ENGINE|FILE",
    help="Compare with what an engine's ranks read: its name, or a file of `recipe derive`.",
)
@options_of(ConversionRequest, "allow")
@json_option
def check(
    checkpoint: str,
    to: str,
    name: str | None,
    select: str | None,
    rules: tuple[str, ...],
    options: tuple[str, ...],
    against: str | None,
    allow: tuple[str, ...],
    as_json: bool,
) -> int:
    """Show which rule shards which tensors of CHECKPOINT, and the bytes per rank.

    Only headers are read, and nothing is written. The exit code is 1 if ranks could not compute
    with a shard, no rule matches a tensor, or a mesh axis shards nothing, unless --allow accepts
    it.

    \b
    Examples:
      reshard recipe check llama-3-8b --to tp=4,pp=2
      reshard recipe check llama-3-8b --to tp=4,pp=2 --option layer=bytes
      reshard recipe check llama-3-8b --to tp=4 --recipe llama --option vocabulary=pad128

    \b
    Keys of --json:
      path, mesh {text, axes, devices}, recipe, options, size_bytes
      rules [{pattern, spec, by_hand, tensors, size_bytes, example, cut}]
      ranks [{rank, tensors, size_bytes}]
      uncomputable, unknown, unused_rules, unused_recipe_rules, unused_axes, notes
      against {engine, version, mesh, same, differences, unread, unknown}
    """
    from reshard.checkpoint.conversion.plan import assign_tensors, find_recipe
    from reshard.recipes.recipe import parse_options
    from reshard.recipes.rules import Rule

    opened = open_selected_source(checkpoint, select)
    # Rules shard over named axes, so a number of ranks or `full` is not sufficient.
    if "=" not in to:
        raise UsageError(f"cannot read the mesh {to!r}; write axes with sizes, such as tp=2,pp=2")
    written = DeviceMesh.parse(to)
    mesh = order_axes(written)
    # Rules by hand may stand alone; without any, the recipe follows from config.json.
    by_hand = [Rule.parse(text) for text in rules]
    chosen = find_recipe(name or (None if by_hand else "auto"), opened)
    chosen_options = parse_options(options)
    if chosen is not None:
        chosen = chosen.with_options(chosen_options)
    elif chosen_options:
        raise UsageError("--option without a recipe; name the recipe with --recipe")
    # Both are shown, whether they are allowed or not.
    assignment = assign_tensors(opened, mesh, by_hand, chosen, ALLOWANCES)
    if chosen is not None:
        chosen.expect_options_read(chosen_options, mesh, assignment.matched.values())
    assignment = assignment.replace(notes=(*describe_order(mesh, written), *assignment.notes))
    described = _describe_assignment(opened, mesh, assignment, by_hand, chosen)
    compared: dict[str, Any] | None = None
    if against is not None:
        engine = find_engine_layout(against, checkpoint, mesh)
        compared = _compare_with_engine(engine, assignment.layouts)
    if as_json:
        content = {
            "path": checkpoint,
            "mesh": output.mesh_json(mesh),
            "recipe": chosen and chosen.name,
        }
        output.write_json({**content, "options": chosen_options, **described, "against": compared})
    else:
        by = f" by the recipe {chosen.name}" if chosen else ""
        with_options = f" with {', '.join(options)}" if options else ""
        total = f"{count_text(len(opened), 'tensor')}, {bytes_text(opened.size_bytes)}"
        title = f"{checkpoint} over {mesh.text}{by}{with_options}: {total}"
        lines = [printable(title), *_assignment_lines(opened, assignment, described)]
        output.write(
            "\n".join([*lines, *([] if compared is None else _comparison_lines(compared))])
        )
    idle = assignment.list_idle_axes(mesh, chosen) if chosen is not None else []
    refused = {
        "uncomputable": assignment.uncomputable,
        "unknown": assignment.unknown,
        IDLE_AXES: idle,
    }
    is_refused = any(refused[word] for word in refused.keys() - {*allow})
    is_same = compared is None or not (compared["differences"] or compared["unknown"])
    return DONE if is_same and not is_refused else DIFFERS


@recipe.command()
@click.argument("model", type=click.Path(), callback=as_path)
@click.argument("file", type=click.Path(), callback=as_path)
@click.option("--engine", required=True, metavar="NAME", help="The engine whose loader to follow.")
@click.option("--to", required=True, metavar="MESH", help="The engine's parallelism (tp=8,pp=2).")
@click.option(
    "--dtype",
    type=cast_type_choice(SHORT_CAST_TYPES),
    help="The type of the engine's parameters. [default: the engine's own choice]",
)
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@json_option
def derive(
    model: str,
    file: str,
    engine: str,
    to: str,
    dtype: str | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Write the layout of an engine's parameters to FILE, as its own loader reads MODEL.

    MODEL is a folder with config.json and a checkpoint, of which only headers are read. The layout
    is found by running the engine's own loading code. `convert --layout FILE` converts to it, and
    `recipe check --against FILE` compares it with a recipe.

    \b
    Examples:
      reshard recipe derive llama-3-8b llama-vllm.json --engine vllm --to tp=8
      reshard recipe check llama-3-8b --to tp=8 --against llama-vllm.json
      reshard convert llama-3-8b llama-tp8 --layout llama-vllm.json

    \b
    Keys of --json:
      model, file, engine, version, mesh {text, axes, devices}, size_bytes, seconds_s
      ranks [{rank, parameters, size_bytes, method, tied, notes}]
      computed {parameter: operations}, unfilled, unread, notes
    """
    from reshard.elements import cast_type
    from reshard.plans.serialization import to_json
    from reshard.recipes.engine_layouts.engines import derive_layout

    # Before the engine's loader runs, which may take minutes.
    path = Path(file)
    output.check_place(path, overwrite, "layout file", "layout.json")
    begun = time.perf_counter()
    named = None if dtype is None else cast_type(dtype).name
    layout = derive_layout(engine, model, to, dtype=named)
    taken_s = time.perf_counter() - begun
    text = to_json(layout)
    output.write_whole(path, text, overwrite, "layout file")
    if as_json:
        content = {"model": model, "file": file, "size_bytes": len(text), "seconds_s": taken_s}
        output.write_json({**content, **layout_json(layout)})
    else:
        output.write("\n".join(layout_lines(model, file, layout, len(text), taken_s)))
    return DONE


def _describe_assignment(
    checkpoint: Checkpoint,
    mesh: DeviceMesh,
    assignment: Assignment,
    by_hand: Sequence[Rule],
    recipe_used: Recipe | None,
) -> dict[str, Any]:
    """Return the shardings of a checkpoint by rules, for `--json`."""
    itemsizes = {name: t.dtype.itemsize_bytes for name, t in checkpoint.tensors.items()}
    held = assignment.rank_bytes(itemsizes)
    counts = dict.fromkeys(mesh.devices, 0)
    for layout in assignment.layouts.values():
        for rank in layout.holders:
            counts[rank] += 1
    rules = (*by_hand, *(recipe_used.rules if recipe_used else ()))
    names_of: dict[Rule, list[str]] = {rule: [] for rule in rules}
    for name, rule in assignment.matched.items():
        names_of[rule].append(name)
    return {
        "size_bytes": checkpoint.size_bytes,
        "rules": [
            {
                "pattern": rule.pattern,
                "spec": rule.spec,
                "by_hand": rule in by_hand,
                "tensors": len(names),
                "size_bytes": sum(checkpoint.tensors[name].size_bytes for name in names),
                "example": names[0],
                "cut": str(assignment.specs[names[0]]),
            }
            for rule, names in names_of.items()
            if names
        ],
        "ranks": [
            {"rank": rank, "tensors": counts[rank], "size_bytes": held.get(rank, 0)}
            for rank in sorted(mesh.devices)
        ],
        "uncomputable": list(assignment.uncomputable),
        "unknown": list(assignment.unknown),
        "unused_rules": [str(rule) for rule in assignment.unused_rules],
        "unused_recipe_rules": [str(rule) for rule in assignment.unused_recipe_rules],
        "unused_axes": list(assignment.unused_axes),
        "notes": list(assignment.notes),
    }


def _assignment_lines(
    checkpoint: Checkpoint, assignment: Assignment, described: dict[str, Any]
) -> list[str]:
    """Return what `_describe_assignment` describes as lines of text."""
    lines = []
    for rule in described["rules"]:
        example = rule["example"]
        shape = "x".join(map(str, checkpoint.tensors[example].shape)) or "scalar"
        count, size = count_text(rule["tensors"], "tensor"), bytes_text(rule["size_bytes"])
        by_hand = ", rule given by hand" if rule["by_hand"] else ""
        lines += [
            "",
            f"{printable(rule['pattern'])}  {count}, {size}{by_hand}",
            f"    {printable(example)}  {shape}  {rule['cut'] or 'whole'}",
        ]
    ranks = [(row["rank"], row["tensors"], row["size_bytes"]) for row in described["ranks"]]
    lines += ["", _rank_table(ranks, "tensors"), ""]
    lines += [f"not computable: {printable(text)}" for text in assignment.uncomputable]
    lines += output.listing("replicated, no rule matched", assignment.unknown)
    lines += output.listing("mesh axes over which nothing is sharded", assignment.unused_axes)
    lines += output.listing("rules that decided no tensor", map(str, assignment.unused_rules))
    patterns = [rule.pattern for rule in assignment.unused_recipe_rules]
    lines += output.listing("rules of the recipe that decided no tensor", patterns)
    lines += [f"note: {printable(note)}" for note in assignment.notes]
    if not assignment.unknown:
        lines.append("every tensor is matched by a rule")
    return lines


def _rank_table(ranks: Iterable[tuple[int, int, int]], noun: str) -> str:
    """Return a table of ranks, the number of things that each holds, and their bytes."""
    # Ranks that hold as much as each other share a line.
    alike: dict[tuple[int, int], list[int]] = {}
    for rank, count, held in ranks:
        alike.setdefault((count, held), []).append(rank)
    rows = [(rank_text(same), count, bytes_text(held)) for (count, held), same in alike.items()]
    return table(rows, ("ranks", noun, "each holds"), "lrr")


def _recipe_lines(shown: Recipe) -> list[str]:
    options = [(f"{name}={cut}", "a cut rule") for name, cut in shown.cuts.items()]
    for name, numbering in shown.numbers.items():
        what = (
            f"how the {name}s are divided over {numbering.axis}; their number is {numbering.count}"
        )
        options.append((f"{name}={numbering.cut}", what))
    for axis in shown.axes:
        stand_in = f"; if it has none, {shown.stand_ins[axis]}" if axis in shown.stand_ins else ""
        options.append((f"{axis}={axis}", f"axes of the mesh for {axis}{stand_in}"))
    coupled = [
        (f"{name}.{member}", count + ("" if member != coupling.unit else ", each on one rank"))
        for name, coupling in shown.coupled.items()
        for member, count in coupling.members
    ]
    rules = [(rule.pattern, rule.spec, _where_text(rule)) for rule in shown.rules]
    lines = [
        f"{shown.name}: {shown.description}" if shown.description else shown.name,
        *output.listing("model types", shown.model_types),
        "",
        table(options, ("option", "meaning")),
        "",
        *([table(coupled, ("cut together", "how many")), ""] if coupled else []),
        *([table([*shown.sizes.items()], ("size", "what it is")), ""] if shown.sizes else []),
        table(rules, ("pattern, first match", "sharding", "where")),
    ]
    return [printable(line, keep="\n") for line in lines]


def _where_text(rule: Rule) -> str:
    places = [f"{' and '.join(ends)} {name}" for name, ends in rule.at]
    return ", ".join([*places, *([f"if {rule.when}"] if rule.when else [])])


def _summary_json(shown: Recipe) -> dict[str, Any]:
    return {
        "name": shown.name,
        "description": shown.description,
        "model_types": list(shown.model_types),
    }


def _recipe_json(shown: Recipe) -> dict[str, Any]:
    return {
        **_summary_json(shown),
        "axes": list(shown.axes),
        "stand_ins": dict(shown.stand_ins),
        "storage": [axis for axis in shown.storage if axis in shown.axes],
        "cuts": dict(shown.cuts),
        "coupled": {name: dict(coupling.members) for name, coupling in shown.coupled.items()},
        "sizes": dict(shown.sizes),
        "numbers": {
            name: {
                "axis": numbering.axis,
                "count": numbering.count,
                "cut": numbering.cut,
                "beyond_last": numbering.beyond_last,
                "behind": list(numbering.behind),
            }
            for name, numbering in shown.numbers.items()
        },
        "rules": [
            {
                "pattern": rule.pattern,
                "spec": rule.spec,
                "at": {name: list(ends) for name, ends in rule.at},
                "when": rule.when,
                "note": rule.note,
            }
            for rule in shown.rules
        ],
    }


def find_engine_layout(against: str, checkpoint: str, mesh: DeviceMesh) -> EngineLayout:
    """Return the layout of an engine by name, derived for a mesh, or that in a file.

    Raises:
        UsageError: a layout of other ranks than those of the mesh.
        ReshardError: a layout that cannot be derived or read.
    """
    from reshard.recipes.engine_layouts.document import read_layout_file
    from reshard.recipes.engine_layouts.engines import ENGINES, derive_layout

    derived = against in ENGINES
    engine = derive_layout(against, checkpoint, mesh) if derived else read_layout_file(against)
    ours, theirs = (_size_axes(item) for item in (mesh, engine.mesh))
    # The same axes in another order number the ranks otherwise; other axes may still agree.
    same_axes = sorted(ours) == sorted(theirs)
    if mesh.size != engine.mesh.size or (same_axes and ours != theirs):
        raise UsageError(
            f"the mesh {mesh.text}, and a layout of {engine.engine} for {engine.mesh.text}, whose "
            f"ranks are numbered in that order; give --to {engine.mesh.text}"
        )
    return engine


def _size_axes(mesh: DeviceMesh) -> list[tuple[str, int]]:
    # An axis of size 1 does not change the numbers of ranks.
    pairs = zip(mesh.axis_names, mesh.shape, strict=True)
    return [(name, size) for name, size in pairs if size > 1]


def _compare_with_engine(engine: EngineLayout, layouts: Mapping[str, Layout]) -> dict[str, Any]:
    """Return the differences between the layouts of a recipe and of an engine, for `--json`.

    `unread` are tensors that no rank of the engine reads, `unknown` those that its layout lacks:
    it is of another checkpoint.
    """
    from reshard.recipes.engine_layouts.layout_differences import list_differences

    theirs = engine.source_layouts()
    read = {name: layout for name, layout in theirs.items() if layout.holders}
    differences = list(list_differences(layouts, read))
    counted = sum(len(difference.names) for difference in differences)
    return {
        "engine": engine.engine,
        "version": engine.version,
        "mesh": engine.mesh.text,
        "same": sum(name in read for name in layouts) - counted,
        "differences": [
            {
                "pattern": difference.pattern,
                "tensors": list(difference.names),
                "ranks": list(difference.ranks),
                "example": {
                    "rank": difference.rank,
                    "here": difference.ours,
                    "engine": difference.theirs,
                },
            }
            for difference in differences
        ],
        "unread": [name for name in layouts if name in theirs and name not in read],
        "unknown": [name for name in layouts if name not in theirs],
    }


def _comparison_lines(compared: dict[str, Any]) -> list[str]:
    """Return what `_compare_with_engine` describes as lines of text."""
    engine = compared["engine"]
    title = f"{engine} {compared['version']} for {compared['mesh']}"
    lines = [
        "",
        f"against {printable(title)}: {count_text(compared['same'], 'tensor')} alike",
    ]
    for difference in compared["differences"]:
        names, example = difference["tensors"], difference["example"]
        lines += [
            f"{printable(difference['pattern'])}  {count_text(len(names), 'tensor')} "
            f"sharded otherwise, on ranks {rank_text(difference['ranks'])}",
            f"    {printable(names[0])}, rank {example['rank']}",
            f"      here  {example['here']}",
            f"      {printable(engine)}  {example['engine']}",
        ]
    lines += output.listing(f"not read by {engine}", compared["unread"])
    lines += output.listing(
        "not in its layout, which is of another checkpoint", compared["unknown"]
    )
    return lines


def layout_lines(
    model: str, file: str, layout: EngineLayout, size_bytes: int, taken_s: float
) -> list[str]:
    """Return the derived layout as lines of text."""
    first = layout.ranks[0]
    lines = [
        f"{printable(model)} by {printable(layout.engine)} {printable(layout.version)} for "
        f"{layout.mesh.text}: {count_text(len(layout.sources), 'tensor')}, "
        f"{count_text(len(layout.ranks), 'rank')}, in {duration_text(taken_s)}",
        f"wrote {printable(file)}, {bytes_text(size_bytes)}",
        "",
    ]
    ranks = ((rank.rank, len(rank.parameters), rank.size_bytes) for rank in layout.ranks)
    lines += [_rank_table(ranks, "parameters"), ""]
    computed = (f"{name} ({', '.join(ops)})" for name, ops in layout.computed.items())
    lines += output.listing("computed while loading", computed)
    lines += output.listing("not filled", _list_unfilled(layout))
    lines += output.listing("read by no rank", layout.unread)
    if first.method == "values":
        lines.append("traced by values, since the loader looks at some")
    notes = dict.fromkeys([*layout.notes, *(note for rank in layout.ranks for note in rank.notes)])
    lines += [f"note: {printable(note)}" for note in notes]
    return lines


def _list_unfilled(layout: EngineLayout) -> list[str]:
    """Return the parameters of which some rank's loader leaves something as it is."""
    unfilled: dict[str, None] = {}
    for rank in layout.ranks:
        for name, parameter in rank.parameters.items():
            if parameter.unfilled:
                unfilled.setdefault(name)
    return list(unfilled)


def layout_json(layout: EngineLayout) -> dict[str, Any]:
    """Return the derived layout for `--json`."""
    return {
        "engine": layout.engine,
        "version": layout.version,
        "mesh": output.mesh_json(layout.mesh),
        "ranks": [
            {
                "rank": rank.rank,
                "parameters": len(rank.parameters),
                "size_bytes": rank.size_bytes,
                "method": rank.method,
                "tied": [list(group) for group in rank.tied],
                "notes": list(rank.notes),
            }
            for rank in layout.ranks
        ],
        "computed": {name: list(operations) for name, operations in layout.computed.items()},
        "unfilled": _list_unfilled(layout),
        "unread": list(layout.unread),
        "notes": list(layout.notes),
    }
