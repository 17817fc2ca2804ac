"""Object stores: protocols for reading and writing, and reading by obstore.

obstore signs requests by each store's conventions. It repeats requests that the server could not
answer (5xx, 429, broken connections), waiting longer each time. A response that ends early is
requested again from the first missing byte.

==========  ============================================  ======================================
scheme      credentials                                   another endpoint
==========  ============================================  ======================================
`s3`        boto3's if it is installed, else `AWS_*`      `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`
`gs`        `GOOGLE_APPLICATION_CREDENTIALS`, gcloud's    `STORAGE_EMULATOR_HOST`
`az`        `AZURE_STORAGE_*`                             `AZURE_STORAGE_ENDPOINT`
`http(s)`   none                                          none
==========  ============================================  ======================================

Objects are written in parts. An object that was *begun* does not exist yet: its parts are put in
any order, by any process that knows the upload, and can be listed. `complete` creates the object
from them at once. Writing does not use obstore, whose multipart uploads neither return the upload's
id nor list its parts. So a later run could neither resume nor abort an interrupted upload.

Both protocols raise failures as `OSError`, with the reason as its `strerror`. The errors of
`ObjectTarget` have the URL as their `filename`.
"""

from __future__ import annotations

import datetime
import errno
import io
import os
import random
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from reshard.checkpoint.storage.filesystem import CONTINUES, close_descriptor, reason
from reshard.errors import MissingExtraError, RunError
from reshard.system import read_at

# The maximum number of bytes of a response that are buffered at a time.
_PIECE_BYTES = 256 << 10
_ATTEMPTS = 6
_FIRST_WAIT_S = 0.2
_GIVE_UP_S = 60
#: The maximum number of short requests, for names and headers, in flight at a time.
IN_FLIGHT = 16
# Web servers do not list folders, so these names are requested: the usual files of a checkpoint.
_COMMON_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "reshard.manifest.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "adapter_model.safetensors",
    "adapter_config.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    ".metadata",
)
EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure", "http": "s3", "https": "s3", "hf": "hf"}

Answer = TypeVar("Answer")


class ObjectState(NamedTuple):
    """The state of an object, or of a part: any change of it changes some of these fields.

    For reading, `modified_s` is in whole seconds, since listings and single responses round
    differently. `tag` is the store's name for this content, such as a checksum, or None.
    `conversion_id` is the conversion that wrote the object, if the response has its metadata.
    """

    size_bytes: int
    modified_s: float = 0
    tag: str | None = None
    conversion_id: str | None = None

    def stat_result(self) -> os.stat_result:
        """Return the state as an `os.stat_result`, with a digest of the tag as `st_ino`.

        >>> ObjectState(7, 1_700_000_000).stat_result().st_mtime_ns
        1700000000000000000
        """
        import hashlib

        digest = hashlib.blake2b((self.tag or "").encode(), digest_size=7).digest()
        number = 0 if self.tag is None else int.from_bytes(digest, "big")
        modified_s = int(self.modified_s)
        row = (stat.S_IFREG | 0o444, number, 0, 1, 0, 0, self.size_bytes, *(modified_s,) * 3)
        return os.stat_result(row, {"st_mtime_ns": modified_s * 1_000_000_000})


class FolderListing(NamedTuple):
    """The objects in a folder, and the names of its subfolders.

    `is_complete` is False if the store cannot list: there may be other objects.
    """

    objects: Mapping[str, ObjectState] = MappingProxyType({})
    folders: frozenset[str] = frozenset()
    is_complete: bool = True


class ObjectSource(Protocol):
    """A store from which objects are read by their keys, in which slashes separate folders."""

    def head(self, key: str) -> ObjectState | None:
        """Return the state of an object, or None if it does not exist."""

    def list_folder(self, key: str) -> FolderListing:
        """List the objects and folders directly below a key, none if it is not a folder."""

    def read_into(self, key: str, start_bytes: int, memory: memoryview) -> ObjectState:
        """Fill memory with a range of an object, and return the object's state while reading."""


