"""Uploads that a store still holds of conversions that did not end.

Only what a marker of a conversion names is found, and removed: its uploads with their parts, and
the marker. An upload of another program that is under way is left alone, and so is a checkpoint
that is half in its place, whose files would look like a whole one without the marker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reshard.checkpoint.files.places.place_path import PlacePath
from reshard.checkpoint.files.places.stores.object_target import (
    ObjectTarget,
    PendingUpload,
    StoredObject,
    store_refusals,
)
from reshard.checkpoint.files.places.stores.target_stores import open_store
from reshard.checkpoint.files.places.upload_marker import (
    COMMIT_NAME,
    MARKER_FOLDER,
    UPLOAD_NAME,
    UploadMarker,
    marker_key,
)


@dataclass(frozen=True, slots=True)
class AbandonedUpload:
    """What a store holds of one conversion.

    `began_s` is when it began, in seconds since 1970; `size_bytes` what its parts have.
    `is_half_visible`: some of its files are in their place.
    """

    target: PlacePath
    conversion_id: str
    began_s: float
    uploads: tuple[PendingUpload, ...]
    marker_keys: tuple[str, ...]
    is_half_visible: bool

    @property
    def size_bytes(self) -> int:
        """What its parts have."""
        return sum(one.size_bytes for one in self.uploads)


def find_abandoned(folder: PlacePath) -> list[AbandonedUpload]:
    """The conversions that did not end whose target is a folder, or lies in it.

    One that runs is among them: stores do not know who still works.

    Raises:
        UsageError: an address where nothing is written.
        MissingExtraError: the package that writes there is not installed.
        RunError: the store does not answer.
    """
    with store_refusals(f"look for uploads in {folder}"):
        store = open_store(folder)
        try:
            prefix = f"{folder.key}/" if folder.key else ""
            objects = store.list_objects(prefix)
            markers = _group_markers(objects)
            pending = store.list_uploads(prefix) if markers else []
            root = PlacePath(f"{folder.root_parts[0]}://{folder.root_parts[1]}")
            return [
                _describe(store, root / target, conversion_id, keys, objects, pending)
                for (target, conversion_id), keys in sorted(markers.items())
            ]
        finally:
            store.close()


def remove_abandoned(found: Iterable[AbandonedUpload]) -> None:
    """Abort the uploads of conversions and delete their markers; half visible ones are left.

    Raises:
        RunError: the store does not answer.
    """
    for one in found:
        if one.is_half_visible:
            continue
        with store_refusals(f"remove the upload to {one.target}"):
            store = open_store(one.target)
            try:
                for upload in one.uploads:
                    store.abort(upload.key, upload.upload)
                # The marker last: what it names can be found as long as it is there.
                last = marker_key(one.target.key, one.conversion_id, UPLOAD_NAME)
                store.delete([key for key in one.marker_keys if key != last])
                store.delete([last])
            finally:
                store.close()


def _group_markers(keys: Iterable[str]) -> dict[tuple[str, str], list[str]]:
    """The keys of each marker by the key of its target and the conversion.

    >>> _group_markers(["a/b/.reshard/c0/upload.json", "a/b/x", "a/.reshard"])
    {('a/b', 'c0'): ['a/b/.reshard/c0/upload.json']}
    """
    found: dict[tuple[str, str], list[str]] = {}
    for key in keys:
        target, within, rest = key.partition(f"/{MARKER_FOLDER}/")
        conversion_id, slash, _ = rest.partition("/")
        if within and slash:
            found.setdefault((target, conversion_id), []).append(key)
    return found


def _describe(
    store: ObjectTarget,
    target: PlacePath,
    conversion_id: str,
    keys: list[str],
    objects: Mapping[str, StoredObject],
    pending: Iterable[PendingUpload],
) -> AbandonedUpload:
    at = marker_key(target.key, conversion_id, UPLOAD_NAME)
    content = store.get(at)
    marker = UploadMarker() if content is None else UploadMarker.from_bytes(content, str(target))
    names = {f"{target.key}/{name}": name for name in marker.part_bytes}
    # One that was begun when the marker was written last has no upload there, and no parts.
    uploads = tuple(
        one
        for one in pending
        if one.key in names
        and (marker.uploads.get(names[one.key], one.upload) == one.upload)
        and (names[one.key] in marker.uploads or not one.size_bytes)
    )
    began_s = min(objects[key].modified_s for key in keys)
    is_half = marker_key(target.key, conversion_id, COMMIT_NAME) in keys
    return AbandonedUpload(target, conversion_id, began_s, uploads, tuple(keys), is_half)
