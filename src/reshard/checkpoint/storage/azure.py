"""Writing to containers of Azure Blob Storage, block by block.

A blob that was begun has uncommitted blocks, which can be listed; `complete` commits their list.
The names of a conversion's blocks begin with its id, so blocks of other conversions are not used.
Azure does not have a call that deletes blocks; uncommitted blocks expire after a week.

Settings are the same as for reading: `AZURE_STORAGE_CONNECTION_STRING`, or
`AZURE_STORAGE_ACCOUNT_NAME` with `AZURE_STORAGE_ACCOUNT_KEY`, `AZURE_STORAGE_SAS_TOKEN` or the
credential of azure-identity; `AZURE_STORAGE_ENDPOINT`.
"""

from __future__ import annotations

import base64
import errno
import os
from collections.abc import Iterable, Mapping
from typing import Any

from reshard.checkpoint.storage.object_stores import (
    ATTEMPTS,
    CONVERSION_KEY,
    FileStream,
    ObjectState,
    ObjectTarget,
    PendingUpload,
    conversion_metadata,
    find_setting,
    shorten,
)
from reshard.errors import MissingExtraError

# Azure limits names of blocks to 64 bytes, and requires equal lengths for the blocks of a blob.
_PREFIX = 16
_DIGITS = 6


class AzureTarget(ObjectTarget):
    """A container; see `ObjectTarget`. An upload's id is the prefix of its blocks' names."""

    scheme = "az"

    def __init__(self, name: str, container: Any) -> None:
        self._name, self._container = name, container

    def begin(self, key: str, conversion_id: str, parts_key: str) -> str:
        """Return the id without a request: blocks may be put under any name."""
        return conversion_id[:_PREFIX]

    def put_part(self, key: str, upload: str, number: int, body: FileStream) -> str:
        """Put a block; Azure does not list checksums of uncommitted blocks."""
        with self._translate(key), self._blob(key) as blob:
            blob.stage_block(_block_id(upload, number), body, length=body.size_bytes)
            return ""

    def list_parts(self, key: str, upload: str) -> dict[int, ObjectState] | None:
        """Return the uncommitted blocks by number, or None if there are none."""
        with self._blob(key) as blob:
            listed = self._if_exists(key, lambda: blob.get_block_list("uncommitted"))
        blocks = () if listed is None else listed[1]
        named = ((_find_number(block.id, upload), block.size) for block in blocks)
        return {n: ObjectState(size) for n, size in named if n is not None} or None

    def complete(self, key: str, upload: str, parts: int, conversion_id: str) -> None:
        """Commit the blocks."""
        from azure.core.exceptions import HttpResponseError
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(_block_id(upload, number)) for number in range(parts)]
        with self._translate(key), self._blob(key) as blob:
            try:
                blob.commit_block_list(blocks, metadata=conversion_metadata(conversion_id))
            except HttpResponseError as error:
                # The blocks are no longer uncommitted: an earlier call may have committed them.
                if _code(error) != "InvalidBlockList":
                    raise
            else:
                return
        self._expect_complete(key, conversion_id, "blocks are missing in the store")

    def abort(self, key: str, upload: str) -> None:
        """Discard uncommitted blocks, unless a blob of that name exists."""
        if self.head(key) is None and self.list_parts(key, upload) is not None:
            with self._translate(key), self._blob(key) as blob:
                # Committing an empty list discards the blocks, and creates an empty blob.
                blob.commit_block_list([])
                blob.delete_blob()

    def put(self, key: str, body: FileStream | bytes, conversion_id: str = "") -> None:
        """Put a small blob."""
        metadata = conversion_metadata(conversion_id)
        with self._translate(key), self._blob(key) as blob:
            blob.upload_blob(body, length=len(body), overwrite=True, metadata=metadata)

    def get(self, key: str) -> bytes | None:
        """Return the bytes of a small blob, or None if it does not exist."""
        with self._blob(key) as blob:
            return self._if_exists(key, lambda: bytes(blob.download_blob().readall()))

    def head(self, key: str) -> ObjectState | None:
        """Return the state of a blob, or None if it does not exist."""
        with self._blob(key) as blob:
            properties = self._if_exists(key, blob.get_blob_properties)
        if properties is None:
            return None
        modified_s = properties.last_modified.timestamp()
        metadata = properties.metadata or {}
        conversion_id = metadata.get(CONVERSION_KEY)
        return ObjectState(properties.size, modified_s, conversion_id=conversion_id)

    def list_objects(self, prefix: str) -> Mapping[str, ObjectState]:
        """Return all blobs whose names begin with `prefix`."""
        with self._translate(prefix):
            return {
                blob.name: ObjectState(blob.size, blob.last_modified.timestamp())
                for blob in self._container.list_blobs(name_starts_with=prefix)
            }

    def list_uploads(self, prefix: str) -> list[PendingUpload]:
        """Return the incomplete uploads. Names that already have a blob cannot be listed."""
        with self._translate(prefix):
            blobs = {blob.name for blob in self._container.list_blobs(name_starts_with=prefix)}
            entries = self._container.list_blobs(
                name_starts_with=prefix, include=["uncommittedblobs"]
            )
            pending = [entry.name for entry in entries if entry.name not in blobs]
        uploads = []
        for key in pending:
            with self._translate(key), self._blob(key) as blob:
                _, blocks = blob.get_block_list("uncommitted")
            for upload in sorted({_find_upload(block.id) for block in blocks}):
                sizes = [block.size for block in blocks if _find_upload(block.id) == upload]
                # Azure does not list when blocks were put.
                uploads.append(PendingUpload(key, upload, 0.0, sum(sizes)))
        return uploads

    def delete(self, keys: Iterable[str]) -> None:
        """Delete blobs."""
        for key in keys:
            with self._blob(key) as blob:
                self._if_exists(key, blob.delete_blob)

    def close(self) -> None:
        """Close connections."""
        self._container.close()

    def _blob(self, key: str) -> Any:
        return self._container.get_blob_client(key)

    def _list_errors(self) -> tuple[type[Exception], ...]:
        from azure.core.exceptions import AzureError

        return (AzureError,)

    def _explain(self, error: Any) -> tuple[int, str]:
        from azure.core.exceptions import ClientAuthenticationError, ResourceNotFoundError

        if isinstance(error, ClientAuthenticationError):
            return errno.EACCES, f"the store denies access to this user: {_code(error)}"
        # Before Python 3.12, braces of an f-string cannot contain a backslash.
        text = f"{_code(error)} {str(error).partition(chr(10))[0]}".strip()
        if getattr(error, "status_code", None) == 403:
            return errno.EACCES, text
        if _code(error) == "ContainerNotFound":
            return errno.EINVAL, text
        return errno.ENOENT if isinstance(error, ResourceNotFoundError) else errno.EIO, text


