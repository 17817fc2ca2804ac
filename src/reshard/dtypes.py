"""Element types: their width, and their names in NumPy, torch and safetensors.

Planning moves elements without interpreting them, so a type is mainly a width and a set of names.
Every spelling of a type yields the same `DType` object:

1. a name shared by NumPy, ml_dtypes and torch: `"bfloat16"`;
2. the tag of a safetensors header: `"BF16"`;
3. a NumPy dtype or scalar type (including those of ml_dtypes, which it registers with NumPy), or a
   torch dtype, recognized by its text.

Only NumPy is imported, so a bfloat16 tensor can be moved on a machine without a package that can
add two of them. Only `DType.numpy` requires that package.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from reshard._records import Record
from reshard.errors import MissingExtraError, UsageError

__all__ = ["ALL_DTYPES", "DType", "dtype"]


class DType(Record, eq=False):
    """The type of an element. `dtype` returns the single object of each type.

    `name` is its name in NumPy, ml_dtypes and torch (`getattr(torch, name)`). `safetensors_tag` is
    None if that format lacks the type. `storage` is a NumPy dtype of the same width for the bare
    bytes: copying arrays of it never changes a bit, and comparing them compares bits, not numbers.

    >>> dtype("bfloat16")
    DType('bfloat16')
    >>> dtype("bfloat16").itemsize_bytes, dtype("bfloat16").storage
    (2, dtype('uint16'))
    >>> dtype("complex128").storage, dtype("complex128").safetensors_tag
    (dtype('V16'), None)
    """

    name: str
    itemsize_bytes: int
    safetensors_tag: str | None
    storage: np.dtype[Any]

    def __post_init__(self) -> None:
        if self.storage.itemsize != self.itemsize_bytes:
            raise UsageError(
                f"dtype {self.name!r}: storage {self.storage} has {self.storage.itemsize} "
                f"bytes, expected {self.itemsize_bytes}"
            )

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype for arithmetic with these elements.

        >>> dtype("F32").numpy
        dtype('float32')

        Raises MissingExtraError if that requires ml_dtypes and it is missing or too old.
        """
        if self.name in _NUMPY_NAMES:
            return np.dtype(self.name)
        try:
            scalar_type: type = getattr(importlib.import_module("ml_dtypes"), self.name)
        except (ImportError, AttributeError) as error:
            raise MissingExtraError(
                f"dtype {self.name!r}: NumPy alone cannot compute with it. Expected the "
                f"package ml_dtypes with a type of that name, which reshard[checkpoint] has; "
                f"install it with: pip install --upgrade ml_dtypes"
            ) from error
        extended: np.dtype[Any] = np.dtype(scalar_type)
        return extended

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"DType({self.name!r})"

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        # Copies and unpickled values must be the same object, since equality is identity.
        return dtype, (self.name,)


def dtype(value: object) -> DType:
    """Return the `DType` of a name, a tag, or a dtype of NumPy or torch.

    `value` is a `DType`, a name, a safetensors tag (names and tags are case-sensitive: NumPy's
    `f16` has 16 bytes and safetensors' `F16` has 2), a NumPy dtype or scalar type, a torch dtype,
    or Python's `bool`. Python's `int`, `float` and `complex` are refused, because NumPy and torch
    give them different widths.

    >>> import numpy as np
    >>> dtype("F8_E4M3")
    DType('float8_e4m3fn')
    >>> dtype(np.int64) is dtype(np.dtype("int64")) is dtype("I64")
    True

    Raises UsageError for anything else: an unknown type (near matches are listed), a type narrower
    than a byte, a NumPy dtype in the other byte order.
    """
    if isinstance(value, DType):
        return value
    if isinstance(value, str):
        spelling = value
    elif isinstance(value, np.dtype):
        spelling = _numpy_spelling(value)
    elif isinstance(value, type):
        spelling = _type_spelling(value)
    elif type(value).__name__ == "dtype" and type(value).__module__ == "torch":
        spelling = str(value).removeprefix("torch.")
    else:
        raise UsageError(
            f"dtype {value!r} of type {type(value).__name__}: expected a name such as "
            f"'float32', a safetensors tag such as 'BF16', or a NumPy or torch dtype"
        )
    result = _BY_SPELLING.get(spelling)
    if result is None:
        raise UsageError(_unknown(spelling))
    return result


def _numpy_spelling(value: np.dtype[Any]) -> str:
    # NumPy's name lacks the byte order, and the other order would be read as garbage.
    if not value.isnative:
        raise UsageError(
            f"dtype {value!r}: its bytes are in the other order than this machine's. Expected "
            f"native order; convert the array: array.astype(array.dtype.newbyteorder('='))"
        )
    return value.name


