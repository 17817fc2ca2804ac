"""verl's interface for weights between trainer and rollout, by a link: the backend `reshard`.

verl gives every rank of a trainer a stream of full tensors, and expects it on every worker::

    trainer rank 0   | bucket: rows 0 |  ---->  worker 0   | whole bucket |  ---->  name, tensor
    trainer rank 1   | bucket: rows 1 |  ---->  worker 1   | whole bucket |         name, tensor

1. `prepare` on the master returns the rendezvous address and a fresh secret.
2. `init_process_group` creates the link: all trainer ranks, and all workers of all replicas as one
   engine.
3. Weights are sent in buckets of equal size. Every rank of the trainer sends its share of each, so
   that all send the same amount. A tensor may span buckets.
4. `finalize` closes the link: workers may change until the next step.

A bucket is a JSON table, preceded by its length, and then the bytes of tensors.

verl uses this module as its `custom_backend_module`, which every process of verl imports.

Source: `verl.checkpoint_engine.base` of verl 0.7 and 0.9.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import secrets
import socket
import sys
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any

import torch

from reshard._validation import check_int
from reshard.dtypes import dtype as as_dtype
from reshard.errors import LinkError, ReshardError, RunError, UsageError
from reshard.layout import Box, Layout
from reshard.torch.exchange.packing.messages import view_bytes
from reshard.torch.links.link import WeightLink, connect
from reshard.torch.links.sync import WeightSync

BACKEND = "reshard"
_LENGTH_BYTES = 8
# The fields of a tensor's table entry in addition to name and shape.
_ENTRY_BYTES = 160
_LEAST_BYTES = 4096


def register() -> None:
    """Register the backend with verl, if it is imported; may be called again.

    Raises ImportError without verl.
    """
    from verl.checkpoint_engine import CheckpointEngineRegistry

    if BACKEND not in CheckpointEngineRegistry._registry:
        CheckpointEngineRegistry.register(BACKEND)(make_engine_class())


@functools.cache
def make_engine_class() -> Any:
    """Return the class that verl creates on every rank and worker, whose base is verl's."""
    from verl.checkpoint_engine import CheckpointEngine

    class ReshardCheckpointEngine(StreamEnd, CheckpointEngine):  # type: ignore[misc]
        """Weights by a link."""

    return ReshardCheckpointEngine


