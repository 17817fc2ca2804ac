"""A torch store whose keys and values are sealed by a secret, on the server of a link.

Whoever is between two processes can change what they send to the server (`store_server`). Each key
and value carries a code of the secret (HMAC with SHA-256)::

    key    "0/card/2"       ->   code of the key
    value  "..."            ->   code of key and value, value

A value that was not written by this secret, or stands at another key, is refused: it is neither
read nor taken for something else. Values are not encrypted. A guess at the secret costs 16 MiB and
some 50 ms (scrypt).

Source: RFC 2104 (HMAC), RFC 7914 (scrypt).
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch.distributed as dist

from reshard.errors import LinkError

# What anybody may read: by it, a secret is found to be another before anything waits for it.
SALT_BYTES = 16
_CODE_BYTES = 32
_SCRYPT_COST, _SCRYPT_BLOCK = 1 << 14, 8
_LOOK_S = 0.02


# The trainer needs the key of its store twice, and scrypt takes 50 ms.
@lru_cache(maxsize=1)
def derive_key(secret: str, salt: bytes) -> bytes:
    """The 32 bytes by which a secret seals; another salt gives others.

    >>> derive_key("s", b"0" * 16) == derive_key("s", b"1" * 16)
    False
    """
    return hashlib.scrypt(
        secret.encode(), salt=salt, n=_SCRYPT_COST, r=_SCRYPT_BLOCK, p=1, dklen=_CODE_BYTES
    )


def code_of(key: bytes, *parts: bytes) -> bytes:
    """The code of parts, in this order and cut like this; `shape (32,)` in bytes."""
    found = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        found.update(len(part).to_bytes(8) + part)
    return found.digest()


class SealedStore(dist.Store):  # type: ignore[misc]
    """A store whose keys and values are sealed by `key`. Counters of `add` have sealed keys only.

    Raises LinkError for a value that is not sealed by it. Whoever waits for one asks again and
    again, so that other threads can use the store meanwhile, and calls `check_others`, which raises
    where nobody will write it.
    """

    def __init__(self, store: Any, key: bytes, server: object = None) -> None:
        super().__init__()
        self._store: Any = store
        # Of the process that serves it: the store is there for as long as this end is.
        self._server = server
        self.key = key
        self.check_others: Callable[[], None] | None = None

    def close(self) -> None:
        """Give the connection back, also where groups of torch keep the store."""
        self._store = None

    def _reach(self) -> Any:
        given = self._store
        if given is None:
            raise LinkError("this end of the link is closed; connect again")
        return given

    def _seal_key(self, key: str) -> str:
        return code_of(self.key, b"key", key.encode()).hex()

    def _seal_value(self, key: str, value: bytes) -> bytes:
        return code_of(self.key, b"value", key.encode(), value) + value

    def _open_value(self, key: str, sealed: bytes) -> bytes:
        code, value = sealed[:_CODE_BYTES], sealed[_CODE_BYTES:]
        if not hmac.compare_digest(code, code_of(self.key, b"value", key.encode(), value)):
            raise LinkError(f"what stands at {key!r} of the link's store was not written by it")
        return value

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._reach().set(self._seal_key(key), self._seal_value(key, data))

    def get(self, key: str) -> bytes:
        """Wait for a value and read it."""
        self.wait([key])
        return self._open_value(key, bytes(self._reach().get(self._seal_key(key))))

    def add(self, key: str, value: int) -> int:
        """Add to a counter; what it is then."""
        return int(self._reach().add(self._seal_key(key), value))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._reach().check([self._seal_key(key) for key in keys]))

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are there. Raises LinkError where they do not come."""
        begun_s = time.monotonic()
        limit_s = (timeout or self._reach().timeout).total_seconds()
        while not self.check(keys):
            if self.check_others is not None:
                self.check_others()
            waited_s = time.monotonic() - begun_s
            if waited_s > limit_s:
                raise LinkError(f"{', '.join(keys)} did not come to the store in {limit_s:g} s")
            time.sleep(min(waited_s / 8, _LOOK_S))

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return bool(self._reach().delete_key(self._seal_key(key)))

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long `get` and `wait` wait."""
        self._reach().set_timeout(timeout)

    @property
    def timeout(self) -> Any:
        """How long `get` and `wait` wait."""
        return self._reach().timeout