def _type_spelling(value: type) -> str:
    if value in (int, float, complex):
        raise UsageError(
            f"dtype {value.__name__}: NumPy and torch give Python's {value.__name__} different "
            f"widths. Expected an explicit one, such as "
            f"{_EXPLICIT_WIDTHS[value.__name__]}"
        )
    # NumPy before 2.3 reads an abstract type as its widest concrete type, with a warning.
    if value in _ABSTRACT_TYPES:
        return value.__name__
    try:
        result = np.dtype(value)
    except TypeError:
        return value.__name__
    # NumPy reads a class derived from np.float64 as float64.
    if issubclass(value, np.generic) and result.type is not value:
        return value.__name__
    return _numpy_spelling(result)


def _unknown(spelling: str) -> str:
    if spelling in _SUB_BYTE_SPELLINGS:
        return (
            f"dtype {spelling!r}: not supported, its elements are not whole bytes. Expected a "
            f"type of 8 bits or more; store the packed bytes as 'uint8'"
        )
    import difflib

    # Compared without case, so that 'bf16' finds 'BF16'.
    folded = {spelled.casefold(): spelled for spelled in _BY_SPELLING}
    near = [folded[match] for match in difflib.get_close_matches(spelling.casefold(), folded)]
    advice = (
        f"Did you mean {', '.join(near)}?"
        if near
        else f"Known types: {', '.join(spelled.name for spelled in ALL_DTYPES)}"
    )
    return f"dtype {spelling!r}: unknown. Expected a type's name or its safetensors tag. {advice}"


_EXPLICIT_WIDTHS = {
    "int": "'int64' or 'int32'",
    "float": "'float64' or 'float32'",
    "complex": "'complex128' or 'complex64'",
}

# Name, bytes, safetensors tag; NumPy itself computes with these.
_NUMPY_TYPES: tuple[tuple[str, int, str | None], ...] = (
    ("bool", 1, "BOOL"),
    ("int8", 1, "I8"),
    ("int16", 2, "I16"),
    ("int32", 4, "I32"),
    ("int64", 8, "I64"),
    ("uint8", 1, "U8"),
    ("uint16", 2, "U16"),
    ("uint32", 4, "U32"),
    ("uint64", 8, "U64"),
    ("float16", 2, "F16"),
    ("float32", 4, "F32"),
    ("float64", 8, "F64"),
    ("complex64", 8, "C64"),
    ("complex128", 16, None),
)

# The same; only ml_dtypes or torch computes with these.
_EXTENDED_TYPES: tuple[tuple[str, int, str | None], ...] = (
    ("bfloat16", 2, "BF16"),
    ("complex32", 4, None),
    ("float8_e3m4", 1, None),
    ("float8_e4m3", 1, None),
    ("float8_e4m3b11fnuz", 1, None),
    ("float8_e4m3fn", 1, "F8_E4M3"),
    ("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
    ("float8_e5m2", 1, "F8_E5M2"),
    ("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
    ("float8_e8m0fnu", 1, "F8_E8M0"),
)

# Names of types narrower than a byte in safetensors, ml_dtypes and torch.
_SUB_BYTE_SPELLINGS = frozenset(
    ["F4", "F6_E2M3", "F6_E3M2"]
    + ["float4_e2m1fn", "float4_e2m1fn_x2", "float6_e2m3fn", "float6_e3m2fn"]
    + [f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 8)]
    # torch's quantized and bit types, and names used by quantizers.
    + ["quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "nf4", "fp4", "mxfp4", "nvfp4"]
)

_ABSTRACT_TYPES = frozenset(
    {
        *(np.generic, np.number, np.integer, np.signedinteger, np.unsignedinteger),
        *(np.inexact, np.floating, np.complexfloating, np.flexible, np.character),
    }
)
_NUMPY_NAMES = frozenset(name for name, _, _ in _NUMPY_TYPES)

# NumPy lacks a 16-byte integer; a void of that width copies and compares as bytes too.
_STORAGE = {width: np.dtype(f"u{width}") for width in (1, 2, 4, 8)} | {16: np.dtype("V16")}

#: Every type that reshard can move, NumPy's types first.
ALL_DTYPES: tuple[DType, ...] = tuple(
    DType(name, width, tag, _STORAGE[width]) for name, width, tag in _NUMPY_TYPES + _EXTENDED_TYPES
)

_BY_SPELLING: dict[str, DType] = {known.name: known for known in ALL_DTYPES} | {
    known.safetensors_tag: known for known in ALL_DTYPES if known.safetensors_tag is not None
}
