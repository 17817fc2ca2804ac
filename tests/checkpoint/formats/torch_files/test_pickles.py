"""Pickles are read and written as Python does, and never do what they say."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import pickletools
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoint.formats.torch_files.pickles import (
    Alike,
    Call,
    Global,
    Pairs,
    Reference,
    count_parts,
    read_pickle,
    write_pickle,
)
from reshard.errors import FormatError, UsageError

PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False)
KEYS = st.text() | st.integers(0, 2**40) | st.tuples(st.text(), st.integers())
VALUES = st.recursive(
    PLAIN | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.tuples(inner, inner)
    ),
)


@given(VALUES, st.integers(2, 5))
def test_plain_values_are_read_as_python_reads_them(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), "x") == value


@given(VALUES)
def test_plain_values_are_written_as_python_reads_them(value: Any) -> None:
    content = write_pickle(value)
    assert pickle.loads(content) == value
    assert read_pickle(content, "x") == value


def test_many_names_and_texts_are_recalled() -> None:
    value = [f"{number % 600}" for number in range(1200)]
    content = write_pickle(value)
    assert pickle.loads(content) == value
    assert len(content) < 12_000


@pytest.mark.parametrize("in_pairs", [False, True])
def test_values_that_differ_in_a_text_have_the_bytes_of_values_written_singly(
    in_pairs: bool,
) -> None:
    """Including values inside others, and those whose text has occurred elsewhere."""
    mesh = Call(Global("m", "Mesh"), (), {"name": "4", "sizes": (2, 2)}, is_new=True)

    def part(number: int, size: int) -> Call:
        storage = Reference(("storage", str(number), size))
        return Call(Global("m", "rebuild"), (storage, (size,), Call(Global("m", "Hooks"), ())))

    def wrapper(number: int, size: int, inner: object) -> Call:
        spec = Call(Global("m", "Spec"), (), {"mesh": mesh, "size": size}, is_new=True)
        return Call(Global("m", "Wrapper"), (inner,), {"spec": spec, "size": 1000}, is_new=True)

    def write(is_alike: bool) -> bytes:
        def value(number: int) -> object:
            size, text = number % 3, str(number)
            inner = Alike(size, text, lambda: part(number, size))
            own = inner if is_alike else part(number, size)
            if number % 2:
                return own
            outer = Alike(("w", size), text, lambda: wrapper(number, size, inner))
            return outer if is_alike else wrapper(number, size, own)

        items = [(("7", "290", "é")[n // 5] if n in (4, 9, 14) else f"w{n}", n) for n in range(300)]
        values = [(name, value(number)) for name, number in items]
        return write_pickle(Pairs(lambda: iter(values)) if in_pairs else dict(values))

    assert write(is_alike=True) == write(is_alike=False)


def test_bytes_are_read() -> None:
    for value in (b"abc", bytes(300)):
        assert read_pickle(pickle.dumps(value, 4), "x") == value


def test_calls_are_remembered_and_not_made() -> None:
    value = collections.OrderedDict(a=1, b=[2])
    found = read_pickle(pickle.dumps(value), "x")
    assert isinstance(found, Call)
    assert (found.function, found.arguments) == (Global("collections", "OrderedDict"), ())
    assert (found.items, found.state) == ({"a": 1, "b": [2]}, None)
    assert pickle.loads(write_pickle(found)) == value


def test_references_are_kept() -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return ("storage", 7) if value == "outside" else None

    stream = io.BytesIO()
    Pickler(stream, 2).dump(["outside", "inside"])
    found = read_pickle(stream.getvalue(), "x")
    assert isinstance(found[0], Reference)
    assert found[0].key == ("storage", 7)
    assert found[1] == "inside"
    again = read_pickle(write_pickle(found), "x")
    assert (again[0].key, again[1]) == (found[0].key, found[1])


class Harm:
    """What an attacker pickles: a call of anything with anything."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = (function, arguments)

    def __reduce__(self) -> Any:
        return self.called


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "function", [os.system, eval, exec, getattr, __import__, pickle.loads, os.path.join]
)
def test_a_call_of_any_function_is_recorded_and_not_made(
    tmp_path: Path, function: Any, protocol: int
) -> None:
    command = f"touch {tmp_path / 'ran'}"
    content = pickle.dumps({"w": Harm(function, command)}, protocol)
    # Protocol 0 has other opcodes.
    with contextlib.nullcontext() if protocol else pytest.raises(FormatError, match="opcode"):
        called = read_pickle(content, "x")["w"]
        assert (called.function.name, called.arguments) == (function.__name__, (command,))
    assert not (tmp_path / "ran").exists()


def test_names_are_not_imported() -> None:
    content = b"\x80\x02cmodule_that_would_be_imported\nthing\n)R."
    assert isinstance(read_pickle(content, "x"), Call)
    assert "module_that_would_be_imported" not in sys.modules


def test_dotted_names_are_not_resolved() -> None:
    content = b"\x80\x04\x8c\x02os\x8c\x0bpath.system\x93."
    assert read_pickle(content, "x") == Global("os", "path.system")


