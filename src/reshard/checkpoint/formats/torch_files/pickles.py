"""Pickles, read without running them and written without the classes that they name.

A pickle is a program: it names functions and classes, and calls them. PyTorch's checkpoints are
full of pickles of a few known shapes. `read_pickle` interprets their opcodes on a stack of its own:

1. Numbers, text, lists, tuples and dicts become themselves.
2. The name of something to import becomes a `Global`, two strings. Nothing is imported.
3. A call or a new object becomes a `Call`, which records function, arguments, state, items and
   members. Nothing is called.
4. An opcode that no such pickle has is an error. The value is at most a small multiple of the bytes
   read, and only plain values are hashed. Shared parts count once for each place that refers to
   them, since code that walks through the value meets them there.

Two functions, `make` and `refer`, replace the calls and references that they know by values of
their own while the pickle is read, so that a description of a million tensors is never in memory as
a whole.

`write_pickle` is the inverse: it writes the opcodes that Python would write, in protocol 2, which
every PyTorch reads.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from reshard.errors import FormatError, UsageError

# Integers longer than sizes, offsets and states of generators only cost time.
_MAX_INTEGER_BYTES = 40
_MAX_READ_PROTOCOL = 5
# The default of `torch.save`; `torch.load` warns of others.
_WRITTEN_PROTOCOL = 2
_UNSIGNED, _SIGNED = struct.Struct("<I").unpack_from, struct.Struct("<i").unpack_from
# The memo's entry for a part that was released after a value had been built of it.
_RELEASED = object()
# How many of the last memo entries can be parts of a tensor: its sizes, strides, hooks, storage,
# arguments.
_PARTS = 6
# A value may have this many parts, and this many more for each byte of its pickle.
_MIN_PARTS, _PARTS_PER_BYTE = 10_000, 64


@dataclass(frozen=True, slots=True)
class Global:
    """The name of something that a pickle would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Call:
    """A call that a pickle would make: `function(*arguments)`, then given `state`.

    `is_new` marks an object made without its constructor. A dict is given its `items`, a list its
    `members`, after construction. Calls compare by identity, so that hashing is shallow.
    """

    function: Global
    arguments: tuple[Any, ...]
    state: Any = None
    is_new: bool = False
    items: dict[Any, Any] | None = None
    members: list[Any] | None = None

    def __repr__(self) -> str:
        return f"<{self.function}>"


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A persistent id: an object outside the pickle, such as a storage, identified by `key`."""

    key: Any

    def __repr__(self) -> str:
        return "<a reference>"


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """A dict with very many items, which `iterate()` makes while they are written.

    Items share no parts, so that the writer remembers nothing of them.
    """

    iterate: Callable[[], Iterator[tuple[Any, Any]]]

    def __repr__(self) -> str:
        return "<items>"


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """A value that equals many others except for a text, such as the name of a tensor's storage.

    `make()` returns the value. Values of the same `kind` differ only in `text`, which each contains
    once. The pickle contains each object with a state once, except those that all values of a kind
    share.
    """

    kind: Hashable
    text: str
    make: Callable[[], Any]


# Returns the value of a call and whether it is the only user of its arguments, or None.
Make = Callable[[Global, tuple[Any, ...]], tuple[Any, bool] | None]
# Returns the value of a reference by its key.
Refer = Callable[[Any], Any]


def _make_nothing(function: Global, arguments: tuple[Any, ...]) -> None:
    """Leave a call as it is."""


def shortened(text: str, max_length: int = 120) -> str:
    """Return text from a file at a length that fits into a message."""
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


class PickleEndsEarlyError(FormatError):
    """The content ends before the pickle does."""


def read_pickle(
    content: bytes, label: str, make: Make = _make_nothing, refer: Refer = Reference
) -> Any:
    """Return the value that a pickle describes; `label` names it in errors.

    Bytes after the end of the pickle are ignored, as by Python.

    >>> import datetime, pickle
    >>> read_pickle(pickle.dumps([1, "b", None, datetime.date(2026, 1, 1)]), "x")
    [1, 'b', None, <datetime.date>]

    Raises:
        FormatError: an unexpected opcode, or a damaged pickle.
    """
    return read_pickle_at(content, 0, label, make, refer)[0]


def read_pickle_at(
    content: bytes,
    start: int,
    label: str,
    make: Make = _make_nothing,
    refer: Refer = Reference,
) -> tuple[Any, int]:
    """Return the value of the pickle at `start`, and the offset of its end.

    Keys of dicts other than plain values and flat tuples become a `Reference` to the key.

    Raises:
        FormatError: an unexpected opcode, or a damaged pickle.
        PickleEndsEarlyError: the pickle is longer than `content`.
    """
    try:
        reader = _Reader(content, label, make, refer, start)
        value = reader.read()
    except _ReleasedError:
        # Another value shares a part that was released: read again, and keep every part.
        reader = _Reader(content, label, make, refer, start, keeps_parts=True)
        value = reader.read()
    return value, reader.at


class _ReleasedError(Exception):
    """An error for a part that is recalled after it was released."""


# `pickle.Unpickler` with inert classes for names takes a fifth of this reader's time: 20 of 100 ms
# for the metadata of 2,000 tensors on 2 ranks, 360,000 opcodes, with Python 3.11. A scan of the
# opcodes before it (12 ms) bounds lengths and memo indices, by which a pickle of 9 bytes takes
# 4 GiB. It is not used because it hashes the keys of dicts before they can be checked: a tuple of
# 60 shared levels (250 bytes) takes 2**60 steps, and a tuple of 400,000 levels ends the process. A
# scan that excludes such keys has to follow the stack through all opcodes, as this reader does.
class _Reader:
    """The stack machine of a pickle."""

    def __init__(
        self,
        content: bytes,
        label: str,
        make: Make,
        refer: Refer,
        start: int,
        *,
        keeps_parts: bool = False,
    ) -> None:
        self._content = content
        self._label = label
        self._make, self._refer = make, refer
        self._keeps_parts = keeps_parts
        # The parts that were referred to again, once for each time.
        self._recalled: list[Any] = []
        self._start = start
        self.at = start
        # The values after the last mark, and those before it, by earlier marks.
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        # Memo numbers are consecutive, except in damaged pickles: those are in the dict.
        self._memo: list[Any] = []
        self._scattered: dict[int, Any] = {}
        # Equal names are the same object.
        self._globals: dict[tuple[str, str], Global] = {}

    def read(self) -> Any:
        """Interpret the pickle up to its end."""
        try:
            value = self._run()
        except (IndexError, struct.error) as error:
            if self.at >= len(self._content):
                raise self._ends_early("it ends early") from error
            reason = "it ends early, or takes more from its stack than there is"
            raise self.damaged(reason) from error
        except KeyError as error:
            raise self.damaged(f"it remembers nothing under {error}") from error
        except UnicodeDecodeError as error:
            raise self.damaged("text in it is not UTF-8") from error
        except (TypeError, ValueError) as error:
            if isinstance(error, FormatError):
                raise
            raise self.damaged(str(error)) from error
        self._expect_proportion(value)
        return value

    def damaged(self, reason: str) -> FormatError:
        """Return the error for bytes that are not such a pickle."""
        return FormatError(self._describe(reason))

    def _ends_early(self, reason: str) -> PickleEndsEarlyError:
        return PickleEndsEarlyError(self._describe(reason))

    def _describe(self, reason: str) -> str:
        return (
            f"{self._label} is damaged, or not written by PyTorch: at byte "
            f"{self.at - self._start} of the pickle, {reason}"
        )

    def _run(self) -> Any:
        """Interpret opcodes up to the last, and return the value.

        `_HANDLERS` has a method for each opcode, or None for those that occur for every tensor:
        they are interpreted here, since a call takes longer than their work.
        """
        content, size, handlers = self._content, len(self._content), _HANDLERS
        memo, scattered, outer = self._memo, self._scattered, self._outer
        recalled = self._recalled
        stack, at = self._stack, self.at
        value: Any
        try:
            while True:
                opcode = content[at]
                at += 1
                handler = handlers[opcode]
                if handler is not None:
                    self._stack, self.at = stack, at
                    handler(self)
                    stack, at = self._stack, self.at
                elif opcode == 0x68 or opcode == 0x6A:  # BINGET, LONG_BINGET
                    if opcode == 0x68:
                        number = content[at]
                        at += 1
                    else:
                        at += 4
                        (number,) = _UNSIGNED(content, at - 4)
                    value = memo[number] if number < len(memo) else scattered[number]
                    kind = type(value)
                    if kind is not str and kind is not Global:
                        if value is _RELEASED:
                            raise _ReleasedError
                        if kind in _SHARED:
                            recalled.append(value)
                    stack.append(value)
                elif opcode == 0x94:  # MEMOIZE
                    # The next free number, as in Python's own reader.
                    if scattered:
                        self._memoize(len(memo) + len(scattered), stack[-1])
                    else:
                        memo.append(stack[-1])
                elif opcode == 0x4B:  # BININT1
                    stack.append(content[at])
                    at += 1
                elif opcode == 0x28:  # MARK
                    # The values up to the next opcode that uses the mark are a list of their own.
                    outer.append(stack)
                    stack = []
                elif opcode == 0x86:  # TUPLE2
                    value = stack.pop()
                    stack[-1] = (stack[-1], value)
                elif opcode == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                elif opcode == 0x7D:  # EMPTY_DICT
                    stack.append({})
                elif opcode == 0x29:  # EMPTY_TUPLE
                    stack.append(())
                elif opcode == 0x52 or opcode == 0x81:  # REDUCE, NEWOBJ
                    arguments = stack.pop()
                    stack[-1] = self._call(stack[-1], arguments, opcode == 0x81)
                elif opcode == 0x75:  # SETITEMS
                    values, stack = stack, outer.pop()
                    _set_items(stack[-1], values)
                elif opcode == 0x62:  # BUILD
                    value = stack.pop()
                    target = stack[-1]
                    # Plain values also get attributes: the versions of modules of a state dict.
                    if type(target) is Call:
                        if target.state is not None:
                            raise ValueError(f"{target} is given a state twice")
                        target.state = value
                elif opcode == 0x71 or opcode == 0x72:  # BINPUT, LONG_BINPUT
                    if opcode == 0x71:
                        number = content[at]
                        at += 1
                    else:
                        at += 4
                        (number,) = _UNSIGNED(content, at - 4)
                    if number == len(memo):
                        memo.append(stack[-1])
                    else:
                        self._memoize(number, stack[-1])
                elif opcode == 0x8C or opcode == 0x58:  # SHORT_BINUNICODE, BINUNICODE
                    if opcode == 0x8C:
                        length = content[at]
                        at += 1
                    else:
                        at += 4
                        (length,) = _UNSIGNED(content, at - 4)
                    stop = at + length
                    if stop > size:
                        raise self._lacks(at, length)
                    # A name may be any text of Python, including half a UTF-16 pair.
                    stack.append(str(content[at:stop], "utf-8", "surrogatepass"))
                    at = stop
                elif opcode == 0x4D:  # BININT2
                    at += 2
                    stack.append(content[at - 2] | content[at - 1] << 8)
                elif opcode == 0x4A:  # BININT
                    at += 4
                    stack.append(_SIGNED(content, at - 4)[0])
                elif opcode == 0x4E:  # NONE
                    stack.append(None)
                elif opcode == 0x2E:  # STOP
                    if not outer:
                        value = stack.pop()
                    if outer or stack:
                        raise ValueError("it ends with values left over on its stack")
                    return value
        finally:
            self.at = at

    # Arguments of opcodes.

    def _lacks(self, at: int, size: int) -> PickleEndsEarlyError:
        self.at = at
        return self._ends_early(f"{size} bytes should follow, it ends before")

    def _bytes(self, size: int) -> bytes:
        begin, end = self.at, self.at + size
        if end > len(self._content):
            raise self._lacks(begin, size)
        self.at = end
        return self._content[begin:end]

    def _unsigned(self, size: int) -> int:
        return int.from_bytes(self._bytes(size), "little")

    def _line(self) -> str:
        end = self._content.find(b"\n", self.at)
        if end < 0:
            raise self._ends_early("a line does not end")
        line = self._content[self.at : end].decode("utf-8")
        self.at = end + 1
        return line

    # The stack.

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop_to_mark(self) -> list[Any]:
        """Remove and return the values above the last mark."""
        if not self._outer:
            raise ValueError("a mark is missing")
        values, self._stack = self._stack, self._outer.pop()
        return values

    # Opcodes.

    def unknown(self) -> None:
        opcode = self._content[self.at - 1]
        described = f"the opcode {_NAMES[opcode]}" if opcode in _NAMES else f"byte {opcode}"
        raise self.damaged(f"{described} does not occur in such files")

    def protocol(self) -> None:
        version = self._unsigned(1)
        if version > _MAX_READ_PROTOCOL:
            raise self.damaged(f"protocol {version} is later than {_MAX_READ_PROTOCOL}")

    def long_integer(self) -> None:
        size = self._unsigned(1)
        if size > _MAX_INTEGER_BYTES:
            raise self.damaged(f"an integer of {size} bytes is not a size or an offset")
        self._stack.append(int.from_bytes(self._bytes(size), "little", signed=True))

    def real(self) -> None:
        self._stack.append(struct.unpack(">d", self._bytes(8))[0])

    def long_text(self) -> None:
        self._stack.append(self._bytes(self._unsigned(8)).decode("utf-8", "surrogatepass"))

    def python2_text(self, size: int) -> None:
        content = self._bytes(self._unsigned(size))
        try:
            # Python 2 had the same type for texts and bytes.
            self._stack.append(content.decode("utf-8"))
        except UnicodeDecodeError:
            self._stack.append(content)

    def binary(self, size: int) -> None:
        self._stack.append(self._bytes(self._unsigned(size)))

    def tuple3(self) -> None:
        values = self._stack[-3:]
        if len(values) < 3:
            raise IndexError
        self._stack[-3:] = [tuple(values)]

    def extend(self, values: list[Any]) -> None:
        """Add values to the list on the stack, or to an object that is a list."""
        target = self._stack[-1]
        if type(target) is Call:
            target.members = [] if target.members is None else target.members
            target.members.extend(values)
        elif type(target) is list:
            target.extend(values)
        else:
            raise ValueError("a list should be on the stack")

    def add_to_set(self) -> None:
        values = self.pop_to_mark()
        target = self._stack[-1]
        if type(target) is not Call:
            raise ValueError("a set should be on the stack")
        # An empty set was pushed as a call with a list (`builtin`).
        target.arguments[0].extend(values)

    def duplicate(self) -> None:
        self._stack.append(self._stack[-1])
        if type(self._stack[-1]) in _SHARED:
            self._recalled.append(self._stack[-1])

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        _set_items(self._stack[-1], [key, value])

    def pop(self) -> None:
        # As in Python's own reader, without a value above the last mark the mark is removed.
        if self._stack or not self._outer:
            self._stack.pop()
        else:
            self._stack = self._outer.pop()

    def _memoize(self, number: int, value: Any) -> None:
        if number == len(self._memo):
            self._memo.append(value)
        elif number < len(self._memo):
            self._memo[number] = value
        else:
            self._scattered[number] = value

    def _release_parts(self, arguments: tuple[Any, ...]) -> None:
        """Release the memo entries of the parts of the value that was just built."""
        memo, parts = self._memo, {*map(id, arguments)}
        for at in range(max(len(memo) - _PARTS, 0), len(memo)):
            if type(memo[at]) is tuple or id(memo[at]) in parts:
                memo[at] = _RELEASED

    def _expect_proportion(self, value: Any) -> None:
        """Raise FormatError if shared parts make a value far larger than its pickle."""
        size = self.at - self._start
        max_parts = _MIN_PARTS + _PARTS_PER_BYTE * size
        # Each opcode makes at most as many parts as it has bytes, and each recall refers to as many
        # as there are in a part. Only recalled parts are counted: most parts are not shared.
        parts, sizes = size, dict[int, int]()
        for part in self._recalled:
            parts += sizes.get(id(part)) or count_parts(part, max_parts, sizes)
            if parts > max_parts:
                break
        if parts > max_parts and count_parts(value, max_parts) > max_parts:
            raise self.damaged(
                f"parts of it that are shared make more than {max_parts} of {size} bytes, which "
                "no state of a model does"
            )

    def name_in_lines(self) -> None:
        module = self._line()
        self._push_name(module, self._line())

    def name_on_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise self.damaged("a name to import is not text")
        self._push_name(module, name)

    def _push_name(self, module: str, name: str) -> None:
        self._stack.append(self._globals.setdefault((module, name), Global(module, name)))

    def _call(self, function: Any, arguments: Any, is_new: bool) -> Any:
        """Return the value of a call, made by `make` or recorded."""
        if type(arguments) is not tuple or type(function) not in (Global, Call):
            raise ValueError("a call is not of a name with a tuple of arguments")
        if type(function) is Call:
            # The result of a call is called in turn, or is the class of a new object.
            name = Global("copyreg", "__newobj__") if is_new else Global("operator", "call")
            function, arguments, is_new = name, (function, *arguments), False
        built = self._make(function, arguments)
        if built is None:
            return Call(function, arguments, None, is_new)
        value, is_only_user = built
        if is_only_user and not self._keeps_parts:
            self._release_parts(arguments)
        return value

    def call_with_keywords(self) -> None:
        # As in protocol 2: a function that makes a new object with keyword arguments.
        keywords, arguments, cls = self._stack.pop(), self._stack.pop(), self._stack.pop()
        function = Global("copyreg", "__newobj_ex__")
        self._stack.append(self._call(function, (cls, arguments, keywords), is_new=False))

    def builtin(self, name: str, content: Any) -> None:
        """Push a call of a builtin class that has its own opcode."""
        self._stack.append(Call(Global("builtins", name), (content,)))

    def bytearray_(self) -> None:
        self.builtin("bytearray", self._bytes(self._unsigned(8)))

    def reference(self) -> None:
        self._stack.append(self._refer(self._stack.pop()))


_OPCODES: dict[str, Callable[[_Reader], Any]] = {
    "PROTO": _Reader.protocol,
    # The length of a frame helps readers of streams; here the whole pickle is in memory.
    "FRAME": lambda reader: reader._bytes(8),
    "NEWTRUE": lambda reader: reader.push(True),
    "NEWFALSE": lambda reader: reader.push(False),
    "LONG1": _Reader.long_integer,
    "BINFLOAT": _Reader.real,
    "BINUNICODE8": _Reader.long_text,
    "BINSTRING": lambda reader: reader.python2_text(4),
    "SHORT_BINSTRING": lambda reader: reader.python2_text(1),
    "SHORT_BINBYTES": lambda reader: reader.binary(1),
    "BINBYTES": lambda reader: reader.binary(4),
    "BINBYTES8": lambda reader: reader.binary(8),
    "BYTEARRAY8": _Reader.bytearray_,
    "EMPTY_LIST": lambda reader: reader.push([]),
    "EMPTY_SET": lambda reader: reader.builtin("set", []),
    "FROZENSET": lambda reader: reader.builtin("frozenset", reader.pop_to_mark()),
    "TUPLE": lambda reader: reader.push(tuple(reader.pop_to_mark())),
    "TUPLE3": _Reader.tuple3,
    "APPEND": lambda reader: reader.extend([reader._stack.pop()]),
    "APPENDS": lambda reader: reader.extend(reader.pop_to_mark()),
    "ADDITEMS": _Reader.add_to_set,
    "SETITEM": _Reader.set_item,
    "GLOBAL": _Reader.name_in_lines,
    "STACK_GLOBAL": _Reader.name_on_stack,
    "NEWOBJ_EX": _Reader.call_with_keywords,
    "BINPERSID": _Reader.reference,
    "POP": _Reader.pop,
    "POP_MARK": _Reader.pop_to_mark,
    "DUP": _Reader.duplicate,
}
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
# The opcodes that `_Reader._run` interprets itself.
_INLINE = (
    *("MARK", "NONE", "BININT", "BININT1", "BININT2", "SHORT_BINUNICODE", "BINUNICODE"),
    *("EMPTY_DICT", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "SETITEMS", "MEMOIZE", "BINPUT"),
    *("LONG_BINPUT", "BINGET", "LONG_BINGET", "REDUCE", "NEWOBJ", "BUILD", "STOP"),
)
_HANDLERS: list[Callable[[_Reader], Any] | None] = [
    None if _NAMES.get(code) in _INLINE else _OPCODES.get(_NAMES.get(code, ""), _Reader.unknown)
    for code in range(256)
]

# DCP's `storage_data` has calls as keys. Hashing them is cheap: they compare by identity.
_KEYS = frozenset([str, int, bool, float, bytes, type(None), Call, Global])
# Types that have parts, and that the memo can share.
_SHARED = frozenset([list, dict, tuple, Call])


def _set_items(target: Any, values: list[Any]) -> None:
    """Set items of a dict, or of an object that is a dict, given as keys and values in turn."""
    if type(target) is Call:
        target.items = {} if target.items is None else target.items
        target = target.items
    if type(target) is not dict:
        raise ValueError("a dict should be on the stack")
    remaining = iter(values)
    for key, value in zip(remaining, remaining, strict=True):
        target[key if type(key) is str or _is_key(key) else Reference(key)] = value


def _is_key(key: Any) -> bool:
    """Return whether a value may be the key of a dict: a plain value, or a flat tuple of such."""
    if type(key) is tuple:
        return all(type(item) in _KEYS for item in key)
    return type(key) in _KEYS


def count_parts(value: Any, max_parts: int, sizes: dict[int, int] | None = None) -> int:
    """Count the parts of a value, shared parts once for each place; stop above `max_parts`.

    A part that contains itself counts once there. `sizes` has the counts of values by identity, to
    which those of this value and its parts are added.

    >>> shared = [1, 2]
    >>> count_parts([shared, shared], 100)
    7
    """
    sizes = {} if sizes is None else sizes
    waiting: list[tuple[Any, bool]] = [(value, False)]
    while waiting:
        part, is_done = waiting.pop()
        if is_done:
            total = 1
            for inner in _list_parts(part):
                total += sizes.get(id(inner), 1) if type(inner) in _SHARED else 1
            if total > max_parts:
                return total
            sizes[id(part)] = total
        elif type(part) in _SHARED and id(part) not in sizes:
            sizes[id(part)] = 1
            waiting.append((part, True))
            waiting += [(inner, False) for inner in _list_parts(part) if type(inner) in _SHARED]
    return sizes.get(id(value), 1)


def _list_parts(value: Any) -> Iterable[Any]:
    if type(value) is dict:
        return value.values()
    if type(value) is Call:
        return (value.arguments, value.state, value.items, value.members)
    parts: Iterable[Any] = value
    return parts


# Writing.

Describe = Callable[[Any], Any]
_ENCODE = Global("_codecs", "encode")


def write_pickle(value: Any, describe: Describe | None = None) -> bytes:
    """Return the pickle of plain values, `Global`, `Call`, `Reference`, `Pairs` and `Alike`.

    `describe` returns the text to write for a value of another type, or None. Text and names
    that occur again are written once and recalled.

    >>> import pickle
    >>> pickle.loads(write_pickle({"a": [1, -2, 2**40], "b": (None, True, 0.5)}))
    {'a': [1, -2, 1099511627776], 'b': (None, True, 0.5)}
    >>> pickle.loads(write_pickle(Pairs(lambda: iter([("a", 1), ("b", 2)]))))
    {'a': 1, 'b': 2}
    >>> pickle.loads(write_pickle(Call(Global("fractions", "Fraction"), (1, 3))))
    Fraction(1, 3)

    Raises:
        UsageError: a value of another type, or too deep.
    """
    writer = _Writer(describe)
    try:
        writer.put(value)
    except RecursionError:
        raise UsageError("a value that is too deep for a pickle, or contains itself") from None
    writer.content += b"."
    return bytes(writer.content)


_PACK_UNSIGNED = struct.Struct("<I").pack


def _pack_integer(value: int) -> bytes:
    """Return the opcode that pushes an integer."""
    if 0 <= value < 1 << 8:
        return b"K%c" % value
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    # With room for the sign bit.
    size = value.bit_length() // 8 + 1
    return b"\x8a%c" % size + value.to_bytes(size, "little", signed=True)


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# Pieces, each followed by the text or by a number of the memo, and the last piece.
_Template = tuple[list[tuple[bytes, bool]], bytes]


class _Writer:
    """The bytes so far, and the memo: the number of each value that can be recalled."""

    def __init__(self, describe: Describe | None) -> None:
        self._describe = describe
        self.content = bytearray([0x80, _WRITTEN_PROTOCOL])
        self._memo: dict[Any, int] = {}
        self._is_in_pairs = False
        # The pieces of the pickle of each kind of `Alike`; None if a single value was written.
        self._templates: dict[Hashable, _Template | None] = {}
        # While a template is made: where numbers of the memo were written, and for which values.
        self._memoized: list[tuple[int, int, Any]] | None = None

    def put(self, value: Any) -> None:
        """Write the opcodes that push a value."""
        # `type`, not `isinstance`: True is an int to Python, and a subclass would lose its class.
        kind = type(value)
        # The most frequent types come first: a checkpoint has millions of values.
        if kind is str or kind is Global:
            if not self._recall(value):
                self._put_name(value)
        elif kind is int:
            self.content += _pack_integer(value)
        elif kind is tuple:
            self._put_tuple(value)
        elif kind is Call:
            self._put_call(value)
        elif value is None:
            self.content += b"N"
        elif kind is bool:
            self.content += b"\x88" if value else b"\x89"
        elif kind is float:
            self.content += b"G" + struct.pack(">d", value)
        elif kind is list:
            self.content += b"]"
            self._put_members(value)
        elif kind is dict:
            self.content += b"}"
            self._put_items(value.items())
        elif kind is Pairs:
            self.content += b"}"
            before, self._is_in_pairs = self._is_in_pairs, True
            self._put_items(value.iterate())
            self._is_in_pairs = before
        elif kind is Reference:
            self.put(value.key)
            self.content += b"Q"
        elif kind is Alike:
            self._put_alike(value)
        elif kind is bytes:
            # Protocol 2 lacks bytes: text of the same codes is encoded.
            self.put(Call(_ENCODE, (value.decode("latin-1"), "latin1")))
        elif self._describe is not None and (described := self._describe(value)) is not None:
            self.put(described)
        else:
            raise UsageError(f"a {kind.__name__} cannot be written to a pickle")

    def _put_name(self, value: str | Global) -> None:
        if isinstance(value, str):
            text = _encode_text(value)
            self.content += b"X" + struct.pack("<I", len(text)) + text
        else:
            self.content += f"c{value.module}\n{value.name}\n".encode()
        self._memoize(value)

    def _recall(self, value: str | Global | Call) -> bool:
        """Write a value from the memo, and return whether it is there."""
        number = self._memo.get(value)
        if number is None:
            return False
        self.content += b"h%c" % number if number < 256 else b"j" + _PACK_UNSIGNED(number)
        return True

    def _memoize(self, value: object) -> None:
        number, start = len(self._memo), len(self.content)
        self._memo[value] = number
        self.content += b"q%c" % number if number < 256 else b"r" + _PACK_UNSIGNED(number)
        if self._memoized is not None:
            self._memoized.append((start, len(self.content), value))

    def _put_alike(self, value: Alike) -> None:
        kind, text = value.kind, value.text
        if text in self._memo or self._is_in_pairs:
            # Other bytes than in the template: a recalled text, or objects that are not memoized.
            self.put(value.make())
        elif kind not in self._templates:
            # Names that are new in the first value are recalled in the second and all others.
            self._templates[kind] = None
            self.put(value.make())
        elif (template := self._templates[kind]) is None:
            self._templates[kind] = self._put_template(value)
        else:
            pieces, last = template
            for piece, is_text in pieces:
                self.content += piece
                if is_text:
                    self._put_name(text)
                else:
                    # An object of this value, which nothing recalls.
                    self._memoize(object())
            self.content += last

    def _put_template(self, value: Alike) -> _Template:
        """Write a value, and return the pieces between its text and its numbers of the memo."""
        outer, memoized = self._memoized, list[tuple[int, int, Any]]()
        self._memoized = memoized
        at = len(self.content)
        self.put(value.make())
        self._memoized = outer
        if outer is not None:
            outer += memoized
        text_bytes = 5 + len(_encode_text(value.text))
        pieces = []
        for start, stop, memoized_value in memoized:
            is_text = memoized_value == value.text
            pieces.append((bytes(self.content[at : start - text_bytes * is_text]), is_text))
            at = stop
        return pieces, bytes(self.content[at:])

    def _put_tuple(self, value: tuple[Any, ...]) -> None:
        # Up to three items have an opcode for their number; more are counted from a mark.
        if len(value) > 3:
            self.content += b"("
        for item in value:
            self.put(item)
        self.content += (b")", b"\x85", b"\x86", b"\x87")[len(value)] if len(value) <= 3 else b"t"

    def _put_members(self, members: list[Any]) -> None:
        self.content += b"("
        for member in members:
            self.put(member)
        self.content += b"e"

    def _put_items(self, items: Iterable[tuple[Any, Any]]) -> None:
        mark = b"("
        for key, item in items:
            self.content += mark
            self.put(key)
            self.put(item)
            mark = b""
        if not mark:
            self.content += b"u"

    def _put_call(self, value: Call) -> None:
        if self._recall(value):
            return
        self.put(value.function)
        self.put(value.arguments)
        # NEWOBJ, or REDUCE; below, BUILD gives the state.
        self.content += b"\x81" if value.is_new else b"R"
        # An object that occurs again is the same object. Tensors, which are many, never do.
        if value.state is not None and not self._is_in_pairs:
            self._memoize(value)
        if value.members:
            self._put_members(value.members)
        if value.items:
            self._put_items(value.items.items())
        if value.state is not None:
            self.put(value.state)
            self.content += b"b"
