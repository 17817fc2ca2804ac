"""A reader of pickles that runs nothing: it describes the calls of a pickle and makes none.

A pickle is a program: it names functions and classes, and calls them. PyTorch's checkpoints
are full of pickles of a few known shapes. Here their opcodes are read one by one, on a stack
of our own:

1. Numbers, text, lists, tuples and dicts become themselves.
2. A name of something to import becomes a `Global`, two strings, if the caller allows it; any
   other name is refused. Nothing is imported.
3. A call or a new object becomes a `Call` that remembers function, arguments, state, items and
   members. Nothing is called.
4. An opcode that no such pickle has is refused. What is built is at most a small multiple of
   the bytes read, however they are arranged; only plain values are hashed. Parts that are shared
   count once for each place where they are, since whoever walks through the value meets them there.

With a `Builder` every name is taken, and calls and references that it knows become values of its
own while the pickle is read, so that a description of a million tensors is never whole in memory.

The same values can be written again (`reshard.checkpoint.formats.torch_files.pickle_writing`).
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from reshard.checkpoint.formats.torch_files.pickle_terms import (
    Builder,
    Call,
    Global,
    Reference,
    shortened,
)
from reshard.errors import FormatError

LATEST_PROTOCOL = 5
# Longer integers than sizes, offsets and states of generators only cost time.
_LONGEST_INTEGER_BYTES = 40
_MARK = object()
# What stands in the memo for a part of a value that was made of it.
_FORGOTTEN = object()
# How far back the parts of a tensor are remembered: its sizes, strides, hooks, storage, arguments.
_PARTS = 6
# A value may have so many parts, and so many more for each byte of its pickle.
_MIN_PARTS, _PARTS_A_BYTE = 10_000, 64

Allowed = Mapping[str, frozenset[str]]


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
        return _run(reader)
    except _EndsEarlyError as error:
        raise reader.damaged(str(error)) from None


def build_pickle(content: bytes, builder: Builder, label: str, start: int = 0) -> tuple[Any, int]:
    """The value of the pickle at `start`, with the values of a builder, and where it ends.

    Any name may appear in it. Keys of dicts that are neither plain nor a tuple of such are
    `Reference`s to what they are.

    Raises:
        FormatError: an opcode that is not read, a damaged pickle.
        PickleEndsEarlyError: there is more of it than `content`.
    """
    try:
        try:
            reader = _Reader(content, None, label, builder, start)
            value = _run(reader)
        except _ForgottenError:
            # A part of a value is part of another one too: once more, and everything is kept.
            reader = _Reader(content, None, label, builder, start, forgets=False)
            value = _run(reader)
    except _EndsEarlyError as error:
        raise PickleEndsEarlyError(str(reader.damaged(str(error)))) from None
    return value, reader.at


class _Inert:
    """A builder that makes nothing: calls and references stay what they are."""

    def make(self, function: Global, arguments: tuple[Any, ...]) -> None:
        """Nothing."""

    def refer(self, key: Any) -> Any:
        """The reference itself."""
        return Reference(key)


def read_inert(content: bytes, label: str) -> Any:
    """Return the value that a pickle describes, as `read_pickle` does, with any names in it.

    >>> import datetime, pickle
    >>> read_inert(pickle.dumps([datetime.date(2026, 1, 1)]), "x")
    [<datetime.date>]

    Raises:
        FormatError: an opcode that is not read, a damaged pickle.
    """
    return build_pickle(content, _Inert(), label)[0]


class PickleEndsEarlyError(FormatError):
    """A pickle that is longer than what was read of it."""


class _EndsEarlyError(Exception):
    """The content ends in the pickle."""


class _ForgottenError(Exception):
    """A part of a value is recalled that was let go."""


def _run(reader: _Reader) -> Any:
    try:
        return reader.run()
    except (IndexError, struct.error) as error:
        if reader.at >= reader.size:
            raise _EndsEarlyError("it ends early") from error
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

    def __init__(
        self,
        content: bytes,
        allowed: Allowed | None,
        label: str,
        builder: Builder | None = None,
        start: int = 0,
        *,
        forgets: bool = True,
    ) -> None:
        self._content = content
        self._allowed = allowed
        self._label = label
        self._builder = builder
        self._forgets = forgets
        # How often a part was put in one more place.
        self._shares = 0
        self._start = start
        self.at = start
        self.size = len(content)
        self._stack: list[Any] = []
        # Numbers of the memo follow each other, but in damaged pickles: those are in the dict.
        self._memo: list[Any] = []
        self._scattered: dict[int, Any] = {}
        # One object for each name, as there is one for each text.
        self._globals: dict[tuple[str, str], Global] = {}

    def damaged(self, reason: str) -> FormatError:
        """The error for bytes that are no such pickle."""
        at = self.at - self._start
        return FormatError(
            f"{self._label} is damaged, or not written by PyTorch: at byte {at} of the "
            f"pickle, {reason}"
        )

    def run(self) -> Any:
        """Read up to the end of the pickle."""
        content, handlers = self._content, _HANDLERS
        while True:
            opcode = content[self.at]
            self.at += 1
            if opcode == _STOP:
                value = self._stack.pop()
                if self._stack or value is _MARK:
                    raise self.damaged("it ends with something left over")
                # Each at most doubles the ways to a part.
                if 1 << min(self._shares, 60) > _PARTS_A_BYTE:
                    self._expect_proportion(value)
                return value
            handler = handlers[opcode]
            if handler is None:
                known = f"the opcode {_NAMES[opcode]}" if opcode in _NAMES else f"byte {opcode}"
                raise self.damaged(f"{known} is nothing that such a file has")
            handler(self)

    # Reading what stands behind an opcode.

    def _bytes(self, size: int) -> bytes:
        begin, end = self.at, self.at + size
        if end > len(self._content):
            raise _EndsEarlyError(f"{size} bytes should follow, it ends before")
        self.at = end
        return self._content[begin:end]

    def _read_unsigned(self, size: int) -> int:
        if size == 1:
            byte = self._content[self.at]
            self.at += 1
            return byte
        return int.from_bytes(self._bytes(size), "little")

    def _line(self) -> str:
        end = self._content.find(b"\n", self.at)
        if end < 0:
            raise _EndsEarlyError("a line does not end")
        line = self._content[self.at : end].decode("utf-8")
        self.at = end + 1
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
        self._members().append(value)

    def append_marked(self) -> None:
        values = self._pop_to_mark()
        self._members().extend(values)

    def _members(self) -> list[Any]:
        """The list on the stack, or that of an object that is a list."""
        target = self._stack[-1]
        if type(target) is Call:
            target.members = [] if target.members is None else target.members
            return target.members
        members: list[Any] = self._top(list)
        return members

    def add_marked(self) -> None:
        values = self._pop_to_mark()
        self._top(Call).arguments[0].extend(values)

    def pop(self) -> None:
        self._stack.pop()

    def pop_marked(self) -> None:
        self._pop_to_mark()

    def duplicate(self) -> None:
        self._shares += 1
        self._stack.append(self._stack[-1])

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def set_marked_items(self) -> None:
        self._set_items(self._pop_to_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is Call:
            target.items = {} if target.items is None else target.items
            target = target.items
        if type(target) is not dict:
            raise self.damaged("a dict should be on the stack")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str and not _is_key(key):
                if self._builder is None:
                    raise self.damaged(f"a {type(key).__name__} is a key")
                key = Reference(key)
            target[key] = value

    def remember(self) -> None:
        # MEMOIZE takes the next free number, as Python's own reader does.
        self._remember(len(self._memo) + len(self._scattered))

    def remember_as(self, size: int) -> None:
        self._remember(self._read_unsigned(size))

    def _remember(self, number: int) -> None:
        memo = self._memo
        if number == len(memo):
            memo.append(self._stack[-1])
        elif number < len(memo):
            memo[number] = self._stack[-1]
        else:
            self._scattered[number] = self._stack[-1]

    def recall(self, size: int) -> None:
        number = self._read_unsigned(size)
        memo = self._memo
        value = memo[number] if number < len(memo) else self._scattered[number]
        if value is _FORGOTTEN:
            raise _ForgottenError
        if type(value) in _SHARED:
            self._shares += 1
        self._stack.append(value)

    def _forget_parts(self, arguments: tuple[Any, ...]) -> None:
        """Let go of what is remembered of the parts of the value that was just made."""
        memo = self._memo
        for at in range(len(memo) - 1, max(len(memo) - 1 - _PARTS, -1), -1):
            part = memo[at]
            if type(part) is tuple or any(part is argument for argument in arguments):
                memo[at] = _FORGOTTEN

    def _expect_proportion(self, value: Any) -> None:
        """Raise FormatError where shared parts make a value far larger than its pickle."""
        most = _MIN_PARTS + _PARTS_A_BYTE * (self.at - self._start)
        if count_parts(value, most) > most:
            raise self.damaged(
                f"parts of it that are shared make more than {most} of {self.at - self._start} "
                "bytes, which no state of a model does"
            )

    def name_in_lines(self) -> None:
        module = self._line()
        self._push_name(module, self._line())

    def name_on_stack(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            raise self.damaged("a name to import is no text")
        self._push_name(module, name)

    def _push_name(self, module: str, name: str) -> None:
        allowed = self._allowed
        if allowed is not None and name not in allowed.get(module, frozenset()):
            raise FormatError(
                f"{self._label} names {shortened(f'{module}.{name}')}, which no checkpoint of "
                "PyTorch needs; to load it could run any program, so it is not read. Load it "
                "where you trust it, and save tensors and plain values"
            )
        self._stack.append(self._globals.setdefault((module, name), Global(module, name)))

    def call(self, *, is_new: bool) -> None:
        arguments, function = self._pop(), self._pop()
        is_made = self._builder is not None and type(function) is Call
        if type(arguments) is not tuple or not (is_made or type(function) is Global):
            raise self.damaged("what is called is no name with a tuple of arguments")
        if is_made:
            # An object that was made is called in turn, or is the class of a new one.
            name = Global("copyreg", "__newobj__") if is_new else Global("operator", "call")
            function, arguments, is_new = name, (function, *arguments), False
        if self._builder is not None:
            made = self._builder.make(function, arguments)
            if made is not None:
                self._stack.append(made[0])
                if made[1] and self._forgets:
                    self._forget_parts(arguments)
                return
        self._stack.append(Call(function, arguments, None, is_new))

    def call_with_names(self) -> None:
        # As protocol 2 says it: a function that makes a new object with arguments by name.
        named, arguments, made = self._pop(), self._pop(), self._pop()
        self._push_name("copyreg", "__newobj_ex__")
        self._stack.append((made, arguments, named))
        self.call(is_new=False)

    def new_builtin(self, name: str, content: Any) -> None:
        """An object of a class that has an opcode of its own, as a call of the class."""
        self._push_name("builtins", name)
        self._stack.append(Call(self._pop(), (content,)))

    def changeable_bytes(self) -> None:
        self.new_builtin("bytearray", self._bytes(self._read_unsigned(8)))

    def build(self) -> None:
        state = self._pop()
        if self._builder is not None and type(self._stack[-1]) is not Call:
            # Attributes of what is plain, such as the versions of modules beside a state dict.
            return
        target = self._top(Call)
        if target.state is not None:
            raise self.damaged(f"{target} is given a state twice")
        target.state = state

    def reference(self) -> None:
        key = self._pop()
        self._stack.append(Reference(key) if self._builder is None else self._builder.refer(key))

    def old_text(self, size: int) -> None:
        """Text of Python 2, which are bytes where they are no text."""
        content = self._bytes(self._read_unsigned(size))
        try:
            self._stack.append(content.decode("utf-8"))
        except UnicodeDecodeError:
            self._stack.append(content)


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
    "BINSTRING": lambda reader: reader.old_text(4),
    "SHORT_BINSTRING": lambda reader: reader.old_text(1),
    "POP": _Reader.pop,
    "POP_MARK": _Reader.pop_marked,
    "DUP": _Reader.duplicate,
    "NEWOBJ_EX": _Reader.call_with_names,
    "EMPTY_SET": lambda reader: reader.new_builtin("set", []),
    "ADDITEMS": _Reader.add_marked,
    "FROZENSET": lambda reader: reader.new_builtin("frozenset", reader._pop_to_mark()),
    "BYTEARRAY8": _Reader.changeable_bytes,
}


# DCP's `storage_data` has calls as keys. Hashing them is cheap: they compare by identity.
_PLAIN = frozenset([str, int, bool, float, bytes, type(None)])
_KEYS = _PLAIN | {Call, Global}


def _is_key(key: Any) -> bool:
    """Whether a value may be the key of a dict: a plain one, or a flat tuple of such."""
    if type(key) is tuple:
        return all(type(item) in _KEYS for item in key)
    return type(key) in _KEYS


# What has parts, and can stand in several places.
_SHARED = frozenset([list, dict, tuple, Call])


def count_parts(value: Any, most: int) -> int:
    """The parts of a value, shared ones once for each place; some number above `most` if more.

    A part that holds itself counts as one there.

    >>> shared = [1, 2]
    >>> count_parts([shared, shared], 100)
    7
    """
    sizes: dict[int, int] = {}
    waiting: list[tuple[Any, bool]] = [(value, False)]
    while waiting:
        part, is_left = waiting.pop()
        if is_left:
            total = 1 + sum(sizes.get(id(one), 1) for one in _list_parts(part))
            if total > most:
                return total
            sizes[id(part)] = total
        elif type(part) in _SHARED and id(part) not in sizes:
            sizes[id(part)] = 1
            waiting.append((part, True))
            waiting.extend((one, False) for one in _list_parts(part) if type(one) in _SHARED)
    return sizes.get(id(value), 1)


def _list_parts(value: Any) -> Iterable[Any]:
    if type(value) is dict:
        return value.values()
    if type(value) is Call:
        return (value.arguments, value.state, value.items, value.members)
    parts: Iterable[Any] = value
    return parts


_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_HANDLERS = [_OPCODES.get(_NAMES.get(code, "")) for code in range(256)]
_STOP = ord(".")
