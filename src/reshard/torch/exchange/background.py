"""Exchanges in a thread of their own, while their rank does something else.

A thread of its own packs, posts messages as their slots become free, and unpacks, all in the order
of every exchange and within its memory. `finish` waits for the thread, and raises what it raised::

    main thread    start()   other work ...   finish()
    exchange's               | messages, a few slots at a time |

Several exchanges of a group can be under way at once, and beside them messages of the program's
own: the messages of each carry a tag that no other has. All ranks begin their exchanges of a group
in one order, so they give the same tags.

On devices, and where messages are posted in groups (NCCL), an exchange stays in the thread that
began it: what fits its memory is posted there, and the stream waits for it.
"""

from __future__ import annotations

import threading

import torch

from reshard.errors import RunError
from reshard.torch.exchange.agreement import Group
from reshard.torch.exchange.exchange import MessageExchange
from reshard.torch.exchange.groups import rank_group

# Tags begin where those that people choose rarely are, and come again only after as many.
_FIRST_TAG, _TAGS = 1 << 20, 1 << 20


def next_tag(group: Group) -> int:
    """A tag for the messages of one exchange; the n-th of a group is the same on all its ranks."""
    return _FIRST_TAG + rank_group(group).next_number() % _TAGS


class BackgroundExchange:
    """An exchange that runs in a thread of its own, once.

    Args:
        exchange: prepared; its messages get the tag.
        tag: of `next_tag`.
    """

    def __init__(self, exchange: MessageExchange, tag: int) -> None:
        exchange.tag = tag
        self._exchange = exchange
        self._error: BaseException | None = None
        # A thread that waits for a rank that never answers must not keep the process.
        self._thread = threading.Thread(target=self._run, name="reshard exchange", daemon=True)
        self.received_bytes = exchange.received_bytes
        self.sent_bytes = exchange.sent_bytes
        self.extra_bytes = exchange.extra_bytes
        self.has_failed = False

    @property
    def is_done(self) -> bool:
        """Whether all has arrived here, or will not."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def start(self) -> None:
        """Begin. Sources must not change, nor targets be used, until `finish` has returned.

        Raises RunError where it has begun before.
        """
        if self._thread.ident is not None:
            raise RunError("this exchange runs already, or did; begin another")
        self._thread.start()

    def finish(self) -> None:
        """Wait until all has arrived. Raises what the thread raised."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            self.has_failed = True
            raise error

    def _run(self) -> None:
        try:
            # Which mode a thread is in is its own; an engine's tensors may be inference tensors.
            with torch.inference_mode():
                self._exchange.run()
        except BaseException as error:
            self._error = error
