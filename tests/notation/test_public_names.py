"""What `reshard.notation` has for users, and that it loads no more than is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from reshard import megatron, notation, recipes
from reshard.notation.registry import list_public_names


def test_each_notation_adds_its_two_functions() -> None:
    for module, names in list_public_names().items():
        assert set(names) <= set(notation.__all__) <= set(dir(notation))
        assert {getattr(notation, name).__module__ for name in names} == {module}


@pytest.mark.parametrize("package", [notation, megatron, recipes])
def test_all_that_is_promised_is_there(package: object) -> None:
    for name in package.__all__:  # type: ignore[attr-defined]
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'lama'"):
        package.lama  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("package", "unwanted"),
    [
        ("reshard.notation", ["reshard.megatron", "reshard.notation.mlir", "torch", "jax"]),
        ("reshard.megatron", ["reshard.notation", "torch"]),
        ("reshard.recipes", ["reshard.recipes.resharding", "asyncio", "torch"]),
    ],
)
def test_a_package_loads_little(package: str, unwanted: list[str]) -> None:
    program = f"import sys, {package}; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not set(unwanted) & set(run.stdout.split())
