"""Hosts on one machine: network namespaces, with links between them that are held to a rate.

Every host has a network and a host name of its own, and one link to its rack's switch; racks have
an uplink each to a switch between them. The switches are in namespaces too::

    host0  eth0 ---- port0  rack0  uplink ---- rack0  core
    host1  eth0 ---- port1  rack0
    host2  eth0 ---- port2  rack1  uplink ---- rack1  core

Both ends of every link send at most at the link's rate (`tc tbf`). No namespace has a name: each is
kept by a process that sleeps, and that the system ends when this one ends, however it does. So
nothing stays behind.

It takes root, and `iproute2`. `why_not` says what is missing.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
# What may be sent at once beyond the rate, and how long bytes may wait: a large packet, and enough
# for a connection's window.
_BURST_BYTES, _LATENCY_MS = 128 << 10, 400
_READY_S = 20.0


def why_not() -> str:
    """Why there can be no such hosts here; empty where there can."""
    programs = ("ip", "tc", "unshare", "nsenter", "setpriv")
    missing = [name for name in programs if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} not found; install iproute2 and util-linux"
    if os.geteuid() != 0:
        return "namespaces and links take root"
    try:
        with HostNetwork(1, 10_000_000):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", "") or str(error)
        return f"namespaces and links are not allowed here: {told.strip()}"


class HostNetwork:
    """Hosts that are linked, until the end of a `with`.

    Args:
        hosts: how many.
        rate_bits_per_s: of each host's link, in each direction.
        racks: the rack of each host, from 0; all in one when None.
        uplink_bits_per_s: of each rack's link to the others; that of hosts when None.

    `links` are the host's ends of the links, then the racks' ends of the uplinks.
    """

    def __init__(
        self,
        hosts: int,
        rate_bits_per_s: int,
        racks: Sequence[int] | None = None,
        uplink_bits_per_s: int | None = None,
    ) -> None:
        self.racks = list(racks or [0] * hosts)
        self._rate = rate_bits_per_s
        self._uplink_rate = uplink_bits_per_s or rate_bits_per_s
        self._keepers: list[subprocess.Popen[bytes]] = []
        self._hosts = hosts
        self.host_pids: list[int] = []
        self.rack_pids: list[int] = []

    def __enter__(self) -> HostNetwork:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the namespaces, and with them the links."""
        for keeper in self._keepers:
            keeper.kill()
        for keeper in self._keepers:
            # It is read to its end, and closed.
            keeper.communicate()
        self._keepers = []

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"10.77.{self.racks[host]}.{host + 1}"

    def link_bytes(self) -> list[tuple[int, int]]:
        """Sent and received over each host's link, and over each uplink where there are racks."""
        ends = [(pid, "eth0") for pid in self.host_pids]
        if len(self.rack_pids) > 1:
            ends += [(pid, "uplink") for pid in self.rack_pids]
        found = []
        for pid, name in ends:
            (link,) = json.loads(_run_in(pid, "ip", "-s", "-j", "link", "show", name))
            found.append((link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"]))
        return found

    def _build(self) -> None:
        self.rack_pids = [self._keep(f"rack{rack}") for rack in range(max(self.racks) + 1)]
        self.host_pids = [self._keep(f"host{host}") for host in range(self._hosts)]
        for pid in self.rack_pids:
            _add_switch(pid)
        for host, (pid, rack) in enumerate(zip(self.host_pids, self.racks, strict=True)):
            port = f"port{host}"
            _join((pid, "eth0"), (self.rack_pids[rack], port), self._rate)
            _run_in(pid, "ip", "addr", "add", f"{self.address(host)}/16", "dev", "eth0")
            _run_in(pid, "ip", "link", "set", "lo", "up")
            _run_in(self.rack_pids[rack], "ip", "link", "set", port, "master", "switch")
        if len(self.rack_pids) > 1:
            core = self._keep("core")
            _add_switch(core)
            for rack, pid in enumerate(self.rack_pids):
                port = f"rack{rack}"
                _join((pid, "uplink"), (core, port), self._uplink_rate)
                _run_in(pid, "ip", "link", "set", "uplink", "master", "switch")
                _run_in(core, "ip", "link", "set", port, "master", "switch")

    def _keep(self, name: str) -> int:
        # Not by `preexec_fn`, which forks: JAX warns of a fork in a process that has used it.
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "--net",
            "--uts",
            "sh",
            "-c",
            f"hostname {name} && exec sleep 1000000",
        ]
        keeper = subprocess.Popen(command, stderr=subprocess.PIPE)
        self._keepers.append(keeper)
        own, begun_s = os.readlink("/proc/self/ns/net"), time.monotonic()
        while True:
            if keeper.poll() is not None:
                assert keeper.stderr is not None
                raise OSError(keeper.stderr.read().decode().strip())
            # It sleeps when all before is done.
            is_named = Path(f"/proc/{keeper.pid}/comm").read_text().strip() == "sleep"
            if is_named and os.readlink(f"/proc/{keeper.pid}/ns/net") != own:
                return keeper.pid
            if time.monotonic() - begun_s > _READY_S:
                raise OSError(f"no namespace within {_READY_S} s")
            time.sleep(0.005)


def enter_host(pid: int) -> None:
    """Let the thread that calls this, and all it starts, be on the host of a process."""
    for kind in ("net", "uts"):
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            if _LIBC.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace of {pid}")


def _run_in(pid: int, *command: Any) -> str:
    entered = ["nsenter", "--target", str(pid), "--net", *map(str, command)]
    return subprocess.run(entered, check=True, capture_output=True, text=True).stdout


def _add_switch(pid: int) -> None:
    _run_in(pid, "ip", "link", "add", "switch", "type", "bridge")
    _run_in(pid, "ip", "link", "set", "switch", "up")


def _join(one: tuple[int, str], other: tuple[int, str], rate_bits_per_s: int) -> None:
    """A link between two namespaces, whose ends have these names."""
    peer = ("peer", "name", other[1], "netns", other[0])
    _run_in(one[0], "ip", "link", "add", one[1], "type", "veth", *peer)
    rate = ("rate", rate_bits_per_s, "burst", _BURST_BYTES, "latency", f"{_LATENCY_MS}ms")
    for pid, name in (one, other):
        _run_in(pid, "ip", "link", "set", name, "up")
        _run_in(pid, "tc", "qdisc", "add", "dev", name, "root", "tbf", *rate)
