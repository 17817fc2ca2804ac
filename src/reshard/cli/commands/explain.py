"""`reshard explain`: two shardings, and the change from the first to the second."""

from __future__ import annotations

import re
from pathlib import Path

import click

from reshard._validation import MAX_RANKS, check_used
from reshard.cli import output
from reshard.cli.options import check_report, json_option, report_options
from reshard.cli.program import DONE
from reshard.collectives.lowering import SYSTEMS, WITHOUT_JOINT_STEPS
from reshard.collectives.search.states import CLASSICAL, JOINT, STEPS
from reshard.cost.preset import load_preset, shipped_presets
from reshard.errors import UsageError
from reshard.mesh import DeviceMesh
from reshard.notation.registry import NOTATIONS, read_sharding


class _Explain(click.Command):
    """A command whose arguments may begin with `-`, a dimension that is not sharded."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # No option has a space or a comma after its dash; a space before it makes it a text.
        texts = [f" {word}" if re.match(r"-[\s,|?!]", word) else word for word in args]
        return super().parse_args(ctx, texts)


_EXAMPLES = "".join(f"\n  {name:12} {item.example}" for name, item in NOTATIONS.items())


@click.command(cls=_Explain, epilog=f"\b\nNotations, by example:{_EXAMPLES}")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--mesh", "mesh_text", metavar="MESH", help="The mesh, such as dp=2,tp=4.")
@click.option("--ranks", "rank_text", metavar="RANKS", help="Its ranks: 4-7, or 3,1,2,0.")
@click.option("--to-mesh", "target_mesh_text", metavar="MESH", help="The mesh of TO, if another.")
@click.option("--to-ranks", "target_rank_text", metavar="RANKS", help="The ranks of TO, if others.")
@click.option("--shape", "shape_text", metavar="SHAPE", help="Of the tensor: 4096x1024, 7, scalar.")
@click.option(
    "--notation",
    type=click.Choice(list(NOTATIONS)),
    help="The notation of both texts. [default: recognised from each]",
)
@click.option("--dtype", metavar="NAME", help="The type of the elements, for sizes in bytes.")
@click.option(
    "--contents", is_flag=True, help="Draw the elements that each device holds, for small tensors."
)
@click.option(
    "--steps",
    type=click.Choice([name for name in STEPS if name != "all"]),
    help="The collectives that a program may use: also joint all-to-alls (the default), the "
    "classical collectives, which shardy and mlir can express, or the steps of MLIR's notes.",
)
@click.option(
    "--topology",
    metavar="NAME",
    help="Estimate times on a machine: a preset, or the path of a .toml file. Needs --dtype. "
    "The presets: " + ", ".join(shipped_presets()) + ".",
)
@click.option(
    "--lower",
    type=click.Choice(SYSTEMS),
    help="Print only the program, in the language of another system.",
)
@json_option
@report_options
def explain(
    source: str,
    target: str,
    mesh_text: str | None,
    rank_text: str | None,
    target_mesh_text: str | None,
    target_rank_text: str | None,
    shape_text: str | None,
    notation: str | None,
    dtype: str | None,
    contents: bool,
    steps: str | None,
    topology: str | None,
    lower: str | None,
    as_json: bool,
    report_path: str | None,
    overwrite: bool,
    ranks_per_host: int | None,
) -> int:
    """Show what moves when a tensor goes from the sharding FROM to the sharding TO.

    FROM and TO may be in any notation, also in different ones; a prefix such as `jax:` selects it.
    Elements that a rank already has stay; all others are sent once. If both are over the same
    devices, the program of collectives that moves the fewest elements is shown too.

    \b
    Examples:
      reshard explain "x, y" "y, x" --mesh x=2,y=3 --shape 6x6
      reshard explain "tp, -" "-, dp" --mesh tp=4 --to-mesh dp=2 --shape 64x48 --dtype bfloat16
      reshard explain "[[0], [1]]" "P('y', 'x')" --mesh x=2,y=3 --shape 6x6 --contents
      reshard explain "[Shard(0)]" "[Replicate()]" --mesh tp=2 --to-ranks 2-3 --shape 8x8 --json

    \b
    Keys of --json:
      moved_elements, lower_bound_elements, max_send_elements, max_receive_elements
      transfers [{source_rank, target_rank, box, source_box, target_box}]
      program (null if there is none) {moved_elements, peak_shard_elements,
        steps [{step, axes, dims, after, moved_elements, live_shard_elements}]}
      why_no_program (null if there is one)
      (with --topology seconds_s, of messages; of the program and its steps too)

    A box is [[start, stop], ...], one pair per dimension. `box` is in the tensor; the others are in
    the local array of the rank (or in one of its boxes, if it holds several).
    """
    # Imported here, since the help of the command needs neither plans nor pictures.
    from reshard.cli.explanation import Side, explanation_of

    check_report(report_path, overwrite, ranks_per_host)
    if contents and as_json:
        raise UsageError("--contents draws text and --json writes none; leave one of them out")
    if lower is not None and (contents or as_json):
        option = "--json" if as_json else "--contents"
        raise UsageError(f"--lower writes a program and {option} other text; leave one of them out")
    shape = None if shape_text is None else shape_of(shape_text)
    machine = None if topology is None else load_preset(topology)
    mesh = _mesh(mesh_text, rank_text)
    if target_mesh_text is None and target_rank_text is None:
        target_mesh = mesh
    else:
        # A side that gives ranks only has the shape of the other side's mesh.
        target_mesh = _mesh(target_mesh_text or mesh_text, target_rank_text)
    before, after = (
        Side(text.strip(), read_sharding(text.strip(), devices, shape, notation))
        for text, devices in ((source, mesh), (target, target_mesh))
    )
    # Some systems lack a joint all-to-all: by default, use only steps that they can express.
    default_steps = CLASSICAL if lower in WITHOUT_JOINT_STEPS else JOINT
    explanation = explanation_of(before, after, shape, dtype, steps or default_steps, machine)
    check_used(
        f"--steps {steps}",
        steps is None or explanation.program is not None or explanation.is_on_same_devices,
        f"there is no program of collectives: {explanation.why_no_program}",
    )
    check_used(
        f"--topology {topology}",
        machine is None or lower is None or report_path is not None,
        "--lower prints the program alone, without times",
    )
    if report_path is not None:
        page = explanation.report(ranks_per_host).html()
        output.write_whole(Path(report_path), page, overwrite, "report")
    if lower is not None:
        output.write(explanation.lowered(lower))
    elif as_json:
        output.write_json(explanation.as_json())
    else:
        drawn = explanation.contents() if contents else []
        output.write("\n".join([*explanation.as_text(), *drawn]))
    return DONE


def _mesh(text: str | None, ranks: str | None) -> DeviceMesh | None:
    if text is None:
        if ranks is not None:
            raise UsageError(f"ranks {ranks} without a mesh; give the mesh: --mesh dp=2,tp=4")
        return None
    mesh = DeviceMesh.parse(text)
    if ranks is None:
        return mesh
    return mesh.replace(devices=ranks_of(ranks))


_RANKS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def ranks_of(text: str) -> list[int]:
    """Parse a list of ranks, numbers and ranges, in its order.

    Raises:
        UsageError: anything else.

    >>> ranks_of("4-6,1")
    [4, 5, 6, 1]
    """
    ranks: list[int] = []
    for word in text.split(","):
        match = _RANKS.fullmatch(word.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < MAX_RANKS:
            raise UsageError(
                f"{word.strip()!r} in the ranks {text!r}; write numbers and ranges such as "
                f"0,2,4-7, below {MAX_RANKS:,}"
            )
        ranks += range(first, last + 1)
    return ranks


_SHAPE = re.compile(r"\d{1,18}(?:\s*[x×,]\s*\d{1,18})*", re.ASCII)


def shape_of(text: str) -> tuple[int, ...]:
    """Parse the text of a shape, such as `6x6`; `scalar` has no dimensions.

    Raises:
        UsageError: anything else.

    >>> shape_of("30522x384"), shape_of("7"), shape_of("scalar")
    ((30522, 384), (7,), ())
    """
    words = text.strip()
    if words.casefold() == "scalar":
        return ()
    if not _SHAPE.fullmatch(words):
        raise UsageError(f"{text!r} is not a shape; write sizes such as 4096x1024, 7, or scalar")
    return tuple(int(size) for size in re.findall(r"\d+", words))