class StreamEnd:
    """A process's end of a stream of full tensors.

    Args:
        bucket_size: bytes that are sent together; a process has a buffer of this size.
        is_master: whether this is the trainer's first rank, at which others meet.
        host: the address at which others reach the master; found by its name when None.
        timeout_s: how long to wait for others.
        insecure: as of `reshard.torch.connect`.

    Raises:
        UsageError: an invalid size, or a size too small for a table.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        host: str | None = None,
        timeout_s: float = 1800.0,
        insecure: bool = False,
    ) -> None:
        self._insecure = insecure
        self.bucket_size = check_int(bucket_size, "bucket_size", UsageError, minimum=_LEAST_BYTES)
        self.is_master, self._host, self._timeout_s = is_master, host, timeout_s
        self._link: WeightLink | None = None
        self._sync: WeightSync | None = None
        self._bucket = torch.empty(0, dtype=torch.uint8)

    def prepare(self) -> dict[str, Any] | None:
        """Return the rendezvous on the master, or None elsewhere."""
        if not self.is_master:
            return None
        host = self._host or socket.gethostbyname(socket.gethostname())
        # verl sends the address to all others before it is served, so the port is chosen here.
        with socket.socket() as listener:
            listener.bind((host, 0))
            port = listener.getsockname()[1]
        return {"url": f"tcp://{host}:{port}", "secret": secrets.token_hex(16)}

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for every process.

        >>> _, workers = StreamEnd.build_topology(1, 2, [{"url": "tcp://a:1", "secret": "s"}] * 3)
        >>> workers["rank"], workers["side"]
        ([0, 1], ['engine', 'engine'])
        """

        def tell(side: str, ranks: int) -> dict[str, list[Any]]:
            return {
                "side": [side] * ranks,
                "rank": list(range(ranks)),
                "ranks": [ranks] * ranks,
                "meeting": [metadata[0]] * ranks,
            }

        return tell("trainer", trainer_world_size), tell("engine", rollout_world_size)

    def init_process_group(self, side: Any, rank: int, ranks: int, meeting: dict[str, Any]) -> None:
        """Meet all others; raise LinkError if they do not come."""
        self.finalize()
        self._bucket = torch.zeros(self.bucket_size, dtype=torch.uint8)
        timeout_s, secret = self._timeout_s, meeting["secret"]
        self._link = connect(
            meeting["url"],
            side,
            rank=rank,
            ranks=ranks,
            secret=secret,
            timeout_s=timeout_s,
            insecure=self._insecure,
        )
        try:
            self._sync = self._link.prepare({"bucket": self._own_part(side, rank, ranks)})
        except BaseException:
            self.finalize()
            raise

    def _own_part(self, side: Any, rank: int, ranks: int) -> tuple[torch.Tensor, Layout]:
        size = self.bucket_size
        if side == "engine":
            return self._bucket, Layout.replicated((size,), ranks)
        ends = [size * number // ranks for number in range(ranks + 1)]
        boxes = [(n, Box((ends[n],), (ends[n + 1],))) for n in range(ranks)]
        return self._bucket[ends[rank] : ends[rank + 1]], Layout.from_boxes((size,), boxes, ranks)

    def finalize(self) -> None:
        """Leave the link, and free the bucket."""
        link, self._link, self._sync = self._link, None, None
        self._bucket = torch.empty(0, dtype=torch.uint8)
        if link is not None:
            link.close()

    async def send_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
    ) -> None:
        """Send a stream, which must be equal on every rank of the trainer.

        Args:
            weights: names and whole tensors.
            global_steps: verl's step, which verl itself passes to workers.

        Raises:
            UsageError: before `init_process_group`.
            RunError: a worker is lost.
        """
        table: list[Any] = []
        parts: list[torch.Tensor] = []
        used = _LENGTH_BYTES + _ENTRY_BYTES
        async for name, tensor in _iterate(weights):
            shape, kind = list(tensor.shape), as_dtype(tensor.dtype).name
            whole = view_bytes(tensor.cpu())
            # In JSON a character of a name may take up to 12 bytes.
            entry = _ENTRY_BYTES + len(json.dumps(name)) + 24 * len(shape)
            if entry + used >= self.bucket_size and not table:
                raise UsageError(
                    f"buckets of {self.bucket_size} bytes have no room for the name {name!r}; "
                    "give larger ones"
                )
            begin = 0
            # An empty tensor has an entry, too.
            while begin < max(len(whole), 1):
                room = self.bucket_size - used - entry
                # A piece smaller than that is not worth an entry of its own.
                if room < min(len(whole) - begin, _LEAST_BYTES // 4):
                    await self._send(table, parts, False)
                    table, parts, used = [], [], _LENGTH_BYTES + _ENTRY_BYTES
                    continue
                part = whole[begin : begin + room]
                table.append([name, kind, shape, begin, len(part)])
                parts.append(part)
                used += entry + len(part)
                # An empty tensor, too, has to end the loop.
                begin += max(len(part), 1)
        await self._send(table, parts, True)

    async def _send(self, table: list[Any], parts: list[torch.Tensor], is_last: bool) -> None:
        sync = self._expect_sync()
        text = json.dumps({"tensors": table, "is_last": is_last}).encode()
        head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        at = len(head)
        self._bucket[:at] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for part in parts:
            self._bucket[at : at + len(part)] = part
            at += len(part)
        # In a thread, since a run blocks, and verl's event loop serves other calls.
        report = await asyncio.to_thread(sync.run)
        lost = getattr(report, "lost", None)
        if lost:
            raise RunError(f"weights did not reach all workers: {lost}")

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a stream, in host memory, each when complete.

        Args:
            global_steps: verl's step.

        Raises:
            LinkError: the trainer is lost, or sends an invalid stream.
        """
        sync, begun = self._expect_sync(), {}
        while True:
            await asyncio.to_thread(sync.run)
            table, is_last, at = self._read_table()
            for name, kind, shape, begin, size in table:
                if begin == 0:
                    begun[name] = torch.empty(shape, dtype=getattr(torch, as_dtype(kind).name))
                if name not in begun or at + size > self.bucket_size:
                    raise LinkError(f"a bucket has bytes {begin} of {name!r} out of place")
                whole = begun[name].view(-1).view(torch.uint8)
                if begin + size > len(whole):
                    raise LinkError(f"a bucket has bytes {begin + size} of {name!r}, {len(whole)}")
                whole[begin : begin + size] = self._bucket[at : at + size]
                at += size
                if begin + size == len(whole):
                    yield name, begun.pop(name)
            if is_last:
                break
        if begun:
            raise LinkError(f"the stream ended in the middle of {sorted(begun)}")

    def _read_table(self) -> tuple[list[Any], bool, int]:
        """Return the bucket's table and the offset of its bytes."""
        length = int.from_bytes(bytes(self._bucket[:_LENGTH_BYTES].tolist()), "little")
        stop = _LENGTH_BYTES + length
        try:
            if stop > self.bucket_size:
                raise ValueError(f"{length} bytes of a table")
            head = json.loads(self._bucket[_LENGTH_BYTES:stop].numpy().tobytes())
            table = [
                (str(name), as_dtype(kind).name, [int(n) for n in shape], int(begin), int(size))
                for name, kind, shape, begin, size in head["tensors"]
            ]
            if any(min([begin, size, *shape]) < 0 for _, _, shape, begin, size in table):
                raise ValueError("numbers below 0")
            # The sizes come from another process, and memory is allocated by them.
            if any(math.prod(shape) > 1 << 48 for _, _, shape, _, _ in table):
                raise ValueError("tensors that no memory holds")
            return table, bool(head["is_last"]), stop
        except (ValueError, KeyError, TypeError, ReshardError) as error:
            raise LinkError(f"what arrived is no bucket of weights: {error}") from error

    def _expect_sync(self) -> WeightSync:
        if self._sync is None:
            raise UsageError("weights without a link; call init_process_group first")
        return self._sync


async def _iterate(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if isinstance(weights, AsyncIterable):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair


# verl imports backend modules once its registry exists, and creates them by name later.
if "verl.checkpoint_engine" in sys.modules:
    register()
