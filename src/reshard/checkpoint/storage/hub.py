"""Models of the Hugging Face Hub, read by ranges and not downloaded.

The revision is looked up once and every request names its commit, so what is read cannot change on
the way. Tokens, proxies and the server are those that huggingface_hub finds: `HF_TOKEN`, what
`hf auth login` stored, `HF_ENDPOINT`, `HF_HUB_OFFLINE`.
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
    """One model at one commit.

    Args:
        files: the state of every file, by its path in the model.
        server: where the files are.
        prefix: of their keys there.
    """

    def __init__(self, files: Mapping[str, ObjectState], server: BucketSource, prefix: str) -> None:
        self._files, self._server, self._prefix = dict(files), server, prefix

    def head(self, key: str) -> ObjectState | None:
        """A file; None where there is none."""
        return self._files.get(key)

    def list_folder(self, key: str) -> FolderListing:
        """What is directly in a folder of the model."""
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
        found = self._server.read_into(f"{self._prefix}/{key}", start_bytes, memory)
        state = self._files[key]
        # What serves the bytes has times and tags of its own.
        return state if found.size_bytes == state.size_bytes else found


def open_hub(organisation: str, model: str) -> HubSource:
    """A model, `name` or `name@revision`, of an organisation or a person.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
        OSError: there is no such model or revision, or the Hub does not let this user in.
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
            one.path: ObjectState(one.size, 0, one.blob_id) for one in tree if hasattr(one, "size")
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
            f"the Hub has no such {what}, or shows it to others only: log in with `hf auth login`",
            f"hf://{organisation}/{model}",
        ) from error
    # What the Hub refuses is an error of whatever library asks, and so is it when nobody answers.
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
