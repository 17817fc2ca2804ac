"""The transfer of tensors between ranks, by which all of them move.

`transfer` is where to start: its phases, prepared once and run any number of times. `exchange` are
the messages of all tensors that move at once, in little memory. `packing` lists, copies and
combines the contents of messages (their sizes and order: `reshard.plans.schedule`). `changes` sends
only changes since the previous run. `all_gather` uses a library's own collective. A `carrier`
transports bytes. Ranks find each other by `groups` and `rendezvous`, and compare their calls in
`agreement`. `consistency` marks tensors that a failed run left partly written, and `timeline`
records the activity of a rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard._lazy import attach

if TYPE_CHECKING:
    from reshard.torch.exchange.agreement import CallSignature, agree, gather, share
    from reshard.torch.exchange.exchange import MessageExchange
    from reshard.torch.exchange.groups import RankGroup, bytes_of, rank_group, tensor_of
    from reshard.torch.exchange.packing.copies import empty_result
    from reshard.torch.exchange.packing.messages import RankTransfers, transfers_of
    from reshard.torch.exchange.transfer import Transfer, next_tag

__all__ = [
    "CallSignature",
    "MessageExchange",
    "RankGroup",
    "RankTransfers",
    "Transfer",
    "agree",
    "bytes_of",
    "empty_result",
    "gather",
    "next_tag",
    "rank_group",
    "share",
    "tensor_of",
    "transfers_of",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "reshard.torch.exchange.agreement": ["agree", "CallSignature", "gather", "share"],
        "reshard.torch.exchange.exchange": ["MessageExchange"],
        "reshard.torch.exchange.groups": ["bytes_of", "rank_group", "RankGroup", "tensor_of"],
        "reshard.torch.exchange.packing.copies": ["empty_result"],
        "reshard.torch.exchange.packing.messages": ["RankTransfers", "transfers_of"],
        "reshard.torch.exchange.transfer": ["next_tag", "Transfer"],
    },
)
