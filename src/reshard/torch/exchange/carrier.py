"""The seam between exchanges and what transports their bytes.

An exchange of messages handles tensors, and a carrier handles bytes: it moves them between this
rank and the ranks that it reaches. Everything that depends on sockets, shared memory or a device's
links is below this seam::

    exchange   which bytes, to whom, in which order, in how much memory
    ---------------------------------------------------------------------
    carrier    connections     gloo, or the group's backend of a device    `groups`
               shared memory   packed, and unpacked from the sender's      `one_host.shared_memory`
               direct reads    copied once, from the sender's tensors      `one_host.direct_reads`

An outgoing message is bytes in dense memory, or a table of spans: rows of an address and a length.
A carrier that `lends` leaves messages in memory of their sender, in memory that it allocates itself
(`staging_memory`). The receiver copies them from there and then gives them back.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import torch

from reshard.runs import IntArray


class Carrier(Protocol):
    """A transport of messages to and from some ranks. Messages of a tag arrive in order."""

    lends: bool
    # Whether `takes_memory` is true for any memory.
    takes_spans: bool

    @property
    def ranks(self) -> Collection[int]:
        """The ranks that it reaches."""

    def staging_memory(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Allocate memory to pack messages in."""

    def takes_memory(self, address: int, row_bytes: int, receivers: int) -> bool:
        """Return whether to send memory from where it is stored, as spans, without packing.

        Args:
            address: in that memory.
            row_bytes: the mean length of its spans.
            receivers: the number of ranks that are sent the same bytes.
        """

    def send(self, data: torch.Tensor | IntArray, receiver: int, tag: int) -> Any:
        """Begin to send bytes, or spans of memory, that must not change until `wait()` returns.

        Returns an object with `wait()`, which raises RuntimeError if the peer is lost.
        """

    def receive(self, into: torch.Tensor | int, sender: int, tag: int) -> Any:
        """Begin to receive into dense memory; by a carrier that lends, as many bytes as given.

        Returns an object with `wait()`, as `send` does.
        """
