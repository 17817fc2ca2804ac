"""What does a conversion between object stores cost, beside download, convert and upload?

A model of bfloat16 in one safetensors file in a bucket is cut for `tp=4`, half of its tensors by
columns::

    addresses   convert s3://weights/model s3://weights/...
    s5cmd       s5cmd cp to a folder, convert between folders, s5cmd cp back
    boto3       the same by boto3's transfer manager (10 threads, its default)
    read        convert s3://weights/model to a folder: one direction of the link
    write       convert a folder to s3://weights/...
    alone       four processes of this machine load tp=4, each what it needs of its rank's part
    together    the same by load(..., readers_on_host=4)

The server is SeaweedFS's, with its files on this machine; it and the clients share the cores. With
`--rate-mib` a link lies between them, at that rate in each direction and with `--latency-ms` each
way. The ways alternate. Times are with the start of each process, but for the loads. Peaks are of
resident memory with imports: of one process, of the largest of the steps, or of all ranks.

SeaweedFS and s5cmd come with `make engines ENGINES=stores`.

    python benchmarks/places.py [--ways addresses s5cmd boto3] [--size-mib 512] [--repeat 5]
                                [--rate-mib 50 --latency-ms 10]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slow_link import slow_link
from turns import MIB, Turn, in_a_process, in_ranks, show, this_rank, timed

BUCKET = "weights"
TENSOR_MIB = 32
RANKS = 4
WRITING = ("addresses", "s5cmd", "boto3", "write")
RULES = ["layers.*[02468].weight=-, tp", "layers.*.weight=tp, -"]
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "tester",
    "AWS_SECRET_ACCESS_KEY": "tester",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
USER = {
    "name": "tester",
    "credentials": [{"accessKey": "tester", "secretKey": "tester"}],
    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
}
PROGRAMS = Path(__file__).parents[1] / ".engines/stores/bin"


def write(folder: Path, size_mib: int) -> None:
    """The model."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    tensors: dict[str, Any] = {
        f"layers.{number}.weight": torch.randn(4096, 4096).to(torch.bfloat16)
        for number in range(size_mib // TENSOR_MIB)
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")


def convert(source: str, target: str, staging: str) -> None:
    """The conversion, between addresses or folders."""
    from reshard.checkpoint import convert

    given = {"staging": staging} if "://" in target else {}
    convert(source, target, to=f"tp={RANKS}", rules=RULES, **given)


def load(way: str) -> None:
    """One rank's part; prints the time without the start of the process."""
    from reshard.checkpoint import load

    readers = RANKS if way == "together" else 1
    load(
        f"s3://{BUCKET}/model",
        to=f"tp={RANKS}",
        rules=RULES,
        rank=this_rank(),
        readers_on_host=readers,
    )


def download(folder: str) -> None:
    """By boto3's transfer manager."""
    import boto3

    target = Path(folder) / "model.safetensors"
    boto3.client("s3").download_file(BUCKET, "model/model.safetensors", str(target))


def upload(folder: str, key: str) -> None:
    """By boto3's transfer manager."""
    import boto3

    client = boto3.client("s3")
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            client.upload_file(str(path), BUCKET, f"{key}/{path.relative_to(folder)}")


def s5cmd(*arguments: str) -> None:
    """Run s5cmd, at its defaults."""
    subprocess.run(
        [PROGRAMS / "s5cmd", "--log", "error", *arguments], check=True, stdout=subprocess.DEVNULL
    )


def steps_of(way: str, key: str, folder: Path, origin: Path) -> list[tuple[str, ...]]:
    """The processes of one way, one after the other."""
    model, written = f"{folder}/model", f"{folder}/written"
    source, target = f"s3://{BUCKET}/model", f"s3://{BUCKET}/{key}"
    if way == "addresses":
        return [("convert", source, target, f"{folder}/staging")]
    if way == "write":
        return [("convert", str(origin), target, f"{folder}/staging")]
    if way == "read":
        return [("convert", source, written, "")]
    Path(model).mkdir()
    local = ("convert", model, written, "")
    if way == "boto3":
        return [("download", model), local, ("upload", written, key)]
    return [
        ("s5cmd", "cp", f"{source}/*", f"{model}/"),
        local,
        ("s5cmd", "cp", f"{written}/", f"{target}/"),
    ]


def one_turn(way: str, key: str, model: Path) -> Turn:
    """One conversion, by its steps: with the start of their processes; or a load by all ranks."""
    if way in ("alone", "together"):
        return in_ranks(__file__, RANKS, "load", way)
    with tempfile.TemporaryDirectory() as folder:
        turns = []
        start_s = time.perf_counter()
        for step in steps_of(way, key, Path(folder), model):
            turns.append(in_a_process(__file__, *step))
        seconds_s = time.perf_counter() - start_s
    return Turn(seconds_s, max(one.peak_bytes for one in turns), 0)


@contextlib.contextmanager
def serve(
    folder: Path, address: str = "127.0.0.1", enter: Callable[[], None] | None = None
) -> Iterator[int]:
    """The port of SeaweedFS's S3 server, which keeps its files in a folder.

    `enter` is called in its process first, to be on another host, whose `address` is given then.
    """
    (folder / "users.json").write_text(json.dumps({"identities": [USER]}))
    ports = free_ports(8)
    names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port"]
    names += ["filer.port.grpc", "s3.port", "s3.port.grpc"]
    server = subprocess.Popen(
        [PROGRAMS / "weed", "server", f"-ip={address}", f"-ip.bind={address}", f"-dir={folder}"]
        + ["-filer", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=0"]
        + [f"-s3.config={folder}/users.json", "-master.volumeSizeLimitMB=1024"]
        + [f"-{name}={port}" for name, port in zip(names, ports, strict=True)],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        preexec_fn=enter,
    )
    try:
        yield ports[6]
    finally:
        server.kill()
        server.wait()


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody has."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


def begin_bucket() -> Any:
    """Make the bucket, as soon as the server answers; boto3's client."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client("s3")
    for _ in range(60):
        with contextlib.suppress(BotoCoreError, ClientError):
            client.create_bucket(Bucket=BUCKET)
            break
        time.sleep(0.5)
    return client


def begin(model: str) -> None:
    """Make the bucket, and put the model there."""
    begin_bucket().upload_file(f"{model}/model.safetensors", BUCKET, "model/model.safetensors")


def end(key: str, others: str) -> None:
    """Delete what a way wrote, unless it is other than what `others` are."""
    import boto3

    client = boto3.client("s3")

    def digests(target: str) -> dict[str, str]:
        found = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{target}/")["Contents"]
        return {
            one["Key"].removeprefix(target): hashlib.blake2b(
                client.get_object(Bucket=BUCKET, Key=one["Key"])["Body"].read()
            ).hexdigest()
            for one in found
            if one["Key"].endswith(".safetensors")
        }

    if digests(key) != digests(others):
        raise SystemExit(f"{key} has other shards than {others}")
    if key != others:
        for one in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{key}/")["Contents"]:
            client.delete_object(Bucket=BUCKET, Key=one["Key"])


STEPS: dict[str, Callable[..., None]] = {
    "convert": convert,
    "load": load,
    "download": download,
    "upload": upload,
    "s5cmd": s5cmd,
    "begin": begin,
    "end": end,
    "write": lambda folder, size_mib: write(Path(folder), int(size_mib)),
}


def use(port: int, address: str = "127.0.0.1") -> None:
    """Let all programs ask the server there."""
    os.environ["AWS_ENDPOINT_URL"] = os.environ["S3_ENDPOINT_URL"] = f"http://{address}:{port}"


def main() -> None:
    """All turns, one after the other, and their medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ways", nargs="+", default=["addresses", "s5cmd", "boto3"])
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rate-mib", type=float)
    parser.add_argument("--latency-ms", type=float, default=0)
    parser.add_argument("--turn", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.turn:
        action, *given = arguments.turn
        show(timed(lambda: STEPS[action](*given)))
        return
    os.environ |= ENVIRONMENT
    seen: dict[str, list[Turn]] = {way: [] for way in arguments.ways}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        in_a_process(__file__, "write", folder / "model", arguments.size_mib)
        port = stack.enter_context(serve(folder))
        direct = port
        use(port)
        in_a_process(__file__, "begin", folder / "model")
        if arguments.rate_mib:
            latency_s, rate = arguments.latency_ms / 1e3, arguments.rate_mib * MIB
            port = stack.enter_context(slow_link(port, latency_s, rate))
        for number in range(arguments.repeat):
            for way, turns in seen.items():
                use(port)
                turns.append(one_turn(way, f"{way}-{number}", folder / "model"))
                use(direct)
                if way in WRITING:
                    first = next(one for one in seen if one in WRITING)
                    in_a_process(__file__, "end", f"{way}-{number}", f"{first}-0")
    size_mib = arguments.size_mib
    for way, turns in seen.items():
        taken = sorted(one.seconds_s for one in turns)
        median_s = statistics.median(taken)
        peak_mib = statistics.median(one.peak_bytes for one in turns) / MIB
        print(
            f"{way:10} {median_s:6.2f} s ({taken[0]:.2f} to {taken[-1]:.2f}), "
            f"{size_mib / median_s:4.0f} MiB/s, peak {peak_mib:.0f} MiB"
        )


if __name__ == "__main__":
    main()
