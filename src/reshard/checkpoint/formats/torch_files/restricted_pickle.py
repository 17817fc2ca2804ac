"""A reader of pickles that runs nothing: it describes the calls of a pickle and makes none.

A pickle is a program: it names functions and classes, and calls them. PyTorch's checkpoints
are full of pickles of a few known shapes. Here their opcodes are read one by one, on a stack
of our own:

1. Numbers, text, lists, tuples and dicts become themselves.
2. A name of something to import becomes a `Global`, two strings, if the caller allows it; any
   other name is refused. Nothing is imported.
3. A call or a new object becomes a `Call` that remembers function, arguments and state.
   Nothing is called.
4. An opcode that no such pickle has is refused. What is built is at most a small multiple of
   the bytes read, however they are arranged; only plain values are hashed.

Plain values (`plain_attributes`) are numbers, text, None, and lists, tuples, dicts and sizes of
such: they mean the same wherever they are read. An object of a class means what its class does.

The same values can be written again (`reshard.checkpoint.formats.torch_files.pickle_writing`).
"""

from __future__ import annotations

import math
import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.errors import FormatError

LATEST_PROTOCOL = 5
# Longer integers than sizes and offsets need only cost time.
_LONGEST_INTEGER_BYTES = 16
_MARK = object()

Allowed = Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class Global:
    """The name of something that a pickle would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Call:
    """What a pickle would call: `function(*arguments)`, then given `state`.

    `is_new` tells an object made without its constructor from a plain call. Two are equal when
    they are the same object, so that to hash one never goes deep.
    """

    function: Global
    arguments: tuple[Any, ...]
    state: Any = None
    is_new: bool = False

    def __repr__(self) -> str:
        return f"<{self.function}>"


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Something that lies outside the pickle; `key` says what (a storage, for tensors)."""

    key: Any

    def __repr__(self) -> str:
        return "<a reference>"


def read_pickle(content: bytes, allowed: Allowed, label: str) -> Any:
    """The value that a pickle describes, of plain values, `Global`, `Call` and `Reference`.

    `allowed` has the names that may appear, by module; `label` says in errors what is read.
    Bytes behind the end of the pickle are ignored, as Python does.

    >>> import collections, pickle
    >>> ordered = collections.OrderedDict(a=1)
    >>> read_pickle(pickle.dumps([1, "b", None]), {}, "x")
    [1, 'b', None]
    >>> read_pickle(pickle.dumps(ordered), {"collections": frozenset(["OrderedDict"])}, "x")
    <collections.OrderedDict>
    >>> read_pickle(pickle.dumps(ordered), {}, "x")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    reshard.errors.FormatError: x names collections.OrderedDict, ...

    Raises:
        FormatError: a name that is not allowed, an opcode that is not read, a damaged pickle.
    """
    reader = _Reader(content, allowed, label)
    try:
        return reader.run()
    except (IndexError, struct.error) as error:
        raise reader.damaged("it ends early, or takes more from its stack than there is") from error
    except KeyError as error:
        raise reader.damaged(f"it remembers nothing under {error}") from error
    except UnicodeDecodeError as error:
        raise reader.damaged("text in it is not UTF-8") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise reader.damaged(str(error)) from error


