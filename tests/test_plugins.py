"""Packages from outside that add formats and recipes, installed as users install them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

# What another package has: a format of `.npy` files, a folder of recipes, and two that are broken.
PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "reshard-outside"
version = "1.2"

[project.entry-points."reshard.formats"]
arrays = "outside.arrays:FORMAT"
broken = "outside.broken:FORMAT"
number = "outside.arrays:NUMBER"

[project.entry-points."reshard.recipes"]
ours = "outside.recipes"
none = "outside.arrays:NUMBER"

[tool.setuptools]
packages = ["outside", "outside.recipes"]

[tool.setuptools.package-data]
"outside.recipes" = ["*.toml"]
"""
ARRAYS = '''
import numpy as np
from reshard.binding import Binding, FileRange
from reshard.checkpoint import (
    WritePlan, Checkpoint, CheckpointFormat, Capability, NewFile, StoredFile, StoredTensor,
)
from reshard.dtypes import dtype
from reshard.layout import Layout

NUMBER = 7


class RawFormat(CheckpointFormat):
    """Every tensor whole: the bytes of one float32 vector in a file `name.raw`."""

    name = "outside-raw"
    evidence = "files ending in `.raw`"
    suffixes = (".raw",)
    capabilities = frozenset({Capability.WHOLE})

    def detect(self, listing):
        return any(name.endswith(".raw") for name in listing.names)

    def open(self, path):
        tensors, files = {}, []
        for file in sorted(path.glob("*.raw")):
            size = file.stat().st_size
            name = file.name.removesuffix(".raw")
            layout = Layout.whole((size // 4,), [0], 1)
            binding = Binding(layout, {0: FileRange(file.name, 0)}, {})
            tensors[name] = StoredTensor(name, dtype("float32"), binding)
            files.append(StoredFile(file.name, size, 0))
        return Checkpoint(path, self.name, tensors, tuple(files))

    def plan_write(self, new):
        files, tensors = [], {}
        for name, tensor in new.tensors.items():
            file = f"{name}.raw"
            size = 4 * tensor.layout.shape[0]
            files.append(NewFile(StoredFile(file, size, 0)))
            binding = Binding(tensor.layout, {0: FileRange(file, 0)}, {})
            tensors[name] = StoredTensor(name, tensor.dtype, binding)
        return WritePlan(self.name, None, tensors, tuple(files))


FORMAT = RawFormat()
'''
RECIPE = """
name = "outside"
description = "One layer"
model_types = ["outside-model"]
axes = ["tp"]

[[rules]]
pattern = "weight"
spec = "tp"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which the package is installed, by pip, into a folder."""
    folder = tmp_path_factory.mktemp("outside")
    package = folder / "project" / "outside"
    (package / "recipes").mkdir(parents=True)
    (folder / "project" / "pyproject.toml").write_text(PROJECT)
    for name, text in {
        "__init__.py": "",
        "arrays.py": ARRAYS,
        "broken.py": "raise RuntimeError('it wants a library')",
        "recipes/__init__.py": "",
        "recipes/outside.toml": RECIPE,
    }.items():
        (package / name).write_text(text)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    target = folder / "installed"
    install = [sys.executable, "-m", "pip", "install", *options, "--target", str(target)]
    subprocess.run([*install, str(folder / "project")], check=True)
    paths = [str(target), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command, in a process with the package."""
    command = [sys.executable, "-m", "reshard", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"weight": np.arange(6, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "outside-model"}))
    return folder


def test_the_command_reads_and_writes_its_format(
    installed: dict[str, str], model: Path, tmp_path: Path
) -> None:
    target = tmp_path / "raw"
    ran = run(installed, "convert", model, target, "--to", "full", "--format", "outside-raw")
    assert ran.returncode == 0, ran.stderr
    assert (target / "weight.raw").read_bytes() == np.arange(6, dtype=np.float32).tobytes()
    ran = run(installed, "verify", model, target)
    assert ran.returncode == 0, ran.stderr


def test_its_recipe_is_found_by_name_and_by_model(
    installed: dict[str, str], model: Path, tmp_path: Path
) -> None:
    assert "outside-model" in run(installed, "recipe", "show").stdout
    assert "One layer" in run(installed, "recipe", "show", "outside").stdout
    ran = run(installed, "convert", model, tmp_path / "cut", "--to", "tp=2", "--recipe", "auto")
    assert ran.returncode == 0, ran.stderr


def test_a_broken_one_is_named_and_breaks_no_other(
    installed: dict[str, str], model: Path, tmp_path: Path
) -> None:
    ran = run(installed, "convert", model, tmp_path / "x", "--to", "full", "--format", "unheard-of")
    assert ran.returncode == 2
    left_out = "the plug-in 'broken' of reshard-outside 1.2 is left out (RuntimeError: it wants a"
    assert left_out in " ".join(ran.stderr.split())
    assert (
        "'number' of reshard-outside 1.2 is left out (7 is not an instance of a class"
        in " ".join(ran.stderr.split())
    )
    ran = run(installed, "recipe", "show", "unheard-of")
    assert "'none' of reshard-outside 1.2 is left out" in " ".join(ran.stderr.split())
    assert run(installed, "inspect", model).returncode == 0


def test_plugins_are_not_imported_with_reshard(installed: dict[str, str]) -> None:
    program = "import sys, reshard; sys.exit('outside.arrays' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env=installed).returncode == 0


def test_a_plugin_in_a_zip_file_on_the_path_is_found(tmp_path: Path) -> None:
    archive = tmp_path / "packed.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("packed.py", "VALUE = 3")
        file.writestr("packed-1.0.dist-info/METADATA", "Name: packed\nVersion: 1.0\n")
        file.writestr("packed-1.0.dist-info/entry_points.txt", "[some.group]\nthree = packed:VALUE")
    program = (
        "import sys\n"
        f"sys.path.append({str(archive)!r})\n"
        "from reshard.plugins import load_plugins\n"
        "print([(str(plugin), plugin.value) for plugin in load_plugins('some.group')])\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.strip() == "[(\"the plug-in 'three' of packed 1.0\", 3)]", ran.stderr


def test_looking_for_plugins_where_there_are_none_imports_no_metadata() -> None:
    program = (
        "import sys\n"
        "from reshard.plugins import load_plugins\n"
        "print(load_plugins('reshard.nothing'), 'importlib.metadata' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.split() == ["()", "False"], ran.stderr
