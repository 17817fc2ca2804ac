"""Writing to buckets of Google Cloud Storage, by composing objects from their parts.

A part is an object of its own, stored with the marker, so parts are put in any order and can be
listed; `complete` composes them, up to 32 at a time, and deletes them. Resumable uploads would
require the parts in order. google-auth finds the credentials (`GOOGLE_APPLICATION_CREDENTIALS`,
gcloud's); `STORAGE_EMULATOR_HOST` specifies another server.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from reshard.checkpoint.storage.object_stores import (
    CONVERSION_KEY,
    FileStream,
    ObjectState,
    ObjectTarget,
    PendingUpload,
    conversion_metadata,
    shorten,
)
from reshard.errors import MissingExtraError

# The store's limit of sources for a request to compose.
_COMPOSED_AT_A_TIME = 32
_DELETIONS = 16
_GIVE_UP_S = 120.0
_PARTS = "/parts/"


class GcsTarget(ObjectTarget):
    """A bucket; see `ObjectTarget`. An upload's id is the prefix of its parts' keys."""

    scheme = "gs"

    def __init__(self, name: str, client: Any) -> None:
        from google.cloud.storage.retry import DEFAULT_RETRY

        self._name, self._client = name, client
        self._bucket = client.bucket(name)
        # Every request here is idempotent, so it can be repeated.
        self._retry = DEFAULT_RETRY.with_timeout(_GIVE_UP_S)

    def begin(self, key: str, conversion_id: str, parts_key: str) -> str:
        """Return the id without a request: parts are objects."""
        return parts_key

    def put_part(self, key: str, upload: str, number: int, body: FileStream) -> str:
        """Put the object of a part, and return its CRC-32C."""
        return self._put(f"{upload}/{number:06}", body, {})

    def _put(self, key: str, body: FileStream | bytes, metadata: Mapping[str, str]) -> str:
        """Put an object, and return its CRC-32C."""
        with self._translate(key):
            blob = self._bucket.blob(key)
            blob.metadata = dict(metadata)
            stream = io.BytesIO(body) if isinstance(body, bytes) else body
            blob.upload_from_file(stream, size=len(body), rewind=True, retry=self._retry)
            return blob.crc32c or ""

    def list_parts(self, key: str, upload: str) -> dict[int, ObjectState] | None:
        """Return the parts by number, or None if there are none."""
        if not upload:
            return None
        named = {
            key.rpartition("/")[2]: part for key, part in self.list_objects(f"{upload}/").items()
        }
        return {int(name): part for name, part in named.items() if name.isdecimal()} or None

    def complete(self, key: str, upload: str, parts: int, conversion_id: str) -> None:
        """Create the object by composing its parts, and delete them."""
        stored_parts = self.list_parts(key, upload) or {}
        if any(number not in stored_parts for number in range(parts)):
            # An earlier call may have created the object, and deleted parts.
            problem = f"the store has {len(stored_parts)} of its {parts} parts"
            self._expect_complete(key, conversion_id, problem)
        else:
            names = [f"{upload}/{number:06}" for number in range(parts)]
            # A call composes a limited number of objects, so groups of them are composed first.
            for level in itertools.count():
                if len(names) <= _COMPOSED_AT_A_TIME:
                    break
                groups = [
                    names[at : at + _COMPOSED_AT_A_TIME]
                    for at in range(0, len(names), _COMPOSED_AT_A_TIME)
                ]
                names = [f"{upload}/level{level}-{at:06}" for at in range(len(groups))]
                with ThreadPoolExecutor(_DELETIONS) as threads:
                    list(threads.map(self._compose, groups, names))
            self._compose(names, key, conversion_metadata(conversion_id))
        self.abort(key, upload)

    def _compose(
        self, names: list[str], key: str, metadata: Mapping[str, str] | None = None
    ) -> None:
        with self._translate(key):
            blob = self._bucket.blob(key)
            blob.metadata = dict(metadata or {})
            blob.content_type = "application/octet-stream"
            blob.compose([self._bucket.blob(name) for name in names], retry=self._retry)

    def abort(self, key: str, upload: str) -> None:
        """Delete the parts."""
        if upload:
            self.delete(self.list_objects(f"{upload}/"))

    def put(self, key: str, body: FileStream | bytes, conversion_id: str = "") -> None:
        """Put a small object."""
        self._put(key, body, conversion_metadata(conversion_id))

    def get(self, key: str) -> bytes | None:
        """Return the bytes of a small object, or None if it does not exist."""
        blob = self._bucket.blob(key)
        return self._if_exists(key, lambda: bytes(blob.download_as_bytes(retry=self._retry)))

    def head(self, key: str) -> ObjectState | None:
        """Return the state of an object, or None if it does not exist."""
        with self._translate(key):
            blob = self._bucket.get_blob(key, retry=self._retry)
        return None if blob is None else self._describe(blob)

    def _describe(self, blob: Any) -> ObjectState:
        metadata = blob.metadata or {}
        modified_s, conversion_id = blob.updated.timestamp(), metadata.get(CONVERSION_KEY)
        return ObjectState(blob.size, modified_s, blob.crc32c or "", conversion_id)

    def list_objects(self, prefix: str) -> Mapping[str, ObjectState]:
        """Return all objects whose keys begin with `prefix`."""
        with self._translate(prefix):
            blobs = self._client.list_blobs(self._name, prefix=prefix, retry=self._retry)
            return {blob.name: self._describe(blob) for blob in blobs}

    def list_uploads(self, prefix: str) -> list[PendingUpload]:
        """Return the files with parts."""
        uploads: dict[str, tuple[float, int]] = {}
        for key, part in self.list_objects(prefix).items():
            # target/.reshard/conversion/parts/name/000000
            folder, infix, rest = key.partition(_PARTS)
            if infix and "/.reshard/" in f"/{folder}":
                upload = f"{folder}{_PARTS}{rest.rpartition('/')[0]}"
                began_s, size = uploads.get(upload, (part.modified_s, 0))
                uploads[upload] = min(began_s, part.modified_s), size + part.size_bytes
        pending = []
        for upload, (began_s, size) in uploads.items():
            marker, _, name = upload.partition(_PARTS)
            target = marker.rpartition("/.reshard/")[0]
            pending.append(PendingUpload(f"{target}/{name}", upload, began_s, size))
        return pending

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects."""
        with ThreadPoolExecutor(_DELETIONS) as threads:
            list(threads.map(self._delete, list(keys)))

    def _delete(self, key: str) -> None:
        blob = self._bucket.blob(key)
        self._if_exists(key, lambda: blob.delete(retry=self._retry))

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _list_errors(self) -> tuple[type[Exception], ...]:
        import requests
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError

        return GoogleAPIError, GoogleAuthError, requests.RequestException

    def _explain(self, error: Any) -> tuple[int, str]:
        from google.api_core.exceptions import Forbidden, NotFound, Unauthorized
        from google.auth.exceptions import GoogleAuthError

        if isinstance(error, Forbidden | Unauthorized | NotFound):
            number = errno.ENOENT if isinstance(error, NotFound) else errno.EACCES
            return number, str(error.message)
        return errno.EINVAL if isinstance(error, GoogleAuthError) else errno.EIO, str(error)


def open_gs(name: str) -> GcsTarget:
    """Open a bucket with the credentials of google-auth.

    Raises:
        MissingExtraError: google-cloud-storage is not installed.
        OSError: missing credentials.
    """
    try:
        from google.auth.credentials import AnonymousCredentials
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import storage
    except ImportError as error:
        raise MissingExtraError(
            "writing to Google Cloud Storage needs the package google-cloud-storage; pip install "
            "'reshard[gcs]'"
        ) from error
    try:
        if os.environ.get("STORAGE_EMULATOR_HOST"):
            credentials = AnonymousCredentials()
            return GcsTarget(name, storage.Client(project="none", credentials=credentials))
        return GcsTarget(name, storage.Client())
    except (GoogleAuthError, OSError) as error:
        raise OSError(errno.EINVAL, shorten(str(error)), f"gs://{name}") from error
