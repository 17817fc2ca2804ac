"""The stores that are written to, by the scheme of an address."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from reshard.checkpoint.files.places.object_target import ObjectTarget
from reshard.checkpoint.files.places.place_path import PlacePath
from reshard.checkpoint.files.places.s3_target import open_s3
from reshard.errors import UsageError

_STORES: Mapping[str, Callable[[str], ObjectTarget]] = {"s3": open_s3}


def expect_writable(target: PlacePath) -> None:
    """Raise UsageError for an address where nothing is written.

    >>> expect_writable(PlacePath("s3://bucket/model"))
    """
    scheme = target.root_parts[0]
    if scheme not in _STORES:
        written = " and ".join(f"{one}://" for one in _STORES)
        raise UsageError(
            f"the target {target} is an address of {scheme}://, which is only read; write to "
            f"{written}, or to a folder of this machine"
        )
    if not target.key:
        raise UsageError(
            f"the target {target} is a whole bucket; name a folder in it: {target}/model"
        )


def open_store(target: PlacePath) -> ObjectTarget:
    """The store of an address.

    Raises:
        UsageError: an address where nothing is written.
        MissingExtraError: the package that writes there is not installed.
        OSError: settings in the environment that it refuses.
    """
    expect_writable(target)
    scheme, name, *_ = target.root_parts
    return _STORES[scheme](name)