class _Reader:
    """The stack machine of one pickle."""

    def __init__(self, content: bytes, allowed: Allowed, label: str) -> None:
        self._content = content
        self._allowed = allowed
        self._label = label
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        # One object for each name, as there is one for each text.
        self._globals: dict[tuple[str, str], Global] = {}

    def damaged(self, reason: str) -> FormatError:
        """The error for bytes that are no such pickle."""
        return FormatError(
            f"{self._label} is damaged, or not written by PyTorch: at byte {self._at} of the "
            f"pickle, {reason}"
        )

    def run(self) -> Any:
        """Read up to the end of the pickle."""
        content, handlers = self._content, _HANDLERS
        while True:
            opcode = content[self._at]
            self._at += 1
            if opcode == _STOP:
                value = self._stack.pop()
                if self._stack or value is _MARK:
                    raise self.damaged("it ends with something left over")
                return value
            handler = handlers[opcode]
            if handler is None:
                known = f"the opcode {_NAMES[opcode]}" if opcode in _NAMES else f"byte {opcode}"
                raise self.damaged(f"{known} is nothing that such a file has")
            handler(self)

    # Reading what stands behind an opcode.

    def _bytes(self, size: int) -> bytes:
        begin, end = self._at, self._at + size
        if end > len(self._content):
            raise self.damaged(f"{size} bytes should follow, it ends before")
        self._at = end
        return self._content[begin:end]

    def _read_unsigned(self, size: int) -> int:
        return int.from_bytes(self._bytes(size), "little")

    def _line(self) -> str:
        end = self._content.index(b"\n", self._at)
        line = self._content[self._at : end].decode("utf-8")
        self._at = end + 1
        return line

    def _pop_to_mark(self) -> list[Any]:
        """What was put on the stack since the last mark."""
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise self.damaged("a mark is missing")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise self.damaged("a mark stands where a value should")
        return value

    def _top(self, kind: type) -> Any:
        value = self._stack[-1]
        if type(value) is not kind:
            raise self.damaged(f"a {kind.__name__} should be on the stack")
        return value

    # Opcodes.

    def protocol(self) -> None:
        version = self._read_unsigned(1)
        if version > LATEST_PROTOCOL:
            raise self.damaged(f"protocol {version} is later than {LATEST_PROTOCOL}")

    def frame(self) -> None:
        # The length of a frame helps readers of streams; the whole pickle is in memory here.
        self._bytes(8)

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def integer(self, size: int) -> None:
        self._stack.append(self._read_unsigned(size))

    def signed_integer(self) -> None:
        self._stack.append(int.from_bytes(self._bytes(4), "little", signed=True))

    def long_integer(self) -> None:
        size = self._read_unsigned(1)
        if size > _LONGEST_INTEGER_BYTES:
            raise self.damaged(f"an integer of {size} bytes is no size or offset")
        self._stack.append(int.from_bytes(self._bytes(size), "little", signed=True))

    def real(self) -> None:
        self._stack.append(struct.unpack(">d", self._bytes(8))[0])

    def text(self, size: int) -> None:
        # Names may be any text Python has, half a UTF-16 pair included.
        self._stack.append(self._bytes(self._read_unsigned(size)).decode("utf-8", "surrogatepass"))

    def binary(self, size: int) -> None:
        self._stack.append(self._bytes(self._read_unsigned(size)))

    def tuple_of_marked(self) -> None:
        self._stack.append(tuple(self._pop_to_mark()))

    def tuple_of(self, size: int) -> None:
        items = [self._pop() for _ in range(size)]
        self._stack.append(tuple(reversed(items)))

    def append(self) -> None:
        value = self._pop()
        self._top(list).append(value)

    def append_marked(self) -> None:
        values = self._pop_to_mark()
        self._top(list).extend(values)

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def set_marked_items(self) -> None:
        self._set_items(self._pop_to_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is Call and target.function.name == "OrderedDict":
            # Its items follow its construction; they are kept where a state would be.
            target.state = {} if target.state is None else target.state
            target = target.state
        if type(target) is not dict:
            raise self.damaged("a dict should be on the stack")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not _is_key(key):
                raise self.damaged(f"a {type(key).__name__} is a key")
            target[key] = value

    def remember(self) -> None:
        # MEMOIZE takes the next free number, as Python's own reader does.
        self._memo[len(self._memo)] = self._stack[-1]

    def remember_as(self, size: int) -> None:
        self._memo[self._read_unsigned(size)] = self._stack[-1]

    def recall(self, size: int) -> None:
        self._stack.append(self._memo[self._read_unsigned(size)])

    def name_in_lines(self) -> None:
        module = self._line()
        self._push_name(module, self._line())

    def name_on_stack(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            raise self.damaged("a name to import is no text")
        self._push_name(module, name)

    def _push_name(self, module: str, name: str) -> None:
        if name not in self._allowed.get(module, frozenset()):
            raise FormatError(
                f"{self._label} names {shortened(f'{module}.{name}')}, which no checkpoint of "
                "PyTorch needs; to load it could run any program, so it is not read. Load it "
                "where you trust it, and save tensors and plain values"
            )
        self._stack.append(self._globals.setdefault((module, name), Global(module, name)))

    def call(self, *, is_new: bool) -> None:
        arguments, function = self._pop(), self._pop()
        if type(function) is not Global or type(arguments) is not tuple:
            raise self.damaged("what is called is no name with a tuple of arguments")
        self._stack.append(Call(function, arguments, None, is_new))

    def build(self) -> None:
        state = self._pop()
        target = self._top(Call)
        if target.state is not None:
            raise self.damaged(f"{target} is given a state twice")
        target.state = state

    def reference(self) -> None:
        self._stack.append(Reference(self._pop()))


_OPCODES: dict[str, Callable[[_Reader], None]] = {
    "PROTO": _Reader.protocol,
    "FRAME": _Reader.frame,
    "MARK": lambda reader: reader.push(_MARK),
    "NONE": lambda reader: reader.push(None),
    "NEWTRUE": lambda reader: reader.push(True),
    "NEWFALSE": lambda reader: reader.push(False),
    "BININT": _Reader.signed_integer,
    "BININT1": lambda reader: reader.integer(1),
    "BININT2": lambda reader: reader.integer(2),
    "LONG1": _Reader.long_integer,
    "BINFLOAT": _Reader.real,
    "SHORT_BINUNICODE": lambda reader: reader.text(1),
    "BINUNICODE": lambda reader: reader.text(4),
    "BINUNICODE8": lambda reader: reader.text(8),
    "SHORT_BINBYTES": lambda reader: reader.binary(1),
    "BINBYTES": lambda reader: reader.binary(4),
    "BINBYTES8": lambda reader: reader.binary(8),
    "EMPTY_LIST": lambda reader: reader.push([]),
    "EMPTY_DICT": lambda reader: reader.push({}),
    "EMPTY_TUPLE": lambda reader: reader.push(()),
    "TUPLE": _Reader.tuple_of_marked,
    "TUPLE1": lambda reader: reader.tuple_of(1),
    "TUPLE2": lambda reader: reader.tuple_of(2),
    "TUPLE3": lambda reader: reader.tuple_of(3),
    "APPEND": _Reader.append,
    "APPENDS": _Reader.append_marked,
    "SETITEM": _Reader.set_item,
    "SETITEMS": _Reader.set_marked_items,
    "MEMOIZE": _Reader.remember,
    "BINPUT": lambda reader: reader.remember_as(1),
    "LONG_BINPUT": lambda reader: reader.remember_as(4),
    "BINGET": lambda reader: reader.recall(1),
    "LONG_BINGET": lambda reader: reader.recall(4),
    "GLOBAL": _Reader.name_in_lines,
    "STACK_GLOBAL": _Reader.name_on_stack,
    "REDUCE": lambda reader: reader.call(is_new=False),
    "NEWOBJ": lambda reader: reader.call(is_new=True),
    "BUILD": _Reader.build,
    "BINPERSID": _Reader.reference,
}


# DCP's `storage_data` has calls as keys. Hashing them is cheap: they compare by identity.
_PLAIN = frozenset([str, int, bool, float, bytes, type(None)])
_KEYS = _PLAIN | {Call, Global}


def _is_key(key: Any) -> bool:
    """Whether a value may be the key of a dict: a plain one, or a flat tuple of such."""
    if type(key) is tuple:
        return all(type(item) in _PLAIN for item in key)
    return type(key) in _KEYS


def shortened(text: str, most: int = 120) -> str:
    """Text from a file, at a length that fits into a message."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_HANDLERS = [_OPCODES.get(_NAMES.get(code, "")) for code in range(256)]
_STOP = ord(".")


# A pickle can hold a list in itself, or one list in very many places.
_MOST_DEPTH = 16
_MOST_VALUES = 1_000_000
_SIMPLE = (str, int, float, bool, type(None))
_SIZE = Global("torch", "Size")


def plain_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the attributes whose values are plain.

    >>> plain_attributes({"shapes": {"w": (8, 4)}, "owner": Global("os", "system")})
    {'shapes': {'w': (8, 4)}}
    """
    # One budget for all of them: shared lists are walked once for each place they are in.
    budget = [_MOST_VALUES]
    return {
        name: value
        for name, value in attributes.items()
        if name.isidentifier() and name.isascii() and _is_plain(value, budget, _MOST_DEPTH)
    }


def _is_plain(value: Any, budget: list[int], depth: int) -> bool:
    budget[0] -= 1
    if budget[0] < 0 or depth == 0:
        return False
    kind = type(value)
    if kind in _SIMPLE:
        return kind is not float or not math.isnan(value)
    if kind is Call:
        is_size = value.function == _SIZE and value.state is None and not value.is_new
        return is_size and _is_plain(value.arguments, budget, depth - 1)
    if kind is dict:
        keys = all(_is_plain(key, budget, depth - 1) for key in value)
        return keys and all(_is_plain(one, budget, depth - 1) for one in value.values())
    if kind in (list, tuple):
        return all(_is_plain(one, budget, depth - 1) for one in value)
    return False
