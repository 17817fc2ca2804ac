"""Every field of a header or a pickle, with every value that could be trouble, one at a time."""

from __future__ import annotations

import copy
import json
import pickletools
import random
import struct
from collections.abc import Iterator
from typing import Any

_SIZES = (-1, 0, 1, 3, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 2**200)
_VALUES: tuple[Any, ...] = (
    *_SIZES,
    *(None, True, False, 0.5, 1e308, "", "x", "F32", "F4", "float32", "tp, -", "../x", "/etc/x"),
    *("x" * 5000, "\ud800", "\0", [], [0], [-1, 2], [2**63, 1], [[]], {}, {"x": 1}, [None] * 40),
)
# What a name to import could be, for a reader that imports.
_NAMES = (
    *(("os", "system"), ("builtins", "eval"), ("builtins", "exec"), ("subprocess", "Popen")),
    *(("torch", "load"), ("torch._utils", "_rebuild_tensor_v2"), ("torch", "float32"), ("", "")),
    *(("torch.storage", "UntypedStorage"), ("collections", "OrderedDict"), ("torch", "Size")),
)


def mutated_json(text: bytes, choose: random.Random | None = None) -> Iterator[bytes]:
    """The JSON text with each value replaced, each entry taken out, each key named anew.

    Text that is JSON itself, as in the metadata of shards, is mutated inside too. With `choose`,
    it is at one place.
    """
    value = json.loads(text)
    paths = [*_paths(value)]
    for path in [choose.choice(paths)] if choose else paths:
        here = _at(value, path)
        for other in _VALUES:
            yield json.dumps(_replaced(value, path, other)).encode()
        if isinstance(here, int) and not isinstance(here, bool):
            for near in (here - 1, here + 1, here * 2, -here):
                yield json.dumps(_replaced(value, path, near)).encode()
        if isinstance(here, list) and here:
            for other in (here[::-1], here + here, here[1:]):
                yield json.dumps(_replaced(value, path, other)).encode()
        if isinstance(here, str) and here[:1] in "[{" and here:
            for inner in mutated_json(here.encode(), choose):
                yield json.dumps(_replaced(value, path, inner.decode("utf-8"))).encode()
        if path:
            parent = copy.deepcopy(value)
            holder = _at(parent, path[:-1])
            moved = holder.pop(path[-1])
            yield json.dumps(parent).encode()
            if isinstance(holder, dict):
                for key in ("", "x", "__metadata__", "../x", "\ud800"):
                    yield json.dumps(_replaced(parent, (*path[:-1], key), moved)).encode()
    # The same key twice.
    yield text.replace(b"{", b'{"x": 1, "x": 2, ', 1)
    yield b"[" * 100_000
    yield text[: len(text) // 2]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(one, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    changed = copy.deepcopy(value)
    _at(changed, path[:-1])[path[-1]] = other
    return changed


def mutated_pickle(content: bytes, choose: random.Random | None = None) -> Iterator[bytes]:
    """The pickle with each opcode taken out, doubled, or with another argument.

    With `choose`, it is one opcode.
    """
    found = list(pickletools.genops(content))
    ends = [at for _, _, at in found[1:]] + [len(content)]
    places = [*zip(found, ends, strict=True)]
    for (opcode, argument, at), end in [choose.choice(places)] if choose else places:
        before, here, behind = content[:at], content[at:end], content[end:]
        yield before + behind
        yield before + here + here + behind
        yield before
        for other in _other_opcodes(opcode.name, argument, here):
            yield before + other + behind


def _other_opcodes(name: str, argument: Any, here: bytes) -> Iterator[bytes]:
    if name in ("BININT", "BININT1", "BININT2", "LONG1"):
        sizes = [*_SIZES, argument + 1, argument - 1, argument * 2]
        yield from (_integer(size) for size in sizes)
        yield from (b"N", b"\x88", b"]", b"}", b")", b"G" + struct.pack(">d", 1.5), _text("1"))
    elif name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"):
        texts = ("", "x", "../x", "/etc/x", "\0", "x" * 70_000, "float32", "storage", "data")
        yield from (_text(text) for text in texts)
        yield from (b"X\x02\0\0\0\xff\xfe", b"X\xff\xff\xff\xff", b"N", b"K\x01", b"]", b"}")
        for module, other in _NAMES:
            yield _text(module) + _text(other) + b"\x93"
    elif name in ("GLOBAL", "STACK_GLOBAL"):
        for module, other in _NAMES:
            yield b"c" + f"{module}\n{other}\n".encode()
            # Called with a text: what an attack looks like.
            yield b"c" + f"{module}\n{other}\n".encode() + _text("true") + b"\x85R"
    elif name in ("BINGET", "BINPUT", "LONG_BINGET", "LONG_BINPUT", "MEMOIZE"):
        for number in (0, 1, 2, 255):
            yield b"h" + bytes([number])
            yield b"q" + bytes([number])
    else:
        # Every opcode there is, with what stood behind this one.
        codes = [ord(one.code) for one in pickletools.opcodes]
        yield from (bytes([code]) + here[1:] for code in codes)


def _integer(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def _text(text: str) -> bytes:
    content = text.encode()
    return b"X" + struct.pack("<I", len(content)) + content


def mutated_bytes(content: bytes, begin: int, end: int) -> Iterator[bytes]:
    """Each byte of a range with other bits, and all 2, 4 and 8 bytes with the extremes."""
    for at in range(begin, end):
        for other in {0, 0xFF, content[at] ^ 1, content[at] ^ 0x80, (content[at] + 1) & 0xFF}:
            yield content[:at] + bytes([other]) + content[at + 1 :]
    for size in (2, 4, 8):
        for at in range(begin, end - size):
            for other in (b"\0" * size, b"\xff" * size, b"\xff" * (size - 1) + b"\x7f"):
                yield content[:at] + other + content[at + size :]
