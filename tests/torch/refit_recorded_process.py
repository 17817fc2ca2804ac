"""One of two ranks with what a rank of Megatron-core had, refitted to the Hub's names and back.

The records are of `engines/megatron_core/test_links.py`, which found both to have equal logits. To
vLLM go those of which `engines/vllm/test_megatron.py` recorded what vLLM's ranks take.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from engines.layout_records import families_of, read_layouts
from engines.megatron_core import model_records
from rank_cases import report_each, reported
from refit_models import expect, expect_same
from reshard.errors import ReshardError
from reshard.torch import MegatronModel, Refit, is_usable, refit
from reshard.torch.vllm.reloading import StagedSources
from selection import choose

CASES = (
    "tensor",
    "stages_tied",
    "few_heads",
    "experts",
    "grouped",
    "grouped_parts",
    "copies_tied",
    "experts_in_stages_tied",
)
Tensors = dict[str, torch.Tensor]


def zeros(of: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in of.items()}


def to_the_hub_and_back(case: str, number: int) -> None:
    recorded = model_records.read(case)
    rank, saved = dist.get_rank(), recorded["saved"]
    model = MegatronModel(model_records.rebuild(recorded["ranks"][rank]))
    # Whole tensors on one rank, by the names of a checkpoint and of a module.
    # By default cases take turns: experts apart, and stacked.
    names = (saved, model_records.stacked(saved))
    chosen = choose(names[number % 2 :][:1], names)
    for right in chosen:
        target = zeros(right)
        refit(model, target if rank == 1 else None).verify()
        expect_same(target, right if rank == 1 else zeros(right), f"{case} on one rank")
    # Parts on both, as FSDP2 has them.
    mesh = init_device_mesh("cpu", (2,))
    for right in chosen:
        parts = {n: distribute_tensor(t.clone(), mesh, [Shard(0)]) for n, t in right.items()}
        target = {n: torch.zeros_like(t) for n, t in parts.items()}
        refit(model, target)
        for name, part in parts.items():
            found = target[name]
            assert isinstance(found, DTensor)
            expect(torch.equal(found.to_local(), part.to_local()), f"{case}, part of {name}")
            expect(is_usable(found), name)
    # And Megatron's from the Hub's, but for what is padding.
    empty = model_records.rebuild(recorded["ranks"][rank])
    for chunk in empty:
        for tensor in chunk.state_dict().values():
            tensor.data.zero_()
    refit(saved if rank == 0 else None, MegatronModel(empty))
    vocabulary = saved["model.embed_tokens.weight"].shape[0]
    for chunk, right in zip(empty, model.chunks, strict=True):  # type: ignore[arg-type]
        expected = right.state_dict()
        for name, tensor in chunk.state_dict().items():
            length = tensor.shape[0]
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                first = length * recorded["ranks"][rank]["groups"]["tp"].index(rank)
                length = max(0, min(length, vocabulary - first))
            same = torch.equal(tensor[:length], expected[name][:length])
            expect(same, f"{case}: {name} from the Hub")


def to_vllm(case: str) -> int:
    """Each parameter of vLLM's ranks is what its loader makes of what transformers saved."""
    recorded = model_records.read(case)
    rank, saved = dist.get_rank(), recorded["saved"]
    model = MegatronModel(model_records.rebuild(recorded["ranks"][rank]))
    filled = 0
    for _, parallelism, _, layout in read_layouts("vllm_of_megatron", case):
        (traced,) = (one for one in layout.ranks if one.rank == rank)
        staged = StagedSources(traced, layout.sources, rank)
        refit(model, staged.tensors).verify()
        for name, parameter in staged.parameters.items():
            found = staged.fill(name)
            for piece in parameter.pieces:
                where = tuple(map(slice, piece.box.start, piece.box.stop))
                right = saved[piece.source].contiguous()
                view = right.as_strided(piece.box.shape, piece.view.strides, piece.view.offset)
                expect(torch.equal(found[where], view), f"{case}, {parallelism}: {name}")
                filled += view.numel()
    return filled


def refused(model: MegatronModel, told: str, target: Any, **options: Any) -> None:
    try:
        Refit.prepare(model, target, **options)
    except ReshardError as error:
        expect(told in str(error), f"{told!r} is not in {error}")
        return
    raise SystemExit(f"nothing was raised where {told!r} was expected")


def parameters_without_names_on_the_hub_are_refused() -> None:
    recorded = model_records.read("tensor")
    rank = dist.get_rank()
    target = zeros(recorded["saved"]) if rank == 0 else None

    def changed(**config: Any) -> MegatronModel:
        own = dict(recorded["ranks"][rank])
        # One rank says it, all raise.
        own["config"] = {**own["config"], **(config if rank == 1 else {})}
        return MegatronModel(model_records.rebuild(own))

    refused(changed(layernorm_zero_centered_gamma=True), "its norms add 1", target)
    refused(changed(rotary_interleaved=True), "a Megatron model that has no like", target)
    refused(changed(attention_output_gate=True), "queries have gates", target)
    refused(changed(gated_linear_unit=False), "linear_fc1 is one layer", target)
    right = changed()
    more = dict(recorded["ranks"][rank])
    scan = ("decoder.layers.1.mixer.A_log", torch.ones(4), {})
    more["chunks"] = [[*more["chunks"][0], scan]]
    unknown = MegatronModel(model_records.rebuild(more))
    refused(unknown, "decoder.layers.1.mixer.A_log: no names on the Hub", target)
    told = "config says num_key_value_heads=4, but the model has 2"
    refused(replace(right, config={"model_type": "qwen3", "num_key_value_heads": 4}), told, target)
    refused(replace(right, config={"model_type": "bert"}), "no names of 'megatron'", target)
    refused(replace(right, config={"model_type": "none"}), "no recipe is for the model", target)
    refused(replace(right, config={}), "config={} has no model_type", target)
    # A plain part is no whole tensor.
    plain = torch.nn.Module()
    plain.weight = torch.nn.Parameter(torch.ones(2, 2))
    plain.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    refused(plain, "weight: a part of a tensor, by Megatron's", {"weight": torch.ones(2, 2)})  # type: ignore[arg-type]
    # Names that are given are used in place of these.
    refused(right, "not in the source", target, source_names={"a": "b"})


def main() -> None:
    dist.init_process_group("gloo")
    for number, case in enumerate(CASES):
        with reported(f"{case} moves to the Hub's names and back"):
            to_the_hub_and_back(case, number)
    for case in families_of("vllm_of_megatron"):
        with reported(f"{case} moves to the ranks of vLLM"):
            expect(to_vllm(case) > 0, "vLLM takes nothing")
    report_each([parameters_without_names_on_the_hub_are_refused])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
