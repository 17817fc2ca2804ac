"""Which tests `make test PART=` selects."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def part_tests() -> ModuleType:
    pytest.importorskip("grimp")
    place = importlib.util.spec_from_file_location("part_tests", ROOT / "tools" / "part_tests.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


def test_a_part_is_reached_by_imports_strings_scripts_and_pages(part_tests: ModuleType) -> None:
    reach = part_tests.Reach("spmd")

    def reaches(name: str) -> bool:
        return bool(reach.reaches(ROOT / name))

    assert reaches("tests/spmd/rules/test_alignment.py")
    assert reaches("examples/train.py")
    assert reaches("tests/spmd/test_training_example.py"), "runs examples/train.py"
    assert reaches("tests/torch/test_spmd_processes.py"), "runs spmd_process.py on ranks"
    assert not reaches("tests/checkpoint/formats/safetensors/test_header.py")
    assert not reaches("tests/test_layout.py")
    page = part_tests.page_program((ROOT / "docs" / "spmd.md").read_text())
    assert reach.program_reaches(part_tests.ast.parse(page))


def test_names_of_lazy_packages_are_resolved(part_tests: ModuleType) -> None:
    assert part_tests.resolve("reshard.plan") == ("reshard.plans.plan", False)
    assert part_tests.resolve("reshard.plans.plan.Plan") == ("reshard.plans.plan", False)
    assert part_tests.resolve("reshard.checkpoint") == ("reshard.checkpoint", True)
    assert part_tests.resolve("reshard.__file__") == ("reshard", False)
    assert part_tests.resolve("numpy.array") is None


def test_an_unknown_part_lists_the_packages(part_tests: ModuleType) -> None:
    with pytest.raises(
        SystemExit, match=r"no package 'nope': checkpoint, checkpoint.architectures, .*spmd"
    ):
        part_tests.Reach("nope")
