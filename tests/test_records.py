"""Frozen records behave as frozen dataclasses do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import ClassVar

import pytest

from reshard._records import Record


class Base(Record):
    kind: ClassVar[str] = "base"
    first: int


class Pair(Base):
    second: int = 2

    def __post_init__(self) -> None:
        if self.second < 0:
            raise ValueError("negative")


class Columns(Record, eq=False):
    values: list[int]


class Labelled(Record):
    size: int = dataclasses.field(default=1, metadata={"unit": "bytes"})
    labels: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)
    note: list[str] | None = dataclasses.field(default=None, compare=False)
    values: list[int] = dataclasses.field(default_factory=list, hash=False)


def test_field_specifiers_give_defaults_metadata_and_comparison() -> None:
    first, second = Labelled(), Labelled(note=["not hashable"])
    assert first == second != Labelled(values=[1])
    assert hash(first) == hash(second) == hash(Labelled(values=[1]))
    assert first.labels == {}
    assert first.labels is not second.labels
    fields = {field.name: field for field in dataclasses.fields(Labelled)}
    assert fields["size"].metadata == {"unit": "bytes"}
    assert fields["size"].default == 1


def test_dataclasses_derive_from_records() -> None:
    @dataclasses.dataclass(frozen=True)
    class Derived(Labelled):
        names: list[str] = dataclasses.field(default_factory=list)

    assert (Derived().labels, Derived(2, names=["a"]).size) == ({}, 2)
    assert Derived(names=["a"]) == dataclasses.replace(Derived(), names=["a"])


def test_the_functions_of_dataclasses_accept_records() -> None:
    record: object = Pair(1)
    assert dataclasses.is_dataclass(record)
    assert dataclasses.asdict(Pair(1)) == {"first": 1, "second": 2}
    assert dataclasses.astuple(Pair(1, 4)) == (1, 4)
    assert dataclasses.replace(Labelled(size=2), labels={"a": "b"}).size == 2
    assert [field.name for field in dataclasses.fields(Base)] == ["first"]


def test_fields_are_those_of_the_bases_first() -> None:
    assert Pair.field_names == ("first", "second")
    assert Pair(1) == Pair(first=1, second=2) == Pair(1, second=2)
    assert repr(Pair(1, 3)) == "Pair(first=1, second=3)"
    assert (Pair.kind, Pair(1).astuple()) == ("base", (1, 2))


def test_records_compare_and_hash_by_fields_and_class() -> None:
    assert len({Pair(1), Pair(1, 2), Pair(2)}) == 2
    assert Pair(1) != Base(1)
    assert Columns([1]) != Columns([1])
    assert len({Columns([1]), Columns([1])}) == 2


@pytest.mark.parametrize(
    "args", [((), {}), ((1, 2, 3), {}), ((1,), {"first": 1}), ((1,), {"x": 1})]
)
def test_arguments_that_are_missing_unknown_or_double_are_errors(
    args: tuple[tuple[int, ...], dict[str, int]],
) -> None:
    with pytest.raises(TypeError, match=r"Pair\(\) takes first, second; got"):
        Pair(*args[0], **args[1])


def test_records_are_frozen_and_replaced() -> None:
    pair = Pair(1)
    with pytest.raises(AttributeError, match="cannot set 'first': a Pair is frozen"):
        pair.first = 3  # type: ignore[misc]
    with pytest.raises(AttributeError, match="cannot delete 'first'"):
        del pair.first
    assert pair.replace(second=5) == Pair(1, 5)
    with pytest.raises(ValueError, match="negative"):
        pair.replace(second=-1)


def test_records_are_copied_and_pickled() -> None:
    for pair in (copy.copy(Pair(1)), copy.deepcopy(Pair(1)), pickle.loads(pickle.dumps(Pair(1)))):
        assert pair == Pair(1)
