"""`reshard explain`: any two shardings, in any notation, against answers entered by hand."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reshard
from cli.command_runs import entries, run_alone, run_here
from reshard.collectives import find_program
from reshard.collectives.lowering.mlir import COLLECTIVES
from reshard.cost import load_preset
from reshard.testing import parse_shard_module
from selection import choose
from show.page_parts import parsed
from strategies import meshes, shapes, specs

DOCUMENTS = Path(__file__).parents[3] / "docs"
SIX = ("--mesh", "x=2,y=3", "--shape", "6x6")


def explained(*arguments: str) -> dict[str, object]:
    run = run_here("explain", *arguments, "--json")
    assert (run.code, run.errors) == (0, "")
    return run.json


# The examples of MLIR's notes on resharding with contents, and the fewest elements that move.
SEED = [
    ("[[0, 1]]", "[[1, 0]]", "x=2,y=3", "6", 4),
    ("[[0, 1]]", "[[1]]", "x=2,y=3", "6", 10),
    ("[[], [0, 1]]", "[[], [0]]", "x=2,y=3", "2x6", 24),
    ("[[0], [1, 2]]", "[[0], [2]]", "x=2,y=2,z=2", "4x8", 48),
    ("[[0], [1]]", "[[1], [0]]", "x=2,y=3", "6x6", 26),
    ("[[0], [1]]", "[[1], [0]]", "x=2,y=6", "6x6", 30),
    ("[[0], []]", "[[], [0]]", "x=3", "6x6", 24),
    ("[[0], [1, 2]]", "[[0, 1], [2]]", "x=2,y=2,z=2", "4x4", 12),
]


@pytest.mark.parametrize(("source", "target", "mesh", "shape", "least"), SEED)
def test_the_examples_of_the_notes(
    source: str, target: str, mesh: str, shape: str, least: int
) -> None:
    found = explained(source, target, "--mesh", mesh, "--shape", shape)
    assert found["moved_elements"] == found["lower_bound_elements"] == least


def test_json_has_the_documented_keys() -> None:
    # Rank 0 has rows 0:2, rank 1 rows 2:4; each lacks the other's half of its columns.
    assert explained("x, -", "-, x", "--mesh", "x=2", "--shape", "4x2") == {
        "moved_elements": 4,
        "lower_bound_elements": 4,
        "max_send_elements": 2,
        "max_receive_elements": 2,
        "transfers": [
            {
                "source_rank": 1,
                "target_rank": 0,
                "box": [[2, 4], [0, 1]],
                "source_box": [[0, 2], [0, 1]],
                "target_box": [[2, 4], [0, 1]],
            },
            {
                "source_rank": 0,
                "target_rank": 1,
                "box": [[0, 2], [1, 2]],
                "source_box": [[0, 2], [1, 2]],
                "target_box": [[0, 2], [0, 1]],
            },
        ],
        "program": {
            "steps": [
                {
                    "step": "all-to-all",
                    "axes": ["x"],
                    "dims": [0, 1],
                    "after": "-, x",
                    "moved_elements": 4,
                    "live_shard_elements": 4,
                }
            ],
            "moved_elements": 4,
            "peak_shard_elements": 4,
        },
        "why_no_program": None,
    }


def test_json_has_the_program_of_collectives() -> None:
    # Rows over both axes by x, then y; the columns of a 2x2 block are then those of one rank.
    found = explained("x y, -", "-, y", "--mesh", "x=2,y=2", "--shape", "8x4")["program"]
    assert isinstance(found, dict)
    # Of 16 elements of its target a rank has 4 already: y's half of its two rows.
    assert (found["moved_elements"], found["peak_shard_elements"]) == (4 * 12, 16)
    run = run_here("explain", "x y, -", "-, y", "--mesh", "x=2,y=2", "--shape", "8x4")
    assert "as collectives:\n[8, 4]" in run.output
    assert "The largest shard has 16 elements." in run.output


def test_steps_of_a_program_are_chosen() -> None:
    joint, classical, notes = (
        explained("[[0], [1]]", "[[1], [0]]", *SIX, "--steps", steps)["program"]
        for steps in ("joint", "classical", "mlir")
    )
    assert isinstance(joint, dict) and isinstance(classical, dict) and isinstance(notes, dict)
    assert [step["step"] for step in joint["steps"]] == ["joint all-to-all"]
    assert {step["step"] for step in classical["steps"]} == {"all-to-all"}
    assert [step["step"] for step in notes["steps"]] == ["all-gather", "all-to-all", "slice"]
    # The notes' program holds 18 elements where both shards hold 6, as DESIGN says of it.
    assert [found["peak_shard_elements"] for found in (joint, classical, notes)] == [6, 6, 18]
    assert joint["moved_elements"] == 26


@pytest.mark.parametrize(
    ("arguments", "why", "is_written"),
    [
        (("tp", "-", "--mesh", "tp=2", "--to-ranks", "2-3"), "on different devices", False),
        (
            ("RaggedShard(dims=(0,), local_units=(1, 3))", "tp", "--mesh", "tp=2"),
            "without a mesh",
            False,
        ),
        (("tp@cyclic1", "tp", "--mesh", "tp=2"), "no collectives within groups", True),
        (("tp@cyclic1", "tp", "--mesh", "tp=2", "--steps", "classical"), "allow an exch", True),
    ],
)
def test_why_there_is_no_program(arguments: tuple[str, ...], why: str, is_written: bool) -> None:
    found = explained(*arguments, "--shape", "4")
    assert found["program"] is None
    assert why in str(found["why_no_program"])
    assert (
        "as collectives: " in run_here("explain", *arguments, "--shape", "4").output
    ) is is_written


def test_nothing_to_do_is_a_program_without_steps() -> None:
    found = explained("x, -", "x, -", *SIX)
    assert found["program"] == {"steps": [], "moved_elements": 0, "peak_shard_elements": 18}
    assert "collectives" not in run_here("explain", "x, -", "x, -", *SIX).output


def test_transfers_carry_a_tensor_over() -> None:
    """The boxes alone, copied from local array to local array, make the target."""
    found = explained("x / y, -", "-, x y@stride2", "--mesh", "x=2,y=3", "--shape", "7x12")
    mesh = reshard.DeviceMesh.of(x=2, y=3)
    source = reshard.spec(mesh, "x / y, -").layout((7, 12))
    target = reshard.spec(mesh, "-, x y@stride2").layout((7, 12))
    dense = np.arange(84).reshape(7, 12)
    held = {r: np.full(source.local_shape(r), -1) for r in source.holders}
    wanted = {r: np.full(target.local_shape(r), -1) for r in target.holders}
    for layout, arrays in ((source, held), (target, wanted)):
        for rank, array in arrays.items():
            index = []
            for d, part in enumerate(layout.cell_part[layout.cells_of(rank)[0]].tolist()):
                runs = layout.tables[d].runs_of(part)
                index.append([i for start, stop, _, _ in runs for i in range(start, stop)])
            array[...] = dense[np.ix_(*index)]
    made = {rank: np.full(array.shape, -1) for rank, array in wanted.items()}
    moved = 0
    for transfer in found["transfers"]:
        box, at, to = (
            tuple(slice(*pair) for pair in transfer[key])
            for key in ("box", "source_box", "target_box")
        )
        assert transfer["source_rank"] != transfer["target_rank"]
        piece = held[transfer["source_rank"]][at]
        assert np.array_equal(piece, dense[box])
        made[transfer["target_rank"]][to] = piece
        moved += piece.size
    assert moved == found["moved_elements"]
    for rank, array in made.items():
        kept = array == -1
        stays = np.isin(wanted[rank], held[rank])
        assert np.array_equal(kept, stays)
        assert np.array_equal(array[~kept], wanted[rank][~kept])


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("[[0], [1]]", "[[1], [0]]"),
        ("P('x', 'y')", "P('y', 'x')"),
        ('[{"x"}, {"y"}]', '[{"y"}, {"x"}]'),
        ("[Shard(0), Shard(1)]", "S(1)S(0)"),
        ("native:x, y", "jax:P('y', 'x')"),
        ("mlir:[[0], [1]]", "y, x"),
    ],
)
def test_notations_mixed(source: str, target: str) -> None:
    assert explained(source, target, *SIX) == explained("x, y", "y, x", *SIX)


def test_a_notation_given_by_option_is_for_both_sides() -> None:
    found = explained("[[0], [1]]", "[[1], [0]]", *SIX, "--notation", "mlir")
    assert found["moved_elements"] == 26
    assert run_here("explain", "x, y", "y, x", *SIX, "--notation", "mlir").code == 2


def test_other_devices_for_the_target() -> None:
    arguments = ("tp, -", "-, dp", "--mesh", "tp=4", "--to-mesh", "dp=2", "--shape", "8x6")
    same = explained(*arguments)
    assert same["moved_elements"] == 48 - 2 * 3 - 2 * 3
    apart = explained(*arguments, "--to-ranks", "4,5")
    assert apart["moved_elements"] == 48
    assert {t["target_rank"] for t in apart["transfers"]} == {4, 5}
    turned = explained(
        "tp", "tp", "--mesh", "tp=2", "--ranks", "1,0", "--to-ranks", "0-1", *("--shape", "4")
    )
    assert turned["moved_elements"] == 4


def test_a_layout_brings_its_own_shape() -> None:
    text = "RaggedShard(dims=(0,), local_units=(1, 3))"
    assert explained(text, "tp, -", "--mesh", "tp=2", "--shape", "4x2")["moved_elements"] == 2


def test_a_dash_for_an_unsharded_dimension_is_not_an_option() -> None:
    for first, second in (("-, x", "x, -"), ("-", "x"), ("- | sum(x)", "-"), ("-,x", "x,-")):
        shape = "4" if "," not in first else "4x4"
        assert run_here("explain", first, second, "--mesh", "x=2", "--shape", shape).code == 0
    scalar = explained("", "", "--mesh", "x=2", "--shape", "scalar")
    assert scalar["moved_elements"] == 0


def test_the_text_has_the_ranks_that_move_most() -> None:
    run = run_here("explain", "x, y", "y, x", *SIX, "--dtype", "float32")
    # How much moves is shown once.
    assert run.output.count("26 elements") + run.output.count("26 of 36 elements") == 1
    assert "104 B of 144 B move (26 of 36 elements), 40 B stay." in run.output
    assert "no plan moves fewer elements" in run.output
    assert "busiest sender: ranks 2,3, 6 elements (24 B)" in run.output
    assert "3   1         2  [3:4, 0:2]" in run.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("x", "y"), "give a mesh"),
        (("x", "y", "--mesh", "x=2,y=3"), "--shape"),
        (("x", "y", "--mesh", "x=2,y=3", "--shape", "6x6"), "dimensions"),
        (("x", "z", "--mesh", "x=2,y=3", "--shape", "6"), "unknown axis 'z'"),
        (("x", "y", "--mesh", "x", "--shape", "6"), "x"),
        (("x", "y", "--mesh", "x=2,y=3", "--shape", "six"), "'six' is not a shape"),
        (("x", "y", "--mesh", "x=2,y=3", "--shape", "6x"), "'6x' is not a shape"),
        (("x", "y", "--mesh", "x=2,y=3", "--shape", "-6"), "is not a shape"),
        (("x", "y", "--mesh", "x=2,y=3", "--shape", "6", "--dtype", "float33"), "float33"),
        (("x", "y", "--mesh", "x=2,y=3", "--shape", "6", "--notation", "lama"), "lama"),
        (("x", "y", "--mesh", "x=2,y=3", "--shape", "6", "--ranks", "4-"), "'4-'"),
        (("x", "y", "--mesh", "x=2,y=3", "--shape", "6", "--ranks", "0-9999999"), "below"),
        (("x", "y", "--mesh", "x=2,y=3", "--shape", "6", "--ranks", "0-4"), "5 devices"),
        (("x", "x", "--ranks", "0-4", "--shape", "6"), "give the mesh: --mesh"),
        (("[]", "y", "--mesh", "x=2,y=3", "--shape", "6"), "mlir:[[0, 1], [2]]"),
        (("[[0], [9]]", "y", *SIX), "read as mlir"),
        (("x", "y", "--mesh", "x=2,y=3", "--shape", "6", "--overwrite"), "--html"),
        (("x", "y", "--mesh", "x=2,y=3", "--shape", "6", "--ranks-per-host", "2"), "--html"),
        (("x", "x", "--mesh", "x=2", "--shape", "6000", "--contents"), "small --shape"),
        (("- | sum(x)", "x", "z", "--mesh", "x=2", "--shape", "6"), "extra argument"),
    ],
)
def test_wrong_use_is_reported(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    run = run_here("explain", *arguments)
    assert (run.code, run.output) == (2, "")
    assert said in run.errors
    assert "Traceback" not in run.errors and "internal" not in run.errors
    as_json = run_here("explain", *arguments, "--json")
    assert as_json.code == 2
    assert as_json.json["error"]["message"]
    assert entries(folder) == {"model"}


def test_both_sides_have_the_same_shape() -> None:
    ragged = "RaggedShard(dims=(0,), local_units=(1, 3))"
    matrix = "10 10 2 2 0 0 grid=2x1"
    run = run_here("explain", ragged, matrix, "--shape", "4x2")
    assert run.code == 2
    assert "10" in run.errors


def test_contents_are_not_drawn_in_json() -> None:
    run = run_here("explain", "x", "-", "--mesh", "x=2", "--shape", "4", "--contents", "--json")
    assert run.code == 2
    assert run.json["error"]["kind"] == "UsageError"


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, str, str, str]:
    """Two shardings of one tensor over one mesh, their mesh and shape, as texts."""
    mesh, shape = draw(meshes(max_devices=8)), draw(shapes())
    before, after = (str(draw(specs(mesh, shape))) for _ in range(2))
    return before, after, mesh.text, "x".join(map(str, shape)) or "scalar"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=choose(15, 40))
@given(changes())
def test_any_two_shardings_are_explained(change: tuple[str, str, str, str]) -> None:
    before, after, mesh, shape = change
    arguments = (f"native:{before}", f"native:{after}", "--mesh", mesh, "--shape", shape)
    run = run_here(
        *("explain", *arguments, "--dtype", "int8", "--contents"),
        *("--html", "report.html", "--overwrite", "--ranks-per-host", "2"),
    )
    if run.code == 0:
        found = explained(*arguments)
        boxes = [transfer["box"] for transfer in found["transfers"]]
        moved = sum(math.prod(stop - start for start, stop in box) for box in boxes)
        assert found["moved_elements"] == found["lower_bound_elements"] == moved
        program = found["program"]
        assert (program is None) is (found["why_no_program"] is not None)
        if isinstance(program, dict):
            assert program["moved_elements"] == sum(s["moved_elements"] for s in program["steps"])
            # An all-reduce combines where it passes; the transfers bring each contribution whole.
            assert program["moved_elements"] >= moved or re.search(r"(?:x|n|m|t)\(", before)
        parsed(Path("report.html").read_text(encoding="utf-8"))
    else:
        # A reduction cannot become another one.
        assert run.code == 2 and "PlanError" in run_here("explain", *arguments, "--json").output


def test_the_document_shows_what_the_command_prints(folder: Path) -> None:
    document = (DOCUMENTS / "explain.md").read_text(encoding="utf-8")
    compared = 0
    for block in re.findall(r"^```console\n(.*?)^```", document, re.MULTILINE | re.DOTALL):
        command, _, output = block.partition("\n")
        if output and not output.startswith("$"):
            run = run_alone(*shlex.split(command)[2:], cwd=folder, PYTHONIOENCODING="utf-8")
            assert run.output == output
            compared += 1
    assert compared == 6


def test_ascii_terminals_get_ascii(folder: Path) -> None:
    run = run_alone(
        "explain",
        "x",
        "-",
        "--mesh",
        "x=2",
        "--shape",
        "4",
        "--contents",
        cwd=folder,
        PYTHONIOENCODING="ascii",
    )
    assert run.code == 0 and run.output.isascii() and "----->" in run.output


def test_a_program_for_shardy() -> None:
    arguments = ("x y, -", "x, y", "--mesh", "x=2,y=4", "--shape", "16x16", "--lower", "shardy")
    run = run_here("explain", *arguments, "--dtype", "bfloat16")
    assert (run.code, run.errors) == (0, "")
    assert '= sdy.all_to_all [{"y"}: 0->1] %0 out_sharding=<@mesh, [{"x"}, {"y"}]>' in run.output
    assert run.output.startswith("module {") and "tensor<16x16xbf16>" in run.output
    assert "tensor<16x16xf32>" in run_here("explain", *arguments).output


def test_a_program_for_jax() -> None:
    arguments = ("x y, -", "x, y", "--mesh", "x=2,y=4", "--shape", "16x16", "--lower", "jax")
    run = run_here("explain", *arguments)
    assert (run.code, run.errors) == (0, "")
    compile(run.output, "lowered", "exec")
    assert "x = lax.all_to_all(x, ('y',), split_axis=1, concat_axis=0, tiled=True)" in run.output


def test_a_program_for_mlir() -> None:
    arguments = ("x, y", "y, x", *SIX, "--steps", "mlir", "--lower", "mlir", "--dtype", "int8")
    run = run_here("explain", *arguments)
    assert (run.code, run.errors) == (0, "")
    module = parse_shard_module(run.output)
    assert str(module) == run.output.rstrip()
    kinds = [operation.name for operation in module.operations if operation.name in COLLECTIVES]
    assert kinds == ["shard.all_gather", "shard.all_to_all", "shard.all_slice"]


@pytest.mark.parametrize(("system", "op"), [("shardy", "sdy.all_to_all"), ("mlir", "shard.")])
def test_a_system_without_joint_steps_gets_a_classical_program(system: str, op: str) -> None:
    run = run_here("explain", "x, y", "y, x", *SIX, "--lower", system)
    assert (run.code, run.errors) == (0, "")
    assert op in run.output


GATHER = ("x y, -", "x, -", "--mesh", "x=2,y=8", "--shape", "4096x4096")


def test_times_on_a_machine() -> None:
    found = explained(*GATHER, "--dtype", "bfloat16", "--topology", "h100-8")
    mesh = reshard.DeviceMesh.of(x=2, y=8)
    sides = [reshard.spec(mesh, text) for text in ("x y, -", "x, -")]
    # Sixteen ranks are two hosts of eight.
    topology = load_preset("h100-8").topology(hosts=2)
    program = find_program(*sides, (4096, 4096)).estimate("bfloat16", topology)
    plan = reshard.plan(*(side.layout((4096, 4096)) for side in sides), "bfloat16")
    assert found["seconds_s"] == plan.estimate(topology).seconds_s
    shown = found["program"]
    assert isinstance(shown, dict) and shown["seconds_s"] == program.seconds_s
    times = [step["seconds_s"] for step in shown["steps"]]
    assert times == [part.seconds_s for part in program.parts]
    assert "seconds_s" not in explained(*GATHER)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--topology", "h100-8"), "give --dtype, as bfloat16"),
        (("--topology", "abacus", "--dtype", "int8"), "unknown preset 'abacus'"),
        (("--topology", "gloo-host", "--dtype", "int8"), "has a single host"),
    ],
)
def test_machines_that_do_not_fit(arguments: tuple[str, ...], said: str) -> None:
    run = run_here("explain", *GATHER, *arguments)
    assert run.code == 2 and said in run.errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("x, y", "y, x", *SIX, "--steps", "joint"),
            "step 1, joint all-to-all(x y), cannot be expressed in Shardy",
        ),
        (("x@cyclic1", "x", "--mesh", "x=2", "--shape", "6"), "no program of collectives to lower"),
        (("x, y", "y, x", *SIX, "--json"), "--lower writes a program and --json other text"),
        (("x, y", "y, x", *SIX, "--contents"), "and --contents other text"),
    ],
)
def test_a_change_that_cannot_be_lowered_is_reported(arguments: tuple[str, ...], said: str) -> None:
    run = run_here("explain", *arguments, "--lower", "shardy")
    assert run.code == 2
    assert said in (run.json["error"]["message"] if "--json" in arguments else run.errors)


def test_contributions_to_a_scalar_are_added_up() -> None:
    # Each of two ranks gets the other's only element, in one direction or the other.
    for steps in ("joint", "classical"):
        arguments = ("| sum(x)", "", "--mesh", "x=2", "--shape", "scalar", "--steps", steps)
        found = explained(*arguments)["program"]
        assert isinstance(found, dict)
        assert [step["step"] for step in found["steps"]] == ["all-reduce"]
        assert found["moved_elements"] == 2