def open_az(name: str) -> AzureTarget:
    """Open a container with the settings in the environment.

    Raises:
        MissingExtraError: azure-storage-blob is not installed.
        OSError: missing or invalid settings.
    """
    try:
        from azure.storage.blob import ContainerClient
    except ImportError as error:
        raise MissingExtraError(
            "writing to Azure needs the package azure-storage-blob; pip install 'reshard[azure]'"
        ) from error
    retries = {"retry_total": ATTEMPTS, "retry_connect": ATTEMPTS, "retry_read": ATTEMPTS}
    connection = os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    endpoint = find_setting("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    try:
        if connection:
            client = ContainerClient.from_connection_string(connection, name, **retries)
            return AzureTarget(name, client)
        if not (account or endpoint):
            raise ValueError("set AZURE_STORAGE_ACCOUNT_NAME, or AZURE_STORAGE_CONNECTION_STRING")
        url = endpoint or f"https://{account}.blob.core.windows.net"
        client = ContainerClient(url, name, credential=_find_credential(account), **retries)
    except ValueError as error:
        # The original message contains the connection string, and so its key.
        message = "the connection string is invalid" if connection else shorten(str(error))
        raise OSError(errno.EINVAL, message, f"az://{name}") from error
    return AzureTarget(name, client)


def _find_credential(account: str) -> Any:
    key = find_setting("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY")
    if key:
        return {"account_name": account, "account_key": key}
    token = find_setting("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY")
    if token:
        return token
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError:
        return None
    return DefaultAzureCredential()


def _block_id(upload: str, number: int) -> str:
    """Return the name of a block; names of a blob's blocks must have equal lengths."""
    return base64.b64encode(f"{upload}{number:0{_DIGITS}}".encode()).decode()


def _decode(block_id: str) -> str:
    # Some versions of the package return names as they were given, others return them encoded.
    try:
        return base64.b64decode(block_id, validate=True).decode()
    except ValueError:
        return block_id


def _find_upload(block_id: str) -> str:
    return _decode(block_id)[:-_DIGITS]


def _find_number(block_id: str, upload: str) -> int | None:
    """Return the number of a block of an upload, or None for blocks of other uploads.

    >>> _find_number(_block_id("c0ffee", 12), "c0ffee"), _find_number(_block_id("tea", 1), "c0ffee")
    (12, None)
    """
    number = _decode(block_id).removeprefix(upload)
    is_of_it = _find_upload(block_id) == upload and number.isdecimal()
    return int(number) if is_of_it else None


def _code(error: Any) -> str:
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or type(error).__name__)
