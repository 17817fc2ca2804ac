"""What a place answers, and buckets and web servers that do.

Requests go through obstore, which signs them by each store's own conventions and repeats what a
server could not answer (5xx, 429, connections that break), waiting longer each time. An answer that
ends early is asked for again from the byte that is missing.

==========  ============================================  ======================================
scheme      credentials                                   another endpoint
==========  ============================================  ======================================
`s3`        boto3's where it is installed, else `AWS_*`   `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`
`gs`        `GOOGLE_APPLICATION_CREDENTIALS`, gcloud's    `STORAGE_EMULATOR_HOST`
`az`        `AZURE_STORAGE_*`                             `AZURE_STORAGE_ENDPOINT`
`http(s)`   none
==========  ============================================  ======================================

What a store does for a checkpoint that is written to it: objects that are put in parts.

An object that is *begun* is not there yet: its parts are put in any order, by any process that
knows the upload, and may be listed. `complete` makes the object of them at once.

What a store refuses is raised as `OSError`, with the address as its `filename` and the reason as
its `strerror`.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import io
import os
import random
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from reshard.checkpoint.storage.filesystem import CONTINUES, close_descriptor, reason
from reshard.errors import MissingExtraError, RunError
from reshard.system import read_at

# What is handed on at a time of an answer: it is all that an answer takes beside its target.
_PIECE_BYTES = 256 << 10
_ATTEMPTS = 6
_FIRST_WAIT_S = 0.2
_GIVE_UP_S = 60
#: Requests for names and headers at a time, of which none takes long.
IN_FLIGHT = 16
# A web server lists nothing: these names of a model's files are asked for.
_USUAL_NAMES = (
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


@dataclass(frozen=True, slots=True)
class ObjectState:
    """An object as it was seen: it has changed where one of these differs.

    `modified_s` is in whole seconds, since listings and single answers round differently. `tag` is
    what the store calls this content, where it does.
    """

    size_bytes: int
    modified_s: int = 0
    tag: str | None = None

    def stat_result(self) -> os.stat_result:
        """What `os.stat` would answer; `st_ino` is a digest of the tag, so that it is one number.

        >>> ObjectState(7, 1_700_000_000).stat_result().st_mtime_ns
        1700000000000000000
        """
        digest = hashlib.blake2b((self.tag or "").encode(), digest_size=7).digest()
        number = 0 if self.tag is None else int.from_bytes(digest, "big")
        times = (self.modified_s,) * 3
        row = (stat.S_IFREG | 0o444, number, 0, 1, 0, 0, self.size_bytes, *times)
        return os.stat_result(row, {"st_mtime_ns": self.modified_s * 1_000_000_000})


@dataclass(frozen=True, slots=True)
class FolderListing:
    """What is directly in a folder: its objects, and the names of the folders within.

    `is_whole` says that there is nothing else.
    """

    objects: Mapping[str, ObjectState] = field(default_factory=dict)
    folders: frozenset[str] = frozenset()
    is_whole: bool = True


class ObjectSource(Protocol):
    """Where objects are: by key, with folders where keys have slashes.

    What a source refuses is raised as `OSError`, with the reason as its `strerror`.
    """

    def head(self, key: str) -> ObjectState | None:
        """An object; None where there is none."""

    def list_folder(self, key: str) -> FolderListing:
        """What is directly below a key, nothing where there is no such folder."""

    def read_into(self, key: str, start_bytes: int, memory: memoryview) -> ObjectState:
        """Fill memory with a range of an object, and say what the object was meanwhile."""


class BucketSource:
    """A bucket, or a web server, which lists nothing.

    Args:
        store: of obstore.
        lists: whether it can say what is in a folder.
        has_tags: whether listings and answers call the same content the same.
    """

    def __init__(self, store: Any, *, lists: bool = True, has_tags: bool = True) -> None:
        self._store, self._lists, self._has_tags = store, lists, has_tags
        self._obstore = import_obstore("s3")

    def head(self, key: str) -> ObjectState | None:
        """An object; None where there is none."""

        def look() -> ObjectState | None:
            try:
                return self._state_of(self._obstore.head(self._store, key))
            except FileNotFoundError:
                return None

        return None if not key else repeat(look, key)

    def list_folder(self, key: str) -> FolderListing:
        """What is directly below a key, nothing where there is no such folder."""
        if not self._lists:
            return self._ask_for_usual_names(key)
        found = repeat(lambda: self._obstore.list_with_delimiter(self._store, key or None), key)
        # Consoles make folders as empty objects, which have the folder's own name.
        return FolderListing(
            {
                one["path"].rpartition("/")[2]: self._state_of(one)
                for one in found["objects"]
                if one["path"] != key
            },
            frozenset(prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"]),
        )

    def _ask_for_usual_names(self, key: str) -> FolderListing:
        keys = [f"{key}/{name}" if key else name for name in _USUAL_NAMES]
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            states = list(threads.map(self.head, keys))
        objects = {name: state for name, state in zip(_USUAL_NAMES, states, strict=True) if state}
        return FolderListing(objects, is_whole=False)

    def read_into(self, key: str, start_bytes: int, memory: memoryview) -> ObjectState:
        """Fill memory with a range of an object, and say what the object was meanwhile."""
        filled = 0
        seen: ObjectState | None = None

        def read() -> ObjectState:
            nonlocal filled, seen
            options = {"range": (start_bytes + filled, start_bytes + len(memory))}
            answer = self._obstore.get(self._store, key, options=options)
            state = self._state_of(answer.meta)
            if seen not in (None, state):
                # The second half of another object is of no use.
                return state
            seen = state
            for piece in answer.stream(min_chunk_size=_PIECE_BYTES):
                stop = filled + len(piece)
                if stop > len(memory):
                    raise OSError(errno.EIO, "answered with more bytes than were asked for")
                memory[filled:stop] = memoryview(piece)
                filled = stop
            if filled < len(memory):
                raise ConnectionError(errno.ECONNRESET, "the answer ended early")
            return state

        return repeat(read, key)

    def _state_of(self, found: Mapping[str, Any]) -> ObjectState:
        modified: datetime.datetime = found["last_modified"]
        # Azure's listings have tags without the quotes that its answers have.
        tag = (found["e_tag"] or "").strip('"') or None if self._has_tags else None
        return ObjectState(found["size"], int(modified.timestamp()), tag)


def open_bucket(scheme: str, name: str, headers: Mapping[str, str] | None = None) -> BucketSource:
    """A bucket of a store, or a web server, by its name.

    Args:
        scheme: of its address.
        name: what follows the scheme.
        headers: of requests to a web server.

    Raises:
        MissingExtraError: obstore is not installed.
        OSError: settings in the environment that the store refuses.
    """
    obstore = import_obstore(EXTRAS[scheme])
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
            given = {"endpoint": endpoint} if endpoint else {}
            return BucketSource(
                stores.S3Store(name, **given, **_find_credentials(), **client(endpoint), **shared)
            )
        if scheme == "gs":
            given, endpoint = _find_emulator()
            store = stores.GCSStore(name, **given, **client(endpoint), **shared)
            return BucketSource(store, has_tags=False)
        if scheme == "az":
            endpoint = _endpoint("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
            given = {"endpoint": endpoint} if endpoint else {}
            return BucketSource(stores.AzureStore(name, **given, **client(endpoint), **shared))
        url = f"{scheme}://{name}"
        try:
            return BucketSource(stores.HTTPStore(url, **client(url), **shared), lists=False)
        except ValueError as error:
            raise OSError(errno.EINVAL, f"this is no address: {error}") from error
    except obstore.exceptions.BaseError as error:
        remedy = "; set AZURE_STORAGE_ACCOUNT_NAME" if "Account must be" in str(error) else ""
        raise OSError(errno.EINVAL, f"{_say(error)}{remedy}") from error


def _endpoint(*names: str, otherwise: str = "") -> str:
    """The first of these variables that is set, an address; empty where none is.

    `otherwise` begins one that has no scheme.
    """
    found = _environment(*names)
    if found and "://" not in found:
        found = f"{otherwise}{found}"
    # obstore panics at others.
    if found and not re.fullmatch(r"https?://[^\s/]+\S*", found):
        name = next(name for name in names if os.environ.get(name))
        raise OSError(errno.EINVAL, f"{name} is no address such as http://127.0.0.1:9000")
    return found


def _environment(*names: str) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _find_credentials() -> dict[str, Any]:
    """Those that boto3 finds, which knows profiles and single sign-on too; none for the public."""
    if _environment("AWS_SKIP_SIGNATURE").lower() in ("1", "true", "yes"):
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
    """The server that stands for Google's, as its own libraries are told of one."""
    endpoint = _endpoint("STORAGE_EMULATOR_HOST", otherwise="http://")
    if not endpoint:
        return {}, ""
    key = (
        f'{{"gcs_base_url": "{endpoint}", "disable_oauth": true, "client_email": "", '
        '"private_key": "", "private_key_id": ""}'
    )
    return {"service_account_key": key}, endpoint


