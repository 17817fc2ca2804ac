"""One of two processes: an engine that fails within connect, and a trainer that ends normally."""

from __future__ import annotations

import os
import sys
from unittest import mock

import torch

from refit_models import expect, refused
from reshard.errors import LinkError
from reshard.torch import connect
from reshard.torch.links.membership import LinkMembers


def trainer(failing: str, ending: str) -> None:
    text = refused(
        lambda: connect(failing, "trainer", rank=0, ranks=1, timeout_s=4), LinkError, "0 of 1"
    )
    expect("closed the link after MemoryError: the card is full" in text, text)
    with connect(ending, "trainer", rank=0, ranks=1) as link:
        sync = link.prepare({"w": torch.arange(4.0)})
        sync.run()


def engine(failing: str, ending: str) -> None:
    with mock.patch.object(LinkMembers, "join", side_effect=MemoryError("the card is full")):
        refused(lambda: connect(failing, "engine", rank=0, ranks=1), MemoryError, "is full")
    link = connect(ending, "engine", rank=0, ranks=1)
    target = torch.zeros(4)
    sync = link.prepare({"w": target})
    sync.run()
    expect(torch.equal(target, torch.arange(4.0)), f"{target}")
    text = refused(sync.run, LinkError, "closed the link")
    expect(".cc" not in text and "/" not in text, text)
    link.close()


if __name__ == "__main__":
    side = trainer if os.environ["RANK"] == "0" else engine
    side(*(f"tcp://127.0.0.1:{port}" for port in sys.argv[1:]))
    os._exit(0)
