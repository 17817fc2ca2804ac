"""What `import reshard` loads, and what it offers."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import reshard

PUBLIC = [
    "Axis",
    "Binding",
    "Box",
    "DeviceMesh",
    "DimSpec",
    "FileRange",
    "Job",
    "JobItem",
    "Layout",
    "Level",
    "Link",
    "Plan",
    "RankMemory",
    "ReshardError",
    "ShardingSpec",
    "StagedJob",
    "TensorName",
    "Topology",
    "View",
    "change_picture",
    "checkpoint",
    "dtype",
    "find_program",
    "from_json",
    "picture",
    "plan",
    "read_sharding",
    "relabel",
    "sharding_of",
    "spec",
    "to_json",
    "write_sharding",
]


def in_a_new_process(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import reshard", ["reshard"]),
        ("from reshard import Layout, spec", ["numpy", "reshard"]),
        # What `reshard --help` begins with.
        ("import reshard.cli.program", ["click", "reshard"]),
    ],
)
def test_importing_loads_nothing_else_that_is_installed(program: str, expected: list[str]) -> None:
    found = in_a_new_process(
        "import sys\n"
        "before = set(sys.modules)\n"
        f"{program}\n"
        "loaded = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(loaded - set(sys.stdlib_module_names)))\n"
    ).split()
    assert found == expected


def test_planning_and_running_load_no_more() -> None:
    found = in_a_new_process(
        "import sys\n"
        "import numpy, reshard\n"
        "mesh = reshard.DeviceMesh.of(x=2)\n"
        "layouts = [reshard.spec(mesh, text).layout((4, 4)) for text in ('x, -', '-, x')]\n"
        "plan = reshard.plan(*layouts, dtype='float32')\n"
        "plan.verify()\n"
        "plan.run({rank: numpy.zeros((2, 4), numpy.float32) for rank in (0, 1)})\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(*sorted(loaded & {'torch', 'xxhash', 'click', 'rich', 'ml_dtypes', 'hypothesis'}))\n"
    ).split()
    assert found == []


def test_importing_is_quick(record_property: Callable[[str, object], None]) -> None:
    seconds = float(
        in_a_new_process(
            "import numpy, time\n"
            "begin = time.perf_counter()\n"
            "import reshard\n"
            "print(time.perf_counter() - begin)\n"
        )
    )
    record_property("import_seconds", seconds)
    # Without NumPy it takes some hundredths of a second; this only catches a heavy import.
    assert seconds < 10


def test_what_schedules_and_draws_is_not_loaded_with_the_rest() -> None:
    found = in_a_new_process(
        "import sys, reshard\n"
        "from reshard import Layout, spec\n"
        "print(*(name for name in sys.modules if name.startswith('reshard.')))\n"
    ).split()
    heavy = (
        "cost",
        "execution",
        "collectives",
        "notation",
        "show",
        "spmd",
        "torch",
        "checkpoint",
        "recipes",
    )
    assert not [name for name in found if name.split(".")[1] in heavy]
    assert not [name for name in found if name.startswith("reshard.plans.schedule")]


def test_families_of_operators_are_loaded_when_they_are_used() -> None:
    found = in_a_new_process(
        "import sys, reshard.spmd as sp\n"
        "x = sp.array([1.0]) + 1\n"
        "print('reshard.spmd.ops.linalg' in sys.modules)\n"
        "print(sp.rule_of('solve', [(4, 4), (4,)]) is not None, len(sp.__all__))\n"
        "from reshard.spmd.core.operator import documented_operators, shipped_operators\n"
        "print('solve' in shipped_operators())\n"
        "print(set(documented_operators()) - set(sp.__all__))\n"
    ).split()
    assert found[:2] == ["False", "True"]
    assert found[3:] == ["True", "set()"]


def test_the_public_names_are_these() -> None:
    assert sorted(PUBLIC) == PUBLIC == reshard.__all__
    for name in PUBLIC:
        assert getattr(reshard, name) is not None


def test_nothing_else_looks_public() -> None:
    program = (
        "import reshard; from reshard import Layout, spec; "
        "print(*[n for n in vars(reshard) if not n.startswith('_')])"
    )
    names = set(in_a_new_process(program).split())
    modules = {name for name in names if isinstance(getattr(reshard, name, None), types.ModuleType)}
    known = {"annotations", "attach", "sys", "TYPE_CHECKING"}
    # The others are loaded when they are asked for.
    assert {"Layout", "spec"} <= names - modules - known <= set(PUBLIC)


def test_the_public_names_are_listed() -> None:
    assert {*PUBLIC} <= {*in_a_new_process("import reshard; print(*dir(reshard))").split()}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'reshard' has no attribute 'nonsense'"):
        _ = reshard.nonsense


def test_the_version_is_the_projects() -> None:
    project = Path(__file__).parents[1] / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == reshard.__version__
