"""Estimates: seconds, divided into latency, bytes under way and copies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """One collective, or messages that are all sent at once.

    Args:
        name: what it is.
        algorithm: by which it is counted.
        messages: that the busiest rank sends, or receives, one after another.
        busiest_bytes: that it sends, or receives.
        latency_s: seconds for the messages' latencies.
        transfer_s: seconds for the bytes.
        copy_s: seconds for packing, unpacking and copying, where that is counted.
    """

    name: str
    algorithm: str
    messages: int
    busiest_bytes: float
    latency_s: float
    transfer_s: float
    copy_s: float = 0.0

    @property
    def seconds_s(self) -> float:
        """Seconds from the beginning to the end."""
        return self.latency_s + self.transfer_s + self.copy_s

    @classmethod
    def nothing(cls, name: str) -> Part:
        """What moves nothing, and takes no time."""
        return cls(name, "-", 0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The parts of something, one after another, and their seconds.

    Args:
        parts: in their order.
        call_s: seconds before and after all of them, see `reshard.topology.Overhead`.

    >>> estimate = Estimate((Part("all-gather(x)", "ring", 7, 7e6, 7e-5, 7e-3),))
    >>> round(estimate.seconds_s, 6)
    0.00707
    >>> print(estimate)
    part           algorithm  messages    bytes  latency  transfer     time
    -------------  ---------  --------  -------  -------  --------  -------
    all-gather(x)  ring              7  7.00 MB  70.0 µs   7.00 ms  7.07 ms
    """

    parts: tuple[Part, ...]
    call_s: float = 0.0

    @property
    def seconds_s(self) -> float:
        """Seconds from the beginning to the end."""
        return sum((part.seconds_s for part in self.parts), self.call_s)

    @property
    def latency_s(self) -> float:
        """Seconds that do not depend on the sizes."""
        return sum((part.latency_s for part in self.parts), self.call_s)

    @property
    def transfer_s(self) -> float:
        """Seconds that bytes are under way."""
        return sum((part.transfer_s for part in self.parts), 0.0)

    @property
    def copy_s(self) -> float:
        """Seconds that ranks pack, unpack and copy, where that is counted."""
        return sum((part.copy_s for part in self.parts), 0.0)

    def __str__(self) -> str:
        from reshard.text import bytes_text, duration_text, table

        rows = [
            (part.name, part.algorithm, f"{part.messages:,}", bytes_text(part.busiest_bytes))
            for part in self.parts
        ]
        times = [
            (part.latency_s, part.transfer_s, part.copy_s, part.seconds_s) for part in self.parts
        ]
        if self.call_s:
            rows.insert(0, ("call", "", "", ""))
            times.insert(0, (self.call_s, 0.0, 0.0, self.call_s))
        if len(rows) != 1:
            rows.append(("together", "", "", ""))
            times.append((self.latency_s, self.transfer_s, self.copy_s, self.seconds_s))
        headers = [
            "part",
            "algorithm",
            "messages",
            "bytes",
            "latency",
            "transfer",
            "copies",
            "time",
        ]
        shown = [[*row, *map(duration_text, time)] for row, time in zip(rows, times, strict=True)]
        if not self.copy_s:
            # Most topologies do not count copies.
            for line in (headers, *shown):
                del line[6]
        return table(shown, headers, "ll" + "r" * (len(headers) - 2))