class BucketSource:
    """A bucket, or a web server.

    Args:
        store: a store of obstore.
        lists: whether it can list folders, which web servers cannot.
        has_tags: whether the tags of listings and of other responses agree.
    """

    def __init__(self, store: Any, *, lists: bool = True, has_tags: bool = True) -> None:
        self._store, self._lists, self._has_tags = store, lists, has_tags
        self._obstore = import_obstore("s3")

    def head(self, key: str) -> ObjectState | None:
        """Return the state of an object, or None if it does not exist."""

        def look() -> ObjectState | None:
            try:
                return self._state_of(self._obstore.head(self._store, key))
            except FileNotFoundError:
                return None

        return None if not key else repeat(look, key)

    def list_folder(self, key: str) -> FolderListing:
        """List the objects and folders directly below a key, none if it is not a folder."""
        if not self._lists:
            return self._request_common_names(key)
        listed = repeat(lambda: self._obstore.list_with_delimiter(self._store, key or None), key)
        # Consoles create folders as empty objects with the folder's own name.
        return FolderListing(
            {
                entry["path"].rpartition("/")[2]: self._state_of(entry)
                for entry in listed["objects"]
                if entry["path"] != key
            },
            frozenset(
                prefix.rstrip("/").rpartition("/")[2] for prefix in listed["common_prefixes"]
            ),
        )

    def _request_common_names(self, key: str) -> FolderListing:
        keys = [f"{key}/{name}" if key else name for name in _COMMON_NAMES]
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            states = list(threads.map(self.head, keys))
        objects = {name: state for name, state in zip(_COMMON_NAMES, states, strict=True) if state}
        return FolderListing(objects, is_complete=False)

    def read_into(self, key: str, start_bytes: int, memory: memoryview) -> ObjectState:
        """Fill memory with a range of an object, and return the object's state while reading."""
        filled = 0
        seen: ObjectState | None = None

        def read() -> ObjectState:
            nonlocal filled, seen
            options = {"range": (start_bytes + filled, start_bytes + len(memory))}
            answer = self._obstore.get(self._store, key, options=options)
            state = self._state_of(answer.meta)
            if seen not in (None, state):
                # The object was replaced, so its new bytes do not belong to those already read. The
                # caller detects that by the returned state.
                return state
            seen = state
            for piece in answer.stream(min_chunk_size=_PIECE_BYTES):
                stop = filled + len(piece)
                if stop > len(memory):
                    raise OSError(errno.EIO, "the response has more bytes than were requested")
                memory[filled:stop] = memoryview(piece)
                filled = stop
            if filled < len(memory):
                raise ConnectionError(errno.ECONNRESET, "the response ended early")
            return state

        return repeat(read, key)

    def _state_of(self, meta: Mapping[str, Any]) -> ObjectState:
        modified: datetime.datetime = meta["last_modified"]
        # Azure's listings have tags without the quotes of its other responses.
        tag = (meta["e_tag"] or "").strip('"') or None if self._has_tags else None
        return ObjectState(meta["size"], int(modified.timestamp()), tag)


