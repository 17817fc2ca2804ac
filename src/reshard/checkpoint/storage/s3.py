"""Writing to buckets of Amazon S3, and of compatible stores, by multipart uploads.

boto3 finds credentials and settings, signs requests, and repeats requests that the server could not
answer (5xx, 429, broken connections), waiting longer each time. If the response to `complete` was
lost, the upload no longer exists when `complete` is repeated; then the object's metadata shows
whether this upload created it.
"""

from __future__ import annotations

import errno
import functools
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
    choose_wait_s,
    conversion_metadata,
    find_setting,
    is_unsigned,
    shorten,
)
from reshard.errors import MissingExtraError

# The maximum of the request that deletes objects.
_DELETED_AT_A_TIME = 1000
_CONNECTIONS = 32
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_FORBIDDEN = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403", "401"}
# Responses to `head` do not have a body, so their code is the status.
_MISSING = {"NoSuchKey", "NoSuchUpload", "404"}


class S3Target(ObjectTarget):
    """A bucket; see `ObjectTarget`."""

    scheme = "s3"

    def __init__(self, bucket: str, client: Any) -> None:
        self._name, self._client = bucket, client

    def begin(self, key: str, conversion_id: str, parts_key: str) -> str:
        """Begin a multipart upload."""
        with self._translate(key):
            answer = self._client.create_multipart_upload(
                Bucket=self._name, Key=key, Metadata={CONVERSION_KEY: conversion_id}
            )
            return str(answer["UploadId"])

    def put_part(self, key: str, upload: str, number: int, body: FileStream) -> str:
        """Put a part, and return its tag, which depends on its bytes only."""
        with self._translate(key):
            answer = self._client.upload_part(
                Bucket=self._name,
                Key=key,
                UploadId=upload,
                # S3 counts parts from 1.
                PartNumber=number + 1,
                Body=body,
                ContentLength=body.size_bytes,
            )
            return str(answer.get("ETag", ""))

    def list_parts(self, key: str, upload: str) -> dict[int, ObjectState] | None:
        """Return the parts by number, or None if the upload is unknown."""
        if not upload:
            return None
        pages = self._client.get_paginator("list_parts").paginate(
            Bucket=self._name, Key=key, UploadId=upload
        )
        # Pages are requested as they are read.
        return self._if_exists(
            key,
            lambda: {
                part["PartNumber"] - 1: ObjectState(part["Size"], tag=part["ETag"])
                for page in pages
                for part in page.get("Parts", ())
            },
        )

    def complete(self, key: str, upload: str, parts: int, conversion_id: str) -> None:
        """Create the object from its parts."""
        stored_parts = self.list_parts(key, upload)
        if stored_parts is not None:
            tags = [
                {"PartNumber": number + 1, "ETag": stored_parts[number].tag}
                for number in range(parts)
                if number in stored_parts
            ]
            if len(tags) < parts:
                raise OSError(
                    errno.EIO,
                    f"the store has {len(tags)} of its {parts} parts",
                    self._address(key),
                )
            request = functools.partial(
                self._client.complete_multipart_upload,
                Bucket=self._name,
                Key=key,
                UploadId=upload,
                MultipartUpload={"Parts": tags},
            )
            if self._if_exists(key, request) is not None:
                return
        # The upload no longer exists: it was completed, or aborted.
        self._expect_complete(key, conversion_id, "the upload is gone: it was aborted")

    def abort(self, key: str, upload: str) -> None:
        """Abort a multipart upload."""
        abort = self._client.abort_multipart_upload
        self._if_exists(key, lambda: abort(Bucket=self._name, Key=key, UploadId=upload))

    def put(self, key: str, body: FileStream | bytes, conversion_id: str = "") -> None:
        """Put a small object."""
        with self._translate(key):
            self._client.put_object(
                Bucket=self._name,
                Key=key,
                Body=body,
                ContentLength=len(body),
                Metadata=conversion_metadata(conversion_id),
            )

    def get(self, key: str) -> bytes | None:
        """Return the bytes of a small object, or None if it does not exist."""

        def read() -> bytes:
            with self._client.get_object(Bucket=self._name, Key=key)["Body"] as body:
                return bytes(body.read())

        return self._if_exists(key, read)

    def head(self, key: str) -> ObjectState | None:
        """Return the state of an object, or None if it does not exist."""
        request = functools.partial(self._client.head_object, Bucket=self._name, Key=key)
        answer = self._if_exists(key, request)
        if answer is None:
            return None
        return ObjectState(
            answer["ContentLength"],
            answer["LastModified"].timestamp(),
            conversion_id=answer.get("Metadata", {}).get(CONVERSION_KEY),
        )

    def list_objects(self, prefix: str) -> Mapping[str, ObjectState]:
        """Return all objects whose keys begin with `prefix`."""
        with self._translate(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._name, Prefix=prefix
            )
            return {
                entry["Key"]: ObjectState(entry["Size"], entry["LastModified"].timestamp())
                for page in pages
                for entry in page.get("Contents", ())
            }

    def list_uploads(self, prefix: str) -> list[PendingUpload]:
        """Return the incomplete uploads."""
        with self._translate(prefix):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._name, Prefix=prefix
            )
            entries = [entry for page in pages for entry in page.get("Uploads", ())]
        uploads = []
        for entry in entries:
            key, upload = entry["Key"], entry["UploadId"]
            parts = self.list_parts(key, upload) or {}
            began_s = entry["Initiated"].timestamp()
            size_bytes = sum(part.size_bytes for part in parts.values())
            uploads.append(PendingUpload(key, upload, began_s, size_bytes))
        return uploads

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects."""
        listed = list(keys)
        for at in range(0, len(listed), _DELETED_AT_A_TIME):
            batch = listed[at : at + _DELETED_AT_A_TIME]
            with self._translate(batch[0]):
                answer = self._client.delete_objects(
                    Bucket=self._name,
                    # The quiet response lists errors only.
                    Delete={"Objects": [{"Key": key} for key in batch], "Quiet": True},
                )
            for refused in answer.get("Errors", ()):
                raise PermissionError(
                    errno.EACCES,
                    f"not deleted: {shorten(refused.get('Message', ''))}",
                    self._address(refused["Key"]),
                )

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _list_errors(self) -> tuple[type[Exception], ...]:
        from botocore.exceptions import BotoCoreError, ClientError

        return BotoCoreError, ClientError

    def _explain(self, error: Any) -> tuple[int, str]:
        from botocore.exceptions import ClientError

        if isinstance(error, ClientError):
            text = f"{_code(error)} {error.response.get('Error', {}).get('Message', '')}"
            if _code(error) in _FORBIDDEN:
                return errno.EACCES, f"the store denies access to this user: {text}"
            if _code(error) in _MISSING:
                return errno.ENOENT, text
            return errno.EINVAL if _code(error) == "NoSuchBucket" else errno.EIO, text
        kind = type(error).__name__
        is_setting = "redential" in kind or "Region" in kind
        return errno.EINVAL if is_setting else errno.EIO, str(error)


def open_s3(bucket: str) -> S3Target:
    """Open a bucket with the settings and credentials of boto3.

    Raises:
        MissingExtraError: boto3 is not installed.
        OSError: invalid settings.
    """
    try:
        import boto3
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise MissingExtraError(
            "writing to S3 needs the package boto3; pip install 'reshard[s3]'"
        ) from error
    config = Config(
        # The default mode, `legacy`, repeats fewer kinds of errors.
        retries={"mode": "standard", "max_attempts": ATTEMPTS},
        max_pool_connections=_CONNECTIONS,
        **({"signature_version": UNSIGNED} if is_unsigned() else {}),
    )
    try:
        core_session = botocore.session.get_session()
        loader = _share_loader(core_session.get_config_variable("data_path"))
        core_session.register_component("data_loader", loader)
        session = boto3.Session(botocore_session=core_session)
        # obstore and boto3 read these two settings from different variables.
        region = session.region_name or os.environ.get("AWS_REGION") or "us-east-1"
        client = session.client(
            "s3",
            config=config,
            region_name=region,
            # boto3 finds an endpoint in the other two variables itself.
            endpoint_url=None if find_setting(*_ENDPOINTS) else os.environ.get("AWS_ENDPOINT"),
        )
    except (BotoCoreError, ValueError) as error:
        raise OSError(errno.EINVAL, shorten(str(error)), f"s3://{bucket}") from error
    client.meta.events.register("needs-retry.s3", _delay_throttled)
    return S3Target(bucket, client)


def _delay_throttled(response: Any, attempts: int, **_: object) -> float | None:
    """Return the seconds after which to repeat a request that got status 429, or None.

    Until version 1.34 at least, the client's standard mode repeats it only if its body has a code
    of AWS, which compatible stores do not send.
    """
    if response is None or response[0].status_code != 429 or attempts >= ATTEMPTS:
        return None
    return choose_wait_s(attempts)


@functools.cache
def _share_loader(data_path: str | None) -> Any:
    """Return the loader of the service models below `data_path`."""
    from botocore.loaders import create_loader

    # By default each session parses the JSON of S3's model, which takes six times as long as the
    # rest of its creation.
    return create_loader(data_path)


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