def import_obstore(extra: str) -> Any:
    """The package obstore. Raises MissingExtraError."""
    try:
        import obstore
        import obstore.exceptions
    except ImportError as error:
        raise MissingExtraError(
            "an address of an object store or a web server needs the package obstore; "
            f"pip install 'reshard[{extra}]'"
        ) from error
    return obstore


def repeat(action: Callable[[], Answer], key: str) -> Answer:
    """What an action answers, tried again where the connection broke; refusals as `OSError`."""
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
                errno.EACCES, f"the store does not let this user in: {_say(error)}", key
            ) from error
        except (refusals.BaseError, ConnectionError) as error:
            if attempt == _ATTEMPTS or not _may_pass(error):
                raise OSError(errno.EIO, _say(error), key) from error
        time.sleep(_FIRST_WAIT_S * 2**attempt * random.uniform(0.25, 0.5))


def _may_pass(error: BaseException) -> bool:
    """Whether a broken answer is worth another try: refusals of the server itself are not."""
    text = str(error)
    return isinstance(error, ConnectionError) or "body" in text or "decod" in text


def _say(error: BaseException) -> str:
    """What a store says, in a line; nothing of addresses, whose queries may have secrets."""
    text = str(error)
    reason = text.partition("\n\nDebug source")[0].rpartition(" - ")[2]
    reason = reason.removeprefix("Server returned non-2xx status code: ").partition("<")[0]
    details = [
        found[1].strip()
        for found in (
            re.search(r"<Message>(.*?)</Message>", text, re.DOTALL),
            re.search(r'message: "([^"]+)"', text),
        )
        if found
    ]
    told = " ".join(" ".join([reason.strip(" :"), *details]).split())
    return re.sub(r"\?\S*", "", told)[:300] or type(error).__name__


