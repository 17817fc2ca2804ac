"""The stores that are written to, by the scheme of an address."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from reshard.checkpoint.files.places.place_path import PlacePath
from reshard.checkpoint.files.places.stores.azure_target import open_az
from reshard.checkpoint.files.places.stores.gcs_target import open_gs
from reshard.checkpoint.files.places.stores.object_target import ObjectTarget
from reshard.checkpoint.files.places.stores.s3_target import open_s3
from reshard.errors import UsageError

_STORES: Mapping[str, Callable[[str], ObjectTarget]] = {
    "s3": open_s3,
    "az": open_az,
    "gs": open_gs,
}


def expect_writable(target: PlacePath) -> None:
    """Raise UsageError for an address that cannot be a target.

    >>> expect_writable(PlacePath("s3://bucket/model"))
    """
    _expect_store(target)
    if not target.key:
        raise UsageError(
            f"the target {target} is a whole bucket; name a folder in it: {target}/model"
        )


def _expect_store(target: PlacePath) -> None:
    scheme = target.root_parts[0]
    if scheme not in _STORES:
        written = ", ".join(f"{one}://" for one in _STORES)
        raise UsageError(
            f"the target {target} is an address of {scheme}://, which is only read; write to "
            f"{written}, or to a folder of this machine"
        )


def open_store(target: PlacePath) -> ObjectTarget:
    """The store of an address.

    Raises:
        UsageError: an address where nothing is written.
        MissingExtraError: the package that writes there is not installed.
        OSError: settings in the environment that it refuses.
    """
    _expect_store(target)
    scheme, name, *_ = target.root_parts
    return _STORES[scheme](name)
