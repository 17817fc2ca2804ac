"""What goes over the links of hosts that convert together, from and to an object store?

The hosts are network namespaces whose links are held to a rate (`tests/host_network.py`); it takes
root, `iproute2` and `util-linux`. One more has SeaweedFS's S3 server, and a link that is no limit.
Two processes on each of 1, 2 and 3 hosts convert the model of `benchmarks/places.py`; bytes are
those that interfaces count, with the headers of packets.

Expected before the first run: bytes a host fall as one over their number, and so does the time.

    python benchmarks/place_hosts.py [--size-mib 256] [--rate-mbit 200] [--repeat 5]
                                     [--format torch-dcp] [--most-hosts 2]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import places
from turns import MIB, in_a_process

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from host_network import HostNetwork, enter_host, why_not
from live_processes import free_port

PROCESSES = 2


def convert(network: HostNetwork, hosts: int, key: str, folder: Path, form: str) -> None:
    """One conversion by the processes of so many hosts."""
    ranks = hosts * PROCESSES
    port = str(free_port())
    command = [sys.executable, "-m", "reshard", "convert", f"s3://{places.BUCKET}/model"]
    command += [f"s3://{places.BUCKET}/{key}", f"--format={form}"]
    if form == "torch-pickle":
        command.append("--to=full")
    else:
        command += [f"--to=tp={places.RANKS}", *(f"--rule={rule}" for rule in places.RULES)]
    started = []
    for rank in range(ranks):
        host = 1 + rank // PROCESSES
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": network.address(1),
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        started.append(
            subprocess.Popen(
                [*command, f"--staging={folder}/{host}"],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=partial(enter_host, network.host_pids[host]),
            )
        )
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"{hosts} hosts ended with {codes}")


def free_link(network: HostNetwork, host: int) -> None:
    """Let a host's link pass what comes."""
    ends = ((network.host_pids[host], "eth0"), (network.rack_pids[0], f"port{host}"))
    for pid, name in ends:
        entered = ["nsenter", "--target", str(pid), "--net"]
        subprocess.run([*entered, "tc", "qdisc", "del", "dev", name, "root"], check=True)


def main() -> None:
    """All turns, and the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--rate-mbit", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--format", default="sharded-safetensors")
    parser.add_argument("--most-hosts", type=int, default=3)
    options = parser.parse_args()
    missing = why_not()
    if missing:
        raise SystemExit(f"no hosts here: {missing}")
    os.environ |= places.ENVIRONMENT
    seen: dict[int, list[tuple[float, list[tuple[int, int]]]]] = {
        hosts: [] for hosts in range(1, options.most_hosts + 1)
    }
    with (
        tempfile.TemporaryDirectory() as name,
        HostNetwork(options.most_hosts + 1, options.rate_mbit * 1_000_000) as network,
    ):
        folder = Path(name)
        free_link(network, 0)
        in_a_process(places.__file__, "write", folder / "model", options.size_mib)
        enter = partial(enter_host, network.host_pids[0])
        with places.serve(folder, network.address(0), enter) as port:
            places.use(port, network.address(0))
            # Everything of this process is on the server's host from here on.
            enter()
            in_a_process(places.__file__, "begin", folder / "model")
            for number in range(options.repeat):
                for hosts, turns in seen.items():
                    key, before = f"{hosts}-{number}", network.link_bytes()
                    start_s = time.perf_counter()
                    convert(network, hosts, key, folder / key, options.format)
                    seconds_s = time.perf_counter() - start_s
                    after = network.link_bytes()
                    turns.append(
                        (
                            seconds_s,
                            [
                                (sent - was_sent, received - was_received)
                                for (sent, received), (was_sent, was_received) in zip(
                                    after[1 : hosts + 1], before[1:], strict=False
                                )
                            ],
                        )
                    )
                    in_a_process(places.__file__, "end", key, "1-0")
    for hosts, turns in seen.items():
        median_s = statistics.median(seconds_s for seconds_s, _ in turns)
        sent, received = (
            [
                statistics.median(links[host][way] for _, links in turns) / MIB
                for host in range(hosts)
            ]
            for way in (0, 1)
        )
        print(
            f"{hosts} hosts: {median_s:6.2f} s, MiB of each host: sent "
            f"{', '.join(f'{one:.0f}' for one in sent)}, received "
            f"{', '.join(f'{one:.0f}' for one in received)}"
        )


if __name__ == "__main__":
    main()
