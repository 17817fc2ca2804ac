"""A writer of pickles that name classes this program does not have.

The inverse of `restricted_pickle`: plain values, `Global`, `Call` and `Reference` become the
opcodes that Python would have written, in protocol 2, which every PyTorch reads. Text and names
that appear again are written once and recalled.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

from reshard.checkpoint.formats.torch_files.pickle_terms import Call, Global, Pairs, Reference
from reshard.errors import UsageError

_PROTOCOL = 2
_ENCODE = Global("_codecs", "encode")
Describe = Callable[[Any], Any]


def write_pickle(value: Any, describe: Describe | None = None) -> bytes:
    """The pickle of a value.

    `describe` returns what is written in the place of a value of another type, or None.

    >>> import pickle
    >>> pickle.loads(write_pickle({"a": [1, -2, 2**40], "b": (None, True, 0.5)}))
    {'a': [1, -2, 1099511627776], 'b': (None, True, 0.5)}
    >>> pickle.loads(write_pickle(Pairs(lambda: iter([("a", 1), ("b", 2)]))))
    {'a': 1, 'b': 2}
    >>> pickle.loads(write_pickle(Call(Global("fractions", "Fraction"), (1, 3))))
    Fraction(1, 3)

    Raises UsageError for a value of another type.
    """
    writer = _PickleWriter(describe)
    try:
        writer.put(value)
    except RecursionError:
        raise UsageError("a value that is too deep for a pickle, or in itself") from None
    writer.content += b"."
    return bytes(writer.content)


class _PickleWriter:
    """The bytes so far, and the memo: the number of each value that can be recalled."""

    def __init__(self, describe: Describe | None) -> None:
        self._describe = describe
        self.content = bytearray([0x80, _PROTOCOL])
        self._memo: dict[str | Global | Call, int] = {}
        self._is_in_pairs = False

    def put(self, value: Any) -> None:
        """Write the opcodes that put a value on the stack."""
        # `type`, not `isinstance`: True is an int to Python, and a subclass would lose its class.
        kind = type(value)
        if value is None:
            self.content += b"N"
        elif kind is bool:
            self.content += b"\x88" if value else b"\x89"
        elif kind is int:
            self._put_integer(value)
        elif kind is float:
            self.content += b"G" + struct.pack(">d", value)
        elif kind is str or kind is Global:
            self._put_recalled(value)
        elif kind is tuple:
            self._put_tuple(value)
        elif kind is list:
            self.content += b"]("
            for item in value:
                self.put(item)
            self.content += b"e"
        elif kind is dict:
            self.content += b"}"
            self._put_items(value.items())
        elif kind is Pairs:
            self.content += b"}"
            before, self._is_in_pairs = self._is_in_pairs, True
            self._put_items(value.iterate())
            self._is_in_pairs = before
        elif kind is Call:
            self._put_call(value)
        elif kind is Reference:
            self.put(value.key)
            self.content += b"Q"
        elif kind is bytes:
            # Protocol 2 has no bytes: text of the same codes is encoded.
            self.put(Call(_ENCODE, (value.decode("latin-1"), "latin1")))
        elif self._describe is not None and (described := self._describe(value)) is not None:
            self.put(described)
        else:
            raise UsageError(f"a {kind.__name__} cannot be written to a pickle")

    def _put_integer(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.content += b"K" + struct.pack("<B", value)
        elif 0 <= value < 1 << 16:
            self.content += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.content += b"J" + struct.pack("<i", value)
        else:
            # Room for the sign bit too.
            size = value.bit_length() // 8 + 1
            self.content += b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)

    def _put_recalled(self, value: str | Global) -> None:
        number = self._memo.get(value)
        if number is not None:
            self._recall(number)
            return
        if isinstance(value, str):
            text = value.encode("utf-8", "surrogatepass")
            self.content += b"X" + struct.pack("<I", len(text)) + text
        else:
            self.content += f"c{value.module}\n{value.name}\n".encode()
        self._remember(value)

    def _recall(self, number: int) -> None:
        self.content += b"h" + bytes([number]) if number < 256 else _wide(b"j", number)

    def _remember(self, value: str | Global | Call) -> None:
        # BINPUT, or LONG_BINPUT from number 256 on.
        number = self._memo[value] = len(self._memo)
        self.content += b"q" + bytes([number]) if number < 256 else _wide(b"r", number)

    def _put_tuple(self, value: tuple[Any, ...]) -> None:
        # Up to three items have an opcode for their number; more are counted from a mark.
        if len(value) > 3:
            self.content += b"("
        for item in value:
            self.put(item)
        self.content += (b")", b"\x85", b"\x86", b"\x87")[len(value)] if len(value) <= 3 else b"t"

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
        number = self._memo.get(value)
        if number is not None:
            self._recall(number)
            return
        self.put(value.function)
        self.put(value.arguments)
        # NEWOBJ, or REDUCE; below, BUILD gives the state.
        self.content += b"\x81" if value.is_new else b"R"
        # An object that is met again is the same one; tensors are many, and none is.
        if value.state is not None and not self._is_in_pairs:
            self._remember(value)
        if value.members:
            self.content += b"("
            for member in value.members:
                self.put(member)
            self.content += b"e"
        if value.items:
            self._put_items(value.items.items())
        if value.state is not None:
            self.put(value.state)
            self.content += b"b"


def _wide(opcode: bytes, number: int) -> bytes:
    return opcode + struct.pack("<I", number)
