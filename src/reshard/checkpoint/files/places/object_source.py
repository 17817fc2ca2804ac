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
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import os
import random
import re
import stat
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from reshard.errors import MissingExtraError

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

    def look_at(self, key: str) -> ObjectState | None:
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

    def look_at(self, key: str) -> ObjectState | None:
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
            states = list(threads.map(self.look_at, keys))
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