#: The name under which an object says which conversion wrote it: letters alone, since servers turn
#: underscores of headers into hyphens, or drop them, and Azure takes no hyphens.
CONVERSION_KEY = "reshardconversion"
#: Attempts at a request before it is an error, where the store has a setting for that.
ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object that is there: its size, when it was written, by which conversion, its checksum.

    The checksum is text that the store makes of the bytes, empty where it lists none.
    """

    size_bytes: int
    modified_s: float = 0.0
    conversion_id: str | None = None
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part that is there: its size, and the store's checksum, empty where it lists none."""

    size_bytes: int
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """An object that was begun and is not complete: its key, when it was begun, and its parts."""

    key: str
    upload: str
    began_s: float
    size_bytes: int = 0


class ObjectTarget(Protocol):
    """A bucket that is written to."""

    def begin(self, key: str, conversion_id: str, parts_key: str) -> str:
        """Begin an object; what the other methods call the upload.

        Where parts are objects themselves, their keys begin with `parts_key`.
        """

    def put_part(self, key: str, upload: str, number: int, body: FileStream) -> str:
        """Put part `number`, counted from 0, and return the checksum that is listed for it.

        One that is there is replaced.
        """

    def list_parts(self, key: str, upload: str) -> dict[int, StoredPart] | None:
        """Each part that is there; None where there is no such upload."""

    def complete(self, key: str, upload: str, parts: int, conversion_id: str) -> None:
        """Make the object of parts 0 to `parts`; one that is there already is well."""

    def abort(self, key: str, upload: str) -> None:
        """Give up an object that was begun, with its parts."""

    def put(self, key: str, body: FileStream | bytes, conversion_id: str = "") -> None:
        """Put a small object."""

    def get(self, key: str) -> bytes | None:
        """The bytes of a small object; None where there is none."""

    def head(self, key: str) -> StoredObject | None:
        """An object; None where there is none."""

    def list_objects(self, prefix: str) -> Mapping[str, StoredObject]:
        """All objects whose keys begin so; which conversion wrote them is not said."""

    def list_uploads(self, prefix: str) -> list[PendingUpload]:
        """What was begun and is not complete, of keys that begin so."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are not there are well."""

    def close(self) -> None:
        """Close connections."""


class FileStream(io.RawIOBase):
    """A range of a file of this machine as a stream that can be read again from its begin."""

    # Where opening fails, the base class closes the object.
    _descriptor = -1

    def __init__(self, path: Path, start_bytes: int, stop_bytes: int) -> None:
        super().__init__()
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        self._start, self.size_bytes = start_bytes, stop_bytes - start_bytes
        self._at = 0

    def __len__(self) -> int:
        return self.size_bytes

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next byte is read."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a byte, counted from the begin, from here, or from the end."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size_bytes}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer, or as much of it as there is up to the end."""
        view = memoryview(buffer).cast("B")
        size = min(len(view), max(self.size_bytes - self._at, 0))
        count = read_at(self._descriptor, view[:size], self._start + self._at) if size else 0
        if size and not count:
            raise OSError(errno.EIO, "the file ends early; did another program cut it?")
        self._at += count
        return count

    def close(self) -> None:
        """Close the file."""
        self._descriptor = close_descriptor(self._descriptor)
        super().close()


@contextmanager
def translate_store_errors(action: str) -> Iterator[None]:
    """Turn what a store or the system refuses into a `RunError` that says what to do."""
    try:
        yield
    except OSError as error:
        advice = f"check the connection, then {CONTINUES}"
        if isinstance(error, PermissionError):
            advice = (
                f"see that these credentials may read, write, list and delete, then {CONTINUES}"
            )
        elif error.errno == errno.EINVAL:
            advice = f"set that right, then {CONTINUES}"
        raise RunError(f"cannot {action}: {error.filename}: {reason(error)}; {advice}") from error


def shorten(text: str) -> str:
    """What a store says, in a line; nothing of queries, which may have secrets.

    >>> shorten("no answer from http://host/key?X-Amz-Signature=abc\\n twice")
    'no answer from http://host/key twice'
    """
    return re.sub(r"\?\S*", "", " ".join(text.split()))[:300]
