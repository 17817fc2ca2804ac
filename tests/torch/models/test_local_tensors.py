"""What is found by columns of addresses is what comparing each with each finds."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.layout import Layout
from reshard.torch.models.local_tensors import (
    ParameterColumns,
    TensorSignature,
    _are_apart,
)

SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 8)).map(lambda one: ("cpu", one[0], sum(one), "")),
    max_size=6,
)


@given(SPANS, SPANS)
def test_memory_is_disjoint_if_no_target_overlaps_anything(
    sources: list[tuple[str, int, int, str]], targets: list[tuple[str, int, int, str]]
) -> None:
    pairs = [*itertools.combinations(targets, 2), *itertools.product(sources, targets)]
    expected = not any(one[1] < other[2] and other[1] < one[2] for one, other in pairs)
    assert _are_apart(sources, targets) == expected


def test_addresses_of_several_devices_are_not_compared() -> None:
    assert not _are_apart([("cpu", 0, 8, "a")], [("cuda:0", 16, 24, "b")])


WHOLE = Layout.whole((4, 2), [0], 1)


def read(values: list[object]) -> ParameterColumns:
    found = ParameterColumns.of(values)
    assert found is not None
    return found


def test_tensors_of_equal_properties_share_a_signature() -> None:
    found = read([torch.zeros(4, 2), torch.ones(4, 2), (torch.zeros(4, 2), WHOLE), (None, WHOLE)])
    assert found.numbers == [0, 0, 1, 2]
    assert [signature.cut for signature in found.kinds] == [None, WHOLE, WHOLE]
    assert found.kinds[2] == TensorSignature(WHOLE, False)
    assert len(found.addresses) == 3


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "another place": lambda one: setattr(one, "data", torch.zeros(4, 2)),
    "strides": lambda one: one.as_strided_((4, 2), (1, 4)),
    "shape": lambda one: one.resize_(2, 4),
    "a view of other rows": lambda one: setattr(one, "data", one.data[:2]),
    "dtype": lambda one: setattr(one, "data", one.data.view(torch.int32)),
    "a gradient": lambda one: one.requires_grad_(),
    "a mark of Megatron's": lambda one: setattr(one, "tensor_model_parallel", True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("has_layout", [False, True])
def test_changed_tensors_are_read_again(
    change: Callable[[torch.Tensor], object], has_layout: bool
) -> None:
    tensor = torch.zeros(4, 2)
    values = [(tensor, WHOLE) if has_layout else tensor, torch.ones(3)]
    columns = read(values)
    assert columns.is_unchanged(list(values))
    change(tensor)
    # Of a tensor with its layout nobody asks what Megatron says of it.
    is_marked = has_layout and hasattr(tensor, "tensor_model_parallel")
    assert columns.is_unchanged(values) == is_marked


def test_other_objects_are_read_again() -> None:
    tensor, layout = torch.zeros(4, 2), WHOLE
    columns = read([(tensor, layout)])
    assert not columns.is_unchanged([(tensor, layout)])
    assert not columns.is_unchanged([*columns.values, tensor])
    assert not columns.is_unchanged([])


def test_tensors_that_became_conjugate_or_negative_are_read_again() -> None:
    tensor = torch.zeros(2, dtype=torch.complex64)
    columns = read([tensor])
    assert columns.is_unchanged([tensor])
    tensor.data = tensor.data.conj()
    assert not columns.is_unchanged([tensor])
    part = torch.zeros(2)
    columns = read([part])
    part.data = torch._neg_view(part.data)
    assert not columns.is_unchanged([part])


def test_dtensors_of_other_parts_or_placements_are_read_again() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    how = {"run_check": False, "shape": torch.Size([4, 2]), "stride": (2, 1)}
    tensor, other = (
        DTensor.from_local(torch.zeros(4, 2), mesh, [cut], **how) for cut in (Shard(0), Replicate())
    )
    columns = read([tensor])
    assert columns.is_unchanged([tensor])
    tensor._spec = other._spec
    assert not columns.is_unchanged([tensor])
    columns = read([tensor])
    assert columns.is_unchanged([tensor])
    tensor._local_tensor = torch.zeros(4, 2)
    assert not columns.is_unchanged([tensor])
