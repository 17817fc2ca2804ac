"""Nested states become names and come back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.binding import View
from reshard.checkpoint.formats.torch_files.nested_states import (
    PlainValues,
    flatten_state,
    settle_paths,
    unflatten_state,
)
from reshard.checkpoint.formats.torch_files.pickles import Call, Global
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor
from reshard.dtypes import dtype
from reshard.errors import FormatError


class Leaf:
    """Stands for a tensor."""


def is_leaf(value: Any) -> bool:
    return isinstance(value, Leaf)


STATES = st.dictionaries(
    st.text(alphabet="abc", min_size=1),
    st.recursive(
        st.integers() | st.builds(Leaf) | st.lists(st.integers()),
        lambda inner: (
            st.dictionaries(st.text(alphabet="abc", min_size=1), inner, min_size=1, max_size=3)
            | st.lists(inner, min_size=1, max_size=3)
        ),
        max_leaves=8,
    ),
    min_size=1,
)


@given(STATES)
def test_what_was_flattened_comes_back(state: Any) -> None:
    flat = flatten_state(state, "x", is_leaf)
    assert not flat.unread
    assert unflatten_state({**flat.values, **flat.tensors}, flat.paths) == state


@given(
    st.dictionaries(
        st.lists(st.sampled_from(["a", "b", "c.d", 0, 1]), min_size=1, max_size=4).map(tuple),
        st.text(alphabet="ab.", min_size=1, max_size=4) | st.none(),
        max_size=8,
    )
)
def test_whatever_the_paths_are_the_names_come_back(given: Any) -> None:
    """Some paths say other names than the leaves have, are taken, or lead through a leaf."""
    paths = {named or ".".join(map(str, path)): path for path, named in given.items()}
    leaves = {name: Leaf() for name in paths}
    state = unflatten_state(leaves, settle_paths(leaves, paths)) if leaves else {}
    found = flatten_state(state, "x", is_leaf).tensors
    assert {name: found[name] for name in leaves} == leaves


def test_an_optimizer_has_its_own_numbers_again() -> None:
    state = {"state": {0: {"step": Leaf()}, 2: {"step": Leaf()}}, "param_groups": [{"lr": 0.1}]}
    flat = flatten_state(state, "x", is_leaf)
    assert list(flat.tensors) == ["state.0.step", "state.2.step"]
    assert flat.values == {"param_groups": [{"lr": 0.1}]}
    assert unflatten_state({**flat.values, **flat.tensors}, flat.paths) == state


def test_lists_are_walked_where_they_hold_tensors() -> None:
    one, two = Leaf(), Leaf()
    flat = flatten_state({"a": [1, (one, {"b": two})], "c": [[1], [2]]}, "x", is_leaf)
    assert flat.tensors == {"a.1.0": one, "a.1.1.b": two}
    assert flat.values == {"a.0": 1, "c": [[1], [2]]}
    assert flat.paths["a.1.1.b"] == ("a", 1, 1, "b")


def test_objects_of_classes_are_not_read() -> None:
    state = {"a": Call(Global("m", "C"), ()), "b": [1, Call(Global("m", "D"), ())], "d": b"x"}
    flat = flatten_state(state, "x", is_leaf)
    assert flat.unread == {"a": "an object of m.C", "b": "an object of m.D", "d": "a bytes"}
    assert not flat.values


def test_names_that_clash_are_an_error() -> None:
    with pytest.raises(FormatError, match=r"f: \['a', 'b'\] and \['a.b'\] are both named 'a.b'"):
        flatten_state({"a": {"b": Leaf()}, "a.b": Leaf()}, "f", is_leaf)


def test_a_state_in_itself_is_an_error() -> None:
    state: dict[str, Any] = {"a": Leaf()}
    state["b"] = state
    with pytest.raises(FormatError, match="does it hold itself"):
        flatten_state(state, "f", is_leaf)
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(FormatError, match="does it hold itself"):
        flatten_state({"c": loop}, "f", is_leaf)


def test_a_leaf_with_parts_is_an_error() -> None:
    with pytest.raises(FormatError):
        unflatten_state({"a": 1, "a.b": 2}, {"a": ("a",), "a.b": ("a", "b")})
    with pytest.raises(FormatError):
        unflatten_state({"a.b": 2, "a": 1}, {"a": ("a",), "a.b": ("a", "b")})


def test_values_of_several_states_are_collected() -> None:
    """Under their prefixes; names that are taken, tensors and objects are listed."""
    tensor = ArchivedTensor(dtype("float32"), (), View(0, ()), 64, 4, None)
    plain, tensors = PlainValues(), []
    plain.add("optimizer.step", 3, ("optimizer", "step"))
    plain.add("odd", Call(Global("m", "C"), ()))
    plain.add_state({"lr": 0.1, "step": 4}, ("optimizer",))
    plain.add_state({"mean": tensor}, (), "file", lambda *found: tensors.append(found))
    plain.add_state({"lost": tensor})
    assert plain.values == {"optimizer.step": 3, "optimizer.lr": 0.1}
    assert plain.paths == {
        "optimizer.step": ("optimizer", "step"),
        "optimizer.lr": ("optimizer", "lr"),
        "mean": ("mean",),
    }
    assert tensors == [("mean", "file", tensor)]
    assert plain.unread == [
        ("odd", "an object of m.C"),
        ("optimizer.step", "another value has this name"),
        ("lost", "a tensor among plain values"),
    ]


def test_a_value_that_contains_a_tensor_is_not_read() -> None:
    """Such as a learning rate that is a tensor; types of elements are text."""
    tensor = ArchivedTensor(dtype("float32"), (), View(0, ()), 64, 4, None)
    plain = PlainValues()
    plain.add("groups", [{"lr": tensor, "params": [0]}])
    plain.add("kind", {"dtype": Global("torch", "bfloat16")})
    assert plain.values == {"kind": {"dtype": "torch.bfloat16"}}
    assert plain.unread == [("groups", "a tensor among plain values")]
