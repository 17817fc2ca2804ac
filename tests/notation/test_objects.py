"""`sharding_of`: live objects of torch, jax and Megatron, and our own, by one function."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import reshard
import reshard.spmd as sp
from reshard.errors import NotationError, RuleError, SpecError
from reshard.megatron import LocalParameter, MegatronGrids, MegatronParameter, MegatronRanks
from reshard.notation import parse_dtensor, sharding_of

MESH = reshard.DeviceMesh.of(dp=2, tp=2)


def attributes(shape: tuple[int, ...], **more: Any) -> SimpleNamespace:
    """A parameter as Megatron marks it, whatever its framework."""
    return SimpleNamespace(shape=shape, dtype="float32", **more)


def test_objects_with_a_sharding_of_reshard_keep_it() -> None:
    spec = reshard.spec(MESH, "dp, tp")
    assert sharding_of(spec) is spec
    assert sharding_of(sp.array(np.ones((4, 4)), spec)) is spec


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ({}, "-, -"),
        ({"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}, "-, -"),
        ({"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}, "tp, -"),
        ({"tensor_model_parallel": True, "partition_dim": 1}, "-, tp"),
        ({"tensor_model_parallel": True, "partition_stride": 2}, "tp@stride2[8,8], -"),
        ({"tensor_model_parallel": True, "partition_sizes": [4, 2, 2]}, "tp@blocks[8,4,4], -"),
    ],
    ids=str,
)
def test_a_parameter_of_megatron(marks: dict[str, Any], expected: str) -> None:
    ranks = MegatronRanks(tp=2, dp=2)
    spec = sharding_of(attributes((8, 4), **marks), ranks)
    assert str(spec) == expected
    assert spec.mesh is ranks.dense
    assert sharding_of(attributes((8, 4), **marks), MegatronGrids(ranks.dense, MESH)) is spec


def test_a_parameter_over_a_mesh_of_any_axes() -> None:
    marked = attributes((8, 4), tensor_model_parallel=True, partition_dim=1)
    assert sharding_of(marked, MESH) is reshard.spec(MESH, "-, tp")
    expert = attributes((8, 4), tensor_model_parallel=True, allreduce=False)
    assert str(sharding_of(expert, reshard.DeviceMesh.of(ep=2, etp=2))) == "etp, -"
    assert sharding_of(expert, MegatronRanks(tp=2, ep=2, dp=2)).mesh.axis_names[-1] == "etp"
    with pytest.raises(NotationError, match=r"sharded over etp, but the mesh .* has no such axis"):
        sharding_of(expert, MESH)


def test_parameters_of_gather_parameters_have_shardings() -> None:
    local = LocalParameter((8, 4), tensor_model_parallel=True)
    ranks = MegatronRanks(tp=2)
    assert str(sharding_of(local, ranks)) == "tp, -"
    assert str(sharding_of(MegatronParameter(ranks, (8, 4), True, 1))) == "-, tp"


def test_invalid_attributes_are_refused() -> None:
    ranks = MegatronRanks(tp=2)
    marked = attributes((8, 4), tensor_model_parallel=True, partition_dim=2)
    with pytest.raises(SpecError, match="partition_dim=2 of a parameter of 2 dimensions"):
        sharding_of(marked, ranks)
    marked = attributes((8, 4), tensor_model_parallel=True, partition_dim=0.5)
    with pytest.raises(SpecError, match=r"partition_dim 0\.5 must be a whole number"):
        sharding_of(marked, ranks)
    marked = attributes((8, 4), tensor_model_parallel=True, partition_sizes=(1, 2))
    with pytest.raises(RuleError, match="add up to 3"):
        sharding_of(marked, ranks)


@pytest.mark.parametrize(
    ("value", "mesh", "said"),
    [
        (
            np.zeros(3),
            None,
            "type ndarray has no attributes of a sharding over ranks; give a DTensor",
        ),
        (np.zeros(3), MESH, "type ndarray has no attributes of a sharding over ranks"),
        (None, None, "type NoneType has no attributes"),
        (7, MegatronRanks(), "type int has no attributes"),
        ("dp, tp", MESH, "'dp, tp' is a text, which `reshard.notation.read_sharding` reads"),
        (reshard.Layout.replicated((2,), 2), None, "no mesh axes"),
        (attributes((2,), tensor_model_parallel=True), None, "but not its ranks; give them"),
        (attributes((2,), tensor_model_parallel=True), "tp=2", "mesh='tp=2' of type str; give a"),
    ],
    ids=str,
)
def test_errors_of_objects_without_a_sharding_list_those_that_have_one(
    value: object, mesh: object, said: str
) -> None:
    with pytest.raises(NotationError, match=said):
        sharding_of(value, mesh)


def test_objects_of_torch() -> None:
    torch = pytest.importorskip("torch")
    placements = pytest.importorskip("torch.distributed.tensor.placement_types")
    import reshard.torch
    from checkpoint.torch_checkpoints import cut, mesh_of, standing_for

    assert reshard.torch.sharding_of is sharding_of
    with standing_for(1, 4):
        mesh = mesh_of(2, 2, names=("dp", "tp"))
        both = [placements.Shard(0), placements.Shard(1)]
        tensor = cut(torch.arange(12).reshape(6, 2), mesh, both)
        spec = sharding_of(tensor)
        assert spec is parse_dtensor(repr(tensor), None, (6, 2))
        assert sharding_of(torch.nn.Parameter(tensor.float())) is spec
        assert sharding_of(tensor._spec) is spec
        described = SimpleNamespace(device_mesh=mesh, placements=both, shape=(6, 2))
        assert sharding_of(described) is spec
        linear = torch.nn.Linear(4, 8)
        linear.weight.tensor_model_parallel = True
        assert str(sharding_of(linear.weight, mesh)) == "tp, -"
        assert str(sharding_of(linear.bias, MegatronRanks(tp=2))) == "-"
    with pytest.raises(NotationError, match="type Tensor has no attributes of a sharding"):
        sharding_of(torch.zeros(2))


JAX = """
import jax, numpy as np
from reshard.notation import sharding_of
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("y", "x"))
array = jax.device_put(np.zeros((4, 6)), sharding)
print(*{str(one) for one in (
    sharding_of(array), sharding_of(sharding), sharding_of(sharding.spec, mesh)
)})
import sys
print("torch" in sys.modules)
"""


def test_objects_of_jax() -> None:
    pytest.importorskip("jax")
    flags = "--xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, "-c", JAX],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["y, x", "False"]


def test_no_framework_is_imported() -> None:
    program = (
        "import sys; from reshard.notation import sharding_of; "
        "from reshard.megatron import LocalParameter, MegatronRanks; "
        "sharding_of(LocalParameter((2,)), MegatronRanks()); "
        "print({'torch', 'jax'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout == "set()\n"
