"""Models of the Hugging Face Hub, read by ranges without downloading.

The revision is resolved once, and every request specifies its commit, so the content cannot change
during reading. Tokens, proxies and the server are configured as for huggingface_hub: `HF_TOKEN`,
the token stored by `hf auth login`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from reshard.checkpoint.storage.object_stores import (
    BucketSource,
    FolderListing,
    ObjectState,
    open_bucket,
)
from reshard.errors import MissingExtraError


class HubSource:
    """A model at a commit.

    Args:
        files: the state of every file, by its path in the model.
        server: the server of the files.
        prefix: the prefix of their keys on the server.
    """

    def __init__(self, files: Mapping[str, ObjectState], server: BucketSource, prefix: str) -> None:
        self._files, self._server, self._prefix = dict(files), server, prefix

    def head(self, key: str) -> ObjectState | None:
        """Return the state of a file, or None if it does not exist."""
        return self._files.get(key)

    def list_folder(self, key: str) -> FolderListing:
        """List the files and folders directly in a folder of the model."""
        within = f"{key}/" if key else ""
        objects, folders = {}, set()
        for path, state in self._files.items():
            if path.startswith(within):
                name, slash, _ = path[len(within) :].partition("/")
                if slash:
                    folders.add(name)
                else:
                    objects[name] = state
        return FolderListing(objects, frozenset(folders))

    def read_into(self, key: str, start_bytes: int, memory: memoryview) -> ObjectState:
        """Fill memory with a range of a file. Raises OSError."""
        served = self._server.read_into(f"{self._prefix}/{key}", start_bytes, memory)
        state = self._files[key]
        # The server that delivers the bytes has its own times and tags: prefer the Hub's state.
        return state if served.size_bytes == state.size_bytes else served


def open_hub(organisation: str, model: str) -> HubSource:
    """Open a model, `name` or `name@revision`, of an organisation or a user.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
        OSError: the model or its revision does not exist, or the Hub denies access to this user.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError as error:
        raise MissingExtraError(
            "a model of the Hub needs the package huggingface_hub; pip install 'reshard[hf]'"
        ) from error
    name, _, revision = model.partition("@")
    repository = f"{organisation}/{name}"
    api: Any = huggingface_hub.HfApi()
    try:
        commit = api.model_info(repository, revision=revision or None).sha
        tree = api.list_repo_tree(repository, recursive=True, revision=commit)
        files = {
            entry.path: ObjectState(entry.size, 0, entry.blob_id)
            for entry in tree
            if hasattr(entry, "size")
        }
    except errors.GatedRepoError as error:
        raise PermissionError(
            errno.EACCES,
            "the model is gated: ask for access on its page, then log in with `hf auth login`",
            f"hf://{organisation}/{model}",
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        what = "revision" if isinstance(error, errors.RevisionNotFoundError) else "model"
        raise FileNotFoundError(
            errno.ENOENT,
            f"the Hub has no such {what}, or it is private: log in with `hf auth login`",
            f"hf://{organisation}/{model}",
        ) from error
    # The HTTP library in use raises other refusals and lost connections as its own errors.
    except (OSError, ValueError, *errors.HfHubHTTPError.__bases__) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(
            errno.EIO, f"the Hub does not answer: {line}", f"hf://{organisation}/{model}"
        ) from error
    scheme, _, host = constants.ENDPOINT.partition("://")
    token = huggingface_hub.get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    server = open_bucket(scheme, host, headers)
    return HubSource(files, server, f"{repository}/resolve/{commit}")