def open_bucket(scheme: str, name: str, headers: Mapping[str, str] | None = None) -> BucketSource:
    """Open a bucket of a store, or a web server, by its name.

    Args:
        scheme: the scheme of its URL.
        name: the part of the URL after the scheme.
        headers: the headers of requests to a web server.

    Raises:
        MissingExtraError: obstore is not installed.
        OSError: invalid settings in the environment.
    """
    obstore = import_obstore(EXTRAS[scheme])
    # The package does not import its submodule of stores itself.
    stores = __import__("obstore.store", fromlist=["store"])
    shared: dict[str, Any] = {
        "retry_config": {
            "max_retries": _ATTEMPTS,
            "retry_timeout": datetime.timedelta(seconds=_GIVE_UP_S),
            "backoff": {"init_backoff": datetime.timedelta(seconds=_FIRST_WAIT_S)},
        }
    }

    def client(endpoint: str) -> dict[str, Any]:
        options: dict[str, Any] = {"allow_http": endpoint.startswith("http://")}
        return {"client_options": options | {"default_headers": dict(headers or {})}}

    try:
        if scheme == "s3":
            endpoint = _endpoint("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
            endpoint_options = {"endpoint": endpoint} if endpoint else {}
            return BucketSource(
                stores.S3Store(
                    name, **endpoint_options, **_find_credentials(), **client(endpoint), **shared
                )
            )
        if scheme == "gs":
            endpoint_options, endpoint = _find_emulator()
            store = stores.GCSStore(name, **endpoint_options, **client(endpoint), **shared)
            return BucketSource(store, has_tags=False)
        if scheme == "az":
            endpoint = _endpoint("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
            endpoint_options = {"endpoint": endpoint} if endpoint else {}
            return BucketSource(
                stores.AzureStore(name, **endpoint_options, **client(endpoint), **shared)
            )
        url = f"{scheme}://{name}"
        try:
            return BucketSource(stores.HTTPStore(url, **client(url), **shared), lists=False)
        except ValueError as error:
            raise OSError(errno.EINVAL, f"this is not a URL: {error}") from error
    except obstore.exceptions.BaseError as error:
        remedy = "; set AZURE_STORAGE_ACCOUNT_NAME" if "Account must be" in str(error) else ""
        raise OSError(errno.EINVAL, f"{_describe_error(error)}{remedy}") from error


def _endpoint(*names: str, default_scheme: str = "") -> str:
    """Return the URL in the first of these variables that is set, or "" if none is set.

    `default_scheme` is prepended to a value without a scheme.
    """
    url = find_setting(*names)
    if url and "://" not in url:
        url = f"{default_scheme}{url}"
    # obstore panics at other values.
    if url and not re.fullmatch(r"https?://[^\s/]+\S*", url):
        name = next(name for name in names if os.environ.get(name))
        raise OSError(errno.EINVAL, f"{name} is not a URL such as http://127.0.0.1:9000")
    return url


def find_setting(*names: str) -> str:
    """Return the first of these environment variables that is set, or "" if none is."""
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def is_unsigned() -> bool:
    """Return whether requests to S3 are sent without credentials, to public buckets."""
    return find_setting("AWS_SKIP_SIGNATURE").lower() in ("1", "true", "yes")


def _find_credentials() -> dict[str, Any]:
    """Return boto3's credentials, including profiles and single sign-on, or `{}` if public."""
    if is_unsigned():
        return {"skip_signature": True}
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return {}
    try:
        session = boto3.Session()
        if session.get_credentials() is None:
            return {}
    except BotoCoreError as error:
        raise OSError(errno.EINVAL, str(error)) from error
    return {"credential_provider": Boto3CredentialProvider(session)}


def _find_emulator() -> tuple[dict[str, Any], str]:
    """Return the options and the URL of an emulator of Google's store, if set."""
    endpoint = _endpoint("STORAGE_EMULATOR_HOST", default_scheme="http://")
    if not endpoint:
        return {}, ""
    key = (
        f'{{"gcs_base_url": "{endpoint}", "disable_oauth": true, "client_email": "", '
        '"private_key": "", "private_key_id": ""}'
    )
    return {"service_account_key": key}, endpoint


def import_obstore(extra: str) -> Any:
    """Import the package obstore. Raises MissingExtraError."""
    try:
        import obstore
        import obstore.exceptions
    except ImportError as error:
        raise MissingExtraError(
            "a URL of an object store or a web server needs the package obstore; "
            f"pip install 'reshard[{extra}]'"
        ) from error
    return obstore


def repeat(action: Callable[[], Answer], key: str) -> Answer:
    """Return the result of an action, repeated if the connection broke; raise errors as OSError."""
    obstore = import_obstore("s3")
    refusals = obstore.exceptions
    attempt = 0
    while True:
        attempt += 1
        try:
            return action()
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", key) from error
        except (refusals.PermissionDeniedError, refusals.UnauthenticatedError) as error:
            raise PermissionError(
                errno.EACCES, f"the store denies access to this user: {_describe_error(error)}", key
            ) from error
        except (refusals.BaseError, ConnectionError) as error:
            if attempt == _ATTEMPTS or not _is_transient(error):
                raise OSError(errno.EIO, _describe_error(error), key) from error
        time.sleep(choose_wait_s(attempt))


def choose_wait_s(attempt: int) -> float:
    """Return the seconds to wait after an attempt, which double with each.

    They are random, so that many ranks do not repeat their requests at the same time.
    """
    return _FIRST_WAIT_S * (1 << attempt) * random.uniform(0.25, 0.5)


def _is_transient(error: BaseException) -> bool:
    """Return whether to try again: after a broken response, but not after an error response."""
    # Both messages of obstore end so; a part of them could be in the name of a bucket.
    return isinstance(error, ConnectionError) or "response body" in str(error)


def _describe_error(error: BaseException) -> str:
    """Return a store's message in a line, without queries of URLs, which may have secrets."""
    text = str(error)
    reason = text.partition("\n\nDebug source")[0].rpartition(" - ")[2]
    reason = reason.removeprefix("Server returned non-2xx status code: ").partition("<")[0]
    details = [
        match[1].strip()
        for match in (
            re.search(r"<Message>(.*?)</Message>", text, re.DOTALL),
            re.search(r'message: "([^"]+)"', text),
        )
        if match
    ]
    message = " ".join([reason.strip(" :"), *details])
    return shorten(message) or type(error).__name__


#: The metadata key of the conversion that wrote an object: letters only, since servers turn
#: underscores of headers into hyphens, or drop them, and Azure does not allow hyphens.
CONVERSION_KEY = "reshardconversion"
#: The number of attempts at a request, if the store's client has a setting for it.
ATTEMPTS = 8


def conversion_metadata(conversion_id: str) -> dict[str, str]:
    """Return the metadata of an object that a conversion writes."""
    return {CONVERSION_KEY: conversion_id} if conversion_id else {}


class PendingUpload(NamedTuple):
    """An object that was begun and is not complete; `size_bytes` is the size of its parts."""

    key: str
    upload: str
    began_s: float
    size_bytes: int = 0


class ObjectTarget(Protocol):
    """A bucket that can be written to.

    Subclasses define the URL's scheme, the exceptions of the store's client, and their meanings.
    """

    scheme: ClassVar[str]
    _name: str

    def _list_errors(self) -> tuple[type[Exception], ...]:
        """Return the exceptions of the store's client, whose package is imported by now."""

    def _explain(self, error: Any) -> tuple[int, str]:
        """Return the system's error number for an exception of the client, and its text.

        The number is ENOENT if the object or its upload does not exist, EINVAL for settings.
        """

    def _address(self, key: str) -> str:
        return f"{self.scheme}://{self._name}/{key}"

    @contextmanager
    def _translate(self, key: str) -> Iterator[None]:
        """Translate exceptions of the client into OSError, or a subclass for their error number."""
        try:
            yield
        except self._list_errors() as error:
            number, text = self._explain(error)
            raise OSError(number, shorten(text), self._address(key)) from error

    def _if_exists(self, key: str, request: Callable[[], Answer]) -> Answer | None:
        """Return the result of a request, or None if its object or upload does not exist."""
        try:
            with self._translate(key):
                return request()
        except FileNotFoundError:
            return None

    def _expect_complete(self, key: str, conversion_id: str, problem: str) -> None:
        """Raise OSError unless the object exists, after the response to `complete` was lost."""
        stored = self.head(key)
        if stored is None or stored.conversion_id != conversion_id:
            raise OSError(errno.EIO, problem, self._address(key))

    def begin(self, key: str, conversion_id: str, parts_key: str) -> str:
        """Begin an object, and return the id of its upload.

        If parts are objects themselves, their keys begin with `parts_key`.
        """

    def put_part(self, key: str, upload: str, number: int, body: FileStream) -> str:
        """Put or replace part `number`, counted from 0, and return its listed checksum."""

    def list_parts(self, key: str, upload: str) -> dict[int, ObjectState] | None:
        """Return the parts by number, or None if the upload is unknown."""

    def complete(self, key: str, upload: str, parts: int, conversion_id: str) -> None:
        """Create the object from parts 0 to `parts`, unless it already exists."""

    def abort(self, key: str, upload: str) -> None:
        """Remove an object that was begun, with its parts."""

    def put(self, key: str, body: FileStream | bytes, conversion_id: str = "") -> None:
        """Put a small object."""

    def get(self, key: str) -> bytes | None:
        """Return the bytes of a small object, or None if it does not exist."""

    def head(self, key: str) -> ObjectState | None:
        """Return the state of an object, or None if it does not exist."""

    def list_objects(self, prefix: str) -> Mapping[str, ObjectState]:
        """Return all objects whose keys begin with `prefix`, without the writing conversions."""

    def list_uploads(self, prefix: str) -> list[PendingUpload]:
        """Return the incomplete uploads of keys that begin with `prefix`."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the objects that exist."""

    def close(self) -> None:
        """Close connections."""


class SizedStream(io.RawIOBase):
    """A seekable stream of `size_bytes`; subclasses define how memory is filled."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self.size_bytes, self._at = size_bytes, 0

    def _fill(self, view: memoryview, at: int) -> int:
        """Fill memory with the bytes from `at` on, which exist, and return how many were read."""
        raise NotImplementedError

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the current position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the position relative to the start, the current position, or the end."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size_bytes}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer, or as much of it as is left before the end."""
        view = memoryview(buffer).cast("B")
        size = min(len(view), max(self.size_bytes - self._at, 0))
        count = self._fill(view[:size], self._at) if size else 0
        self._at += count
        return count


class FileStream(SizedStream):
    """A range of a local file as a seekable stream."""

    # If opening fails, the base class closes the object.
    _descriptor = -1

    def __init__(self, path: Path, start_bytes: int, stop_bytes: int) -> None:
        super().__init__(stop_bytes - start_bytes)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        self._start = start_bytes

    def __len__(self) -> int:
        # Clients of stores take the length of a request's body by `len`.
        return self.size_bytes

    def _fill(self, view: memoryview, at: int) -> int:
        count = read_at(self._descriptor, view, self._start + at)
        if not count:
            raise OSError(errno.EIO, "the file ends early; did another program truncate it?")
        return count

    def close(self) -> None:
        """Close the file."""
        self._descriptor = close_descriptor(self._descriptor)
        super().close()


@contextmanager
def translate_store_errors(action: str) -> Iterator[None]:
    """Translate errors of a store or the system into a `RunError` with advice."""
    try:
        yield
    except OSError as error:
        advice = f"check the connection, then {CONTINUES}"
        if isinstance(error, PermissionError):
            advice = (
                f"check that these credentials may read, write, list and delete, then {CONTINUES}"
            )
        elif error.errno in (errno.EINVAL, errno.ENOENT):
            advice = f"correct that, then {CONTINUES}"
        raise RunError(f"cannot {action}: {error.filename}: {reason(error)}; {advice}") from error


def shorten(text: str) -> str:
    """Return a message as a line, without queries of URLs, which may have secrets.

    >>> shorten("no answer from http://host/key?X-Amz-Signature=abc\\n twice")
    'no answer from http://host/key twice'
    """
    return re.sub(r"\?\S*", "", " ".join(text.split()))[:300]
