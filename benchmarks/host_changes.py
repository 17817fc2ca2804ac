"""What does it save to send other hosts only what changed?

The hosts are network namespaces whose links are held to a rate (`host_turns`); it takes root,
`iproute2` and `util-linux`. A trainer has weights in bfloat16, cut over its ranks; engines are
tensor parallel over the two ranks of a host, each of which has all norms, or have all on each rank.
Before each turn a share of the elements changes, scattered all over, and both ways take turns:

    everything   `Refit.run`, by the way that is chosen for it
    changes      `Refit.run` with `changed_only=True`

Told are medians, with the bytes that the hosts' interfaces count. Expected before the first run: at
1 % the bytes of changes are 1.5 % of all (three for each element of two), times the ranks that have
the same, where everything enters a host once; time follows bytes, until to compare takes it.

    python benchmarks/host_changes.py [SCENARIO ...] [--repeat 5] [--engine-ranks 2]
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from host_turns import MIB, SCENARIOS, Scenario, Turn, as_rank, run_scenarios, summarise

# How much of the weights changes.
SHARES = (0.0, 0.01, 0.03, 0.1, 1.0)
WIDTH = 512


def compare_changes(scenario: Scenario, repeat: int, engine_ranks: int) -> None:
    """Everything, and what changed since the run before, of which a share is drawn each time."""
    import torch
    import torch.distributed as dist

    import reshard
    from reshard.torch import Refit

    rank, ends = dist.get_rank(), [2 * scenario.trainer_hosts, 2 * scenario.hosts]
    trainer = reshard.DeviceMesh.of(fsdp=ends[0])
    copies = (ends[1] - ends[0]) // engine_ranks
    engine = reshard.DeviceMesh.of(dp=copies, tp=engine_ranks, devices=range(*ends))
    # Of each MiB a matrix, and a norm.
    shapes = {f"w{i}": (2 * WIDTH, WIDTH) for i in range(scenario.size_mib)}
    shapes |= {f"n{i}": (WIDTH,) for i in range(scenario.size_mib)}
    cuts = {2: ("fsdp, -", "tp, -"), 1: ("fsdp", "-")}

    def model(mesh: Any, side: int) -> dict[str, Any]:
        found = {}
        for name, shape in shapes.items():
            layout = reshard.spec(mesh, cuts[len(shape)][side]).layout(shape)
            own = layout.local_shapes.get(rank)
            found[name] = (None if own is None else torch.rand(own).to(torch.bfloat16), layout)
        return found

    source = model(trainer, 0)
    ways = {
        name: Refit.prepare(source, model(engine, 1), changed_only=only)
        for name, only in (("everything", False), ("changes", True))
    }
    firsts = {name: Turn.of(way.run) for name, way in ways.items()}
    if rank == 0:
        told = ", ".join(f"{name} {one.seconds:.3f} s" for name, one in firsts.items())
        of = f"{scenario.size_mib} MiB in bfloat16, engines of {engine_ranks} ranks"
        print(f"{scenario.name}: {of}; first runs: {told}")
    for share in SHARES:
        turns: dict[str, list[Turn]] = {name: [] for name in ways}
        for _ in range(repeat):
            for value, _ in source.values():
                if value is not None:
                    value[torch.rand(value.shape) < share] += 1
            for name, way in ways.items():
                turns[name].append(Turn.of(way.run))
        found = {name: summarise(of_way) for name, of_way in turns.items()}
        for name, one in found.items() if rank == 0 else ():
            ratios = [sum(one[k]) if k == "sent" else one[k] for k in ("seconds", "sent")]
            whole = [found["everything"]["seconds"], sum(found["everything"]["sent"])]
            of = ", ".join(f"{a / b:.3f}" for a, b in zip(ratios, whole, strict=True))
            print(
                f"  {share:4.0%} {name:10} {one['seconds']:6.3f} s ({one['spread'][0]:.3f}-"
                f"{one['spread'][1]:.3f}) {one['processor']:6.2f} s of processors, sent "
                f"{ratios[1] / MIB:.2f} MiB: of everything {of}, load {os.getloadavg()[0]:.1f}"
            )
    for way in ways.values():
        way.verify()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenarios", nargs="*", default=["two"], metavar="SCENARIO")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each way")
    parser.add_argument("--engine-ranks", type=int, default=2, choices=[1, 2])
    parser.add_argument("--limit-s", type=float, default=600.0, help="of one scenario")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        order = json.loads(options.rank)
        as_rank(order, lambda scenario: compare_changes(scenario, order["repeat"], order["of"]))
    unknown = set(options.scenarios) - SCENARIOS.keys()
    if unknown:
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    order = {"repeat": options.repeat, "of": options.engine_ranks}
    run_scenarios(__file__, options.scenarios, options.limit_s, order)


if __name__ == "__main__":
    main()
