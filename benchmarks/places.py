"""What does a conversion between object stores cost, beside download, convert and upload?

A model of bfloat16 in one safetensors file in a bucket of moto's server on 127.0.0.1 is cut for
`tp=4`, half of its tensors by columns, into the same bucket. Beside `convert` between the two
addresses: boto3's transfer manager downloads the file (10 threads, its default), `convert` works
between folders, and boto3 uploads what it wrote. Each turn is a process of its own, whose peak
memory includes imports. The server is Python too, and shares the cores.

Expected before the first run: less time than in three steps.

    python benchmarks/places.py [--size-mib 256] [--repeat 3]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BUCKET = "weights"
TENSOR_MIB = 32


def write(folder: Path, size_mib: int) -> None:
    """The model."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    tensors: dict[str, Any] = {
        f"layers.{number}.weight": torch.randn(4096, 4096).to(torch.bfloat16)
        for number in range(size_mib // TENSOR_MIB)
    }
    save_file(tensors, folder / "model.safetensors")


def turn(way: str, target: str, folder: Path) -> None:
    """One conversion; prints its seconds and the peak of its memory in bytes."""
    import boto3

    from reshard.checkpoint import convert

    rules = ["layers.*[02468].weight=-, tp", "layers.*.weight=tp, -"]
    began = time.perf_counter()
    if way == "addresses":
        source, written = f"s3://{BUCKET}/model", f"s3://{BUCKET}/{target}"
        convert(source, written, to="tp=4", rules=rules, staging=folder)
    else:
        client = boto3.client("s3")
        model, files = folder / "model", folder / "written"
        model.mkdir()
        client.download_file(BUCKET, "model/model.safetensors", str(model / "model.safetensors"))
        convert(model, files, to="tp=4", rules=rules)
        for path in sorted(files.rglob("*")):
            if path.is_file():
                client.upload_file(str(path), BUCKET, f"{target}/{path.relative_to(files)}")
    seconds_s = time.perf_counter() - began
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds_s": seconds_s, "peak_bytes": peak_bytes}))


def main() -> None:
    """All turns, one after the other, and their medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--turn", nargs=3)
    arguments = parser.parse_args()
    if arguments.turn:
        turn(arguments.turn[0], arguments.turn[1], Path(arguments.turn[2]))
        return
    import boto3
    from moto.server import ThreadedMotoServer

    os.environ |= {
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "tester",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    os.environ["AWS_ALLOW_HTTP"] = "true"
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    seen: dict[str, list[dict[str, float]]] = {"addresses": [], "in three steps": []}
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), arguments.size_mib)
        client.upload_file(f"{name}/model.safetensors", BUCKET, "model/model.safetensors")
        for number in range(arguments.repeat):
            for way, found in seen.items():
                target = f"{way[:2]}-{number}"
                with tempfile.TemporaryDirectory() as folder:
                    command = [sys.executable, __file__, "--turn", way, target, folder]
                    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))

    def read(target: str) -> dict[str, bytes]:
        """The shards below a target, by their names."""
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{target}/")
        keys = [one["Key"] for page in pages for one in page["Contents"]]
        return {
            key.removeprefix(target): client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            for key in keys
            if key.endswith(".safetensors")
        }

    if not read("ad-0") or read("ad-0") != read("in-0"):
        raise SystemExit("the two ways wrote different shards")
    server.stop()
    for way, found in seen.items():
        taken = sorted(one["seconds_s"] for one in found)
        peak = statistics.median(one["peak_bytes"] for one in found) / 2**20
        print(
            f"{way:16} {statistics.median(taken):6.2f} s "
            f"({taken[0]:.2f} to {taken[-1]:.2f})  peak {peak:.0f} MiB"
        )


if __name__ == "__main__":
    main()