READ = {
    *("PROTO", "FRAME", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE"),
    *("BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "EMPTY_LIST"),
    *("EMPTY_DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "MEMOIZE", "BINPUT"),
    *("LONG_BINPUT", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE"),
    *("NEWOBJ", "BUILD", "BINPERSID", "STOP", "NEWOBJ_EX", "BINSTRING", "SHORT_BINSTRING"),
    *("POP", "POP_MARK", "DUP", "EMPTY_SET", "ADDITEMS", "FROZENSET", "BYTEARRAY8"),
}


@pytest.mark.parametrize("opcode", pickletools.opcodes, ids=lambda opcode: opcode.name)
def test_other_opcodes_are_refused_by_name(opcode: Any) -> None:
    content = b"\x80\x04" + opcode.code.encode("latin-1") + bytes(20)
    with pytest.raises(FormatError) as error:
        read_pickle(content, "x")
    assert (f"the opcode {opcode.name} does not occur" in str(error.value)) == (
        opcode.name not in READ
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends early"),
        (b"\x80\x06N.", "protocol 6"),
        (b"\x80\x04\x8a\xff" + bytes(300) + b".", "an integer of 255 bytes"),
        (b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.", "should follow"),
        (b"\x80\x04]r\xff\xff\xff\xff.", None),
        (b"\x80\x04]j\x05\x00\x00\x00.", "remembers nothing under 5"),
        (b"\x80\x04NN.", "left over"),
        (b"\x80\x04(.", "left over"),
        (b"\x80\x04(((t.", "left over"),
        (b"\x80\x04t.", "a mark is missing"),
        (b"\x80\x04Nt.", "a mark is missing"),
        (b"\x80\x04}(Nu.", "shorter|longer"),
        (b"\x80\x04NNa.", "list"),
        (b"\x80\x04NNR.", "not of a name with a tuple"),
        (b"\x80\x04\x8c\x02\xff\xff.", "not UTF-8"),
        (b"\x80\x04\xfeN.", "byte 254"),
    ],
)
def test_damaged_pickles_are_errors(content: bytes, message: str | None) -> None:
    if message is None:
        assert read_pickle(content, "x") == []
        return
    with pytest.raises(FormatError, match=message):
        read_pickle(content, "x")


def test_a_key_that_takes_forever_to_hash_is_not_hashed() -> None:
    # A tuple of two that are each a tuple of two ...: 2 ** 60 of them, one after the other.
    nested = b"\x80\x04K\x00" + b"\x94h\x00\x86"
    for number in range(1, 60):
        nested += b"\x94h" + bytes([number]) + b"\x86"
    with pytest.raises(FormatError, match="parts of it that are shared"):
        read_pickle(nested + b".", "x")
    # As a key of a dict, which Python would hash.
    (key,) = read_pickle(b"\x80\x04}" + nested[2:] + b"Ns.", "x")
    assert type(key) is Reference


def test_deep_nesting_is_no_recursion() -> None:
    found = read_pickle(b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".", "x")
    assert isinstance(found, list)


@given(VALUES, st.data())
def test_any_change_gives_a_value_or_an_error(value: Any, data: st.DataObject) -> None:
    content = bytearray(pickle.dumps(value, data.draw(st.integers(2, 5))))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError):
        read_pickle(bytes(content), "x")


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(UsageError, match="a set cannot be written"):
        write_pickle({1, 2})


def doubled(kind: str, depth: int) -> bytes:
    """A pickle whose every part holds the one before twice, as `kind` does."""
    opened, closed = {
        "list": (b"](", b"e"),
        "tuple": (b"(", b"t"),
        "dict": (b"}(", b"u"),
        "duplicate": (b"", b""),
    }[kind]
    keys = (b"K\x01", b"K\x02") if kind == "dict" else (b"", b"")
    parts = [b"\x80\x02K\x07\x85q\x00"]
    for number in range(1, depth):
        before = b"h" + bytes([number - 1])
        if kind == "duplicate":
            parts.append(b"2\x86q" + bytes([number]))
            continue
        twice = b"".join(key + before for key in keys)
        parts.append(b"0" + opened + twice + closed + b"q" + bytes([number]))
    return b"".join(parts) + b"."


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "duplicate"])
def test_shared_parts_take_no_more_than_their_bytes_allow(kind: str) -> None:
    """Of 60 doublings whoever walks through the value would meet 2**60 parts."""
    with pytest.raises(FormatError, match="parts of it that are shared make more than"):
        read_pickle(doubled(kind, 60), "x")
    assert read_pickle(doubled(kind, 10), "x")


def test_recalled_parts_that_the_value_lacks_do_not_count() -> None:
    # A list of 1000, recalled and dropped 1000 times: a million parts in 8 kB, none of them left.
    listed = b"](" + b"K\x07" * 1000 + b"eq\x00"
    assert read_pickle(b"\x80\x02" + listed + b"h\x000" * 1000 + b".", "x") == [7] * 1000


def test_parts_that_are_shared_many_times_are_read() -> None:
    betas = (0.9, 0.95)
    groups = [{"betas": betas, "params": [number]} for number in range(1000)]
    assert read_pickle(pickle.dumps(groups), "x") == groups


def test_a_value_that_holds_itself_is_counted() -> None:
    value: list[object] = [1]
    value.append(value)
    assert count_parts(value, 100) == 3
