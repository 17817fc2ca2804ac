"""Buckets of Amazon S3, and of what speaks as it does, written by multipart uploads.

boto3 finds credentials and settings, signs, and repeats what a server could not answer (5xx, 429,
connections that break), waiting longer each time. Where the answer to `complete` was lost, the
upload is gone when it is asked for again; then the object itself says whether it is this one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from reshard.checkpoint.storage.object_stores import (
    ATTEMPTS,
    CONVERSION_KEY,
    FileStream,
    PendingUpload,
    StoredObject,
    StoredPart,
    shorten,
)
from reshard.errors import MissingExtraError

_DELETED_AT_A_TIME = 1000
_CONNECTIONS = 32
_FORBIDDEN = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403", "401"}


class S3Target:
    """A bucket; see `ObjectTarget`."""

    def __init__(self, bucket: str, client: Any) -> None:
        self._bucket, self._client = bucket, client

    def begin(self, key: str, conversion_id: str, parts_key: str) -> str:
        """Begin a multipart upload."""
        with self._explain(key):
            answer = self._client.create_multipart_upload(
                Bucket=self._bucket, Key=key, Metadata={CONVERSION_KEY: conversion_id}
            )
            return str(answer["UploadId"])

    def put_part(self, key: str, upload: str, number: int, body: FileStream) -> str:
        """Put a part, and return its tag, which follows from its bytes."""
        with self._explain(key):
            answer = self._client.upload_part(
                Bucket=self._bucket,
                Key=key,
                UploadId=upload,
                PartNumber=number + 1,
                Body=body,
                ContentLength=body.size_bytes,
            )
            return str(answer.get("ETag", ""))

    def list_parts(self, key: str, upload: str) -> dict[int, StoredPart] | None:
        """Each part; None where there is no such upload."""
        if not upload:
            return None
        with self._explain(key):
            pages = self._client.get_paginator("list_parts").paginate(
                Bucket=self._bucket, Key=key, UploadId=upload
            )
            try:
                return {
                    one["PartNumber"] - 1: StoredPart(one["Size"], one["ETag"])
                    for page in pages
                    for one in page.get("Parts", ())
                }
            except self._client.exceptions.ClientError as error:
                if _code(error) in ("NoSuchUpload", "404"):
                    return None
                raise

    def complete(self, key: str, upload: str, parts: int, conversion_id: str) -> None:
        """Make the object of its parts."""
        there = self.list_parts(key, upload)
        if there is not None:
            tags = [
                {"PartNumber": number + 1, "ETag": there[number].checksum}
                for number in range(parts)
                if number in there
            ]
            if len(tags) < parts:
                raise OSError(
                    errno.EIO,
                    f"the store has {len(tags)} of its {parts} parts",
                    self._address(key),
                )
            with self._explain(key):
                try:
                    self._client.complete_multipart_upload(
                        Bucket=self._bucket,
                        Key=key,
                        UploadId=upload,
                        MultipartUpload={"Parts": tags},
                    )
                except self._client.exceptions.ClientError as error:
                    if _code(error) not in ("NoSuchUpload", "404"):
                        raise
                else:
                    return
        found = self.head(key)
        if found is None or found.conversion_id != conversion_id:
            raise OSError(errno.EIO, "the upload is gone: it was aborted", self._address(key))

    def abort(self, key: str, upload: str) -> None:
        """Give up a multipart upload."""
        with self._explain(key):
            try:
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)
            except self._client.exceptions.ClientError as error:
                if _code(error) not in ("NoSuchUpload", "404"):
                    raise

    def put(self, key: str, body: FileStream | bytes, conversion_id: str = "") -> None:
        """Put a small object."""
        with self._explain(key):
            metadata = {CONVERSION_KEY: conversion_id} if conversion_id else {}
            self._client.put_object(
                Bucket=self._bucket,
                Key=key,
                Body=body,
                ContentLength=len(body),
                Metadata=metadata,
            )

    def get(self, key: str) -> bytes | None:
        """The bytes of a small object; None where there is none."""
        with self._explain(key):
            try:
                with self._client.get_object(Bucket=self._bucket, Key=key)["Body"] as body:
                    return bytes(body.read())
            except self._client.exceptions.ClientError as error:
                if _code(error) in ("NoSuchKey", "404"):
                    return None
                raise

    def head(self, key: str) -> StoredObject | None:
        """An object; None where there is none."""
        with self._explain(key):
            try:
                found = self._client.head_object(Bucket=self._bucket, Key=key)
            except self._client.exceptions.ClientError as error:
                if _code(error) in ("NoSuchKey", "404"):
                    return None
                raise
        return StoredObject(
            found["ContentLength"],
            found["LastModified"].timestamp(),
            found.get("Metadata", {}).get(CONVERSION_KEY),
        )

    def list_objects(self, prefix: str) -> Mapping[str, StoredObject]:
        """All objects whose keys begin so."""
        with self._explain(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=prefix
            )
            return {
                one["Key"]: StoredObject(one["Size"], one["LastModified"].timestamp())
                for page in pages
                for one in page.get("Contents", ())
            }

    def list_uploads(self, prefix: str) -> list[PendingUpload]:
        """What was begun and is not complete."""
        with self._explain(prefix):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=prefix
            )
            found = [one for page in pages for one in page.get("Uploads", ())]
        uploads = []
        for one in found:
            parts = self.list_parts(one["Key"], one["UploadId"]) or {}
            began_s = one["Initiated"].timestamp()
            size_bytes = sum(part.size_bytes for part in parts.values())
            uploads.append(PendingUpload(one["Key"], one["UploadId"], began_s, size_bytes))
        return uploads

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects."""
        listed = list(keys)
        for at in range(0, len(listed), _DELETED_AT_A_TIME):
            some = listed[at : at + _DELETED_AT_A_TIME]
            with self._explain(some[0]):
                answer = self._client.delete_objects(
                    Bucket=self._bucket,
                    Delete={"Objects": [{"Key": key} for key in some], "Quiet": True},
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

    def _address(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"

    @contextmanager
    def _explain(self, key: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            told = error.response.get("Error", {})
            text = shorten(f"{_code(error)} {told.get('Message', '')}")
            if _code(error) in _FORBIDDEN:
                raise PermissionError(
                    errno.EACCES, f"the store does not let this user: {text}", self._address(key)
                ) from error
            number = errno.EINVAL if _code(error) == "NoSuchBucket" else errno.EIO
            raise OSError(number, text, self._address(key)) from error
        except BotoCoreError as error:
            is_setting = "redential" in type(error).__name__ or "Region" in type(error).__name__
            number = errno.EINVAL if is_setting else errno.EIO
            raise OSError(number, shorten(str(error)), self._address(key)) from error


def open_s3(bucket: str) -> S3Target:
    """A bucket, with the settings and credentials that boto3 finds.

    Raises:
        MissingExtraError: boto3 is not installed.
        OSError: settings that it refuses.
    """
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise MissingExtraError(
            "to write to S3 needs the package boto3; pip install 'reshard[s3]'"
        ) from error
    unsigned = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes")
    config = Config(
        retries={"mode": "standard", "max_attempts": ATTEMPTS},
        max_pool_connections=_CONNECTIONS,
        **({"signature_version": UNSIGNED} if unsigned else {}),
    )
    try:
        session = boto3.Session()
        # boto3 has other names for these two than the library that reads.
        region = session.region_name or os.environ.get("AWS_REGION") or "us-east-1"
        client = session.client(
            "s3",
            config=config,
            region_name=region,
            endpoint_url=None if _has_endpoint() else os.environ.get("AWS_ENDPOINT"),
        )
    except (BotoCoreError, ValueError) as error:
        raise OSError(errno.EINVAL, shorten(str(error)), f"s3://{bucket}") from error
    return S3Target(bucket, client)


def _has_endpoint() -> bool:
    """Whether boto3 finds an endpoint itself."""
    return any(os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
