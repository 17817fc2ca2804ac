"""Element types: their width, and their names in NumPy, torch and safetensors.

Planning moves elements without looking inside them, so a type is here mainly a width and
a set of names. Every spelling of a type leads to the same `DType` object:

1. a name, which NumPy, ml_dtypes and torch share: `"bfloat16"`;
2. the tag a safetensors header uses: `"BF16"`;
3. a NumPy dtype or scalar type (ml_dtypes registers its types with NumPy, so they come
   with it), or a torch dtype, recognised by its text.

Nothing but NumPy is imported to do that, so a bfloat16 tensor can be moved on a machine
that has no package able to add two of them. Only `DType.numpy` asks for that package.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.errors import MissingExtraError, UsageError

__all__ = ["ALL_DTYPES", "DType", "dtype"]


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """The type of one element. `dtype` gives the one object there is for each type.

    `name` is what NumPy, ml_dtypes and torch call it (`getattr(torch, name)`, where torch
    has it). `safetensors_tag` is None where that format has no word for the type.
    `storage` is a NumPy dtype of the same width that holds the bare bytes: copying arrays
    of it never changes a bit, and comparing them compares bits, not numbers.

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
        """The NumPy dtype that can do arithmetic with these elements.

        >>> dtype("F32").numpy
        dtype('float32')

        Raises MissingExtraError where that takes ml_dtypes and it is absent or too old.
        """
        if self.name in _NUMPY_NAMES:
            return np.dtype(self.name)
        try:
            scalar_type: type = getattr(importlib.import_module("ml_dtypes"), self.name)
        except (ImportError, AttributeError) as error:
            raise MissingExtraError(
                f"dtype {self.name!r}: NumPy alone cannot calculate with it. Expected the "
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
        # Copies and unpickled values must be the interned object, since equality is identity.
        return dtype, (self.name,)


def dtype(value: object) -> DType:
    """The `DType` that `value` means.

    `value` is a `DType`, a name, a safetensors tag (names and tags are read exactly, case
    included: NumPy's `f16` has 16 bytes and safetensors' `F16` has 2), a NumPy dtype or
    scalar type, a torch dtype, or Python's `bool`. Python's `int`, `float` and `complex`
    are refused, because NumPy and torch give them different widths.

    >>> import numpy as np
    >>> dtype("F8_E4M3")
    DType('float8_e4m3fn')
    >>> dtype(np.int64) is dtype(np.dtype("int64")) is dtype("I64")
    True

    Raises UsageError for anything else: an unknown type (near matches are listed), one
    whose elements are not whole bytes, a NumPy dtype in the other byte order.
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
    found = _BY_SPELLING.get(spelling)
    if found is None:
        raise UsageError(_unknown(spelling))
    return found


def _numpy_spelling(value: np.dtype[Any]) -> str:
    # NumPy's name leaves the byte order out, and the other order would be read as garbage.
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
    try:
        found = np.dtype(value)
    except TypeError:
        return value.__name__
    # Older NumPy reads an abstract type such as np.floating as its widest concrete one.
    if issubclass(value, np.generic) and found.type is not value:
        return value.__name__
    return _numpy_spelling(found)


def _unknown(spelling: str) -> str:
    if spelling in _SUB_BYTE_SPELLINGS:
        return (
            f"dtype {spelling!r}: not supported, its elements are not whole bytes. Expected a "
            f"type of 8 bits or more; store the packed bytes as 'uint8'"
        )
    # Compared without case, so that 'bf16' finds 'BF16'.
    folded = {known.casefold(): known for known in _BY_SPELLING}
    near = [folded[match] for match in difflib.get_close_matches(spelling.casefold(), folded)]
    advice = (
        f"Did you mean {', '.join(near)}?"
        if near
        else f"Known types: {', '.join(known.name for known in ALL_DTYPES)}"
    )
    return f"dtype {spelling!r}: unknown. Expected a type's name or its safetensors tag. {advice}"


_EXPLICIT_WIDTHS = {
    "int": "'int64' or 'int32'",
    "float": "'float64' or 'float32'",
    "complex": "'complex128' or 'complex64'",
}

# name, bytes, safetensors tag; NumPy itself calculates with these
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

# the same; only ml_dtypes or torch calculates with these
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

# safetensors tags, ml_dtypes names and torch names of types narrower than a byte
_SUB_BYTE_SPELLINGS = frozenset(
    ["F4", "F6_E2M3", "F6_E3M2"]
    + ["float4_e2m1fn", "float4_e2m1fn_x2", "float6_e2m3fn", "float6_e3m2fn"]
    + [f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 8)]
    # torch's own, of quantised tensors and of bits, and what quantisers call such types
    + ["quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "nf4", "fp4", "mxfp4", "nvfp4"]
)

_NUMPY_NAMES = frozenset(name for name, _, _ in _NUMPY_TYPES)

# NumPy has no 16-byte integer; a void of that width copies and compares as bytes too.
_STORAGE = {width: np.dtype(f"u{width}") for width in (1, 2, 4, 8)} | {16: np.dtype("V16")}

#: Every type reshard can move, NumPy's own first.
ALL_DTYPES: tuple[DType, ...] = tuple(
    DType(name, width, tag, _STORAGE[width]) for name, width, tag in _NUMPY_TYPES + _EXTENDED_TYPES
)

_BY_SPELLING: dict[str, DType] = {known.name: known for known in ALL_DTYPES} | {
    known.safetensors_tag: known for known in ALL_DTYPES if known.safetensors_tag is not None
}
