"""Payloads of deltas, compressed by Zstandard, one frame a block."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

from reshard.errors import FormatError, MissingExtraError

COMPRESSIONS = ("zstd",)
_LEVEL = 1
_MOST_WINDOW_BYTES = 8 << 20
# Compressors are for one thread.
_own = threading.local()


def compress(payload: bytes) -> bytes:
    """A payload as one frame, which says its length.

    Raises:
        MissingExtraError: zstandard is not installed.
    """
    if not hasattr(_own, "compressor"):
        _own.compressor = _zstandard().ZstdCompressor(level=_LEVEL)
    return bytes(_own.compressor.compress(payload))


def decompress(frame: Any, size_bytes: int, label: str) -> bytes:
    """The payload of `size_bytes` in a frame; `label` names it in errors.

    Raises:
        FormatError: a frame of another length, or none.
        MissingExtraError: zstandard is not installed.
    """
    zstandard = _zstandard()
    try:
        # Asked before anything of that size is allocated.
        said = zstandard.frame_content_size(frame)
        if said != size_bytes:
            raise FormatError(
                f"{label} would be decompressed to {said} bytes, expected {size_bytes}; the delta "
                "is damaged, fetch it again"
            )
        decoder = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW_BYTES)
        content = bytes(decoder.decompress(frame, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise FormatError(
            f"{label} is no Zstandard frame ({error}); the delta is damaged, fetch it again"
        ) from error
    if len(content) != size_bytes:
        raise FormatError(
            f"{label} was decompressed to {len(content)} bytes, expected {size_bytes}; the delta "
            "is damaged, fetch it again"
        )
    return content


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError(
            "compressed deltas need the package zstandard; pip install 'reshard[checkpoint]'"
        ) from error
    return zstandard
