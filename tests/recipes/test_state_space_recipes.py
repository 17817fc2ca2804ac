"""Recipes of state-space models, linear attention and hybrids: the rows that ranks hold."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest

from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.notation.megatron import parse_megatron
from reshard.recipes.assignment import Assignment, assign
from reshard.recipes.library import choose_recipe, load_recipe
from reshard.recipes.naming import Fusion, find_by_pattern, find_foreign_name

# Codestral's sizes, and Nemotron-H's, Granite 4's and Qwen3-Next's of one layer each.
MAMBA2 = {
    "model_type": "mamba2",
    "num_heads": 128,
    "head_dim": 64,
    "hidden_size": 4096,
    "n_groups": 8,
    "state_size": 128,
    "num_hidden_layers": 64,
}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention"],
    "n_routed_experts": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
}
GRANITE = {
    "model_type": "granitemoehybrid",
    "mamba_n_heads": 48,
    "mamba_expand": 2,
    "hidden_size": 1536,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "num_hidden_layers": 40,
    "num_local_experts": 62,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "moe_intermediate_size": 512,
}


def assigned(config: Mapping[str, object], mesh: str, **shapes: tuple[int, ...]) -> Assignment:
    recipe = choose_recipe(config)
    assert recipe is not None
    named = {name.replace("__", "."): shape for name, shape in shapes.items()}
    found = assign(named, DeviceMesh.parse(mesh), (), recipe, config)
    assert found.unknown == ()
    return found


def rows_of(layout: Layout, rank: int) -> list[int]:
    """The indices of the first dimension that a rank holds, in its order."""
    (cell,) = layout.cells_of(rank)
    table = layout.tables[0]
    part = int(layout.cell_part[cell, 0])
    found = np.full(int(table.local_lengths[part]), -1)
    for start, stop, local, _ in table.runs_of(part):
        found[local : local + stop - start] = np.arange(start, stop)
    return [int(row) for row in found]


def parts_of(lengths: list[int]) -> list[list[int]]:
    """The rows of parts that lie one behind another."""
    edges = np.cumsum([0, *lengths])
    return [list(range(a, b)) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("tp", [2, 8, 16, 32])
def test_a_rank_has_its_heads_and_the_groups_that_they_use(tp: int) -> None:
    inner, state, heads = 8192, 1024, 128
    name = "backbone.layers.0.mixer.in_proj.weight"
    found = assigned(MAMBA2, f"tp={tp}", **{name: (2 * inner + 2 * state + heads, 4096)})
    z, x, b, c, dt = parts_of([inner, inner, state, state, heads])
    for rank in range(tp):
        own = range(rank * heads // tp, (rank + 1) * heads // tp)
        # A group of 16 heads has 128 rows of B and of C.
        groups = sorted({head // 16 for head in own})
        of_heads = [head * 64 + i for head in own for i in range(64)]
        of_groups = [group * 128 + i for group in groups for i in range(128)]
        assert rows_of(found.layouts[name], rank) == [
            *(z[i] for i in of_heads),
            *(x[i] for i in of_heads),
            *(b[i] for i in of_groups),
            *(c[i] for i in of_groups),
            *(dt[i] for i in own),
        ]


def test_the_convolution_runs_over_the_same_rows() -> None:
    names = {"backbone.layers.3.mixer.conv1d.weight": (10240, 1, 4)}
    names |= {"backbone.layers.3.mixer.conv1d.bias": (10240,)}
    found = assigned(MAMBA2, "tp=16", **names)
    x, b, c = parts_of([8192, 1024, 1024])
    for layout in found.layouts.values():
        assert rows_of(layout, 5) == x[5 * 512 : 6 * 512] + b[2 * 128 : 3 * 128] + c[256:384]


def test_partition_sizes_of_megatron_agree() -> None:
    """While there are groups for all ranks; the z of its ranks is 8192 / 4 rows, and so on."""
    name = "backbone.layers.0.mixer.in_proj.weight"
    found = assigned(MAMBA2, "tp=4", **{name: (18560, 4096)})
    text = "tp=4 | partition_dim=0 partition_sizes=2048,2048,256,256,32 ndim=2"
    theirs = parse_megatron(text).layout((18560, 4096))
    assert theirs.tables[0] is found.layouts[name].tables[0]


def test_one_group_is_held_by_all_ranks() -> None:
    name = "model.layers.0.mamba.in_proj.weight"
    found = assigned(GRANITE, "tp=4", **{name: (2 * 3072 + 2 * 128 + 48, 1536)})
    assert all(set(range(6144, 6400)) <= set(rows_of(found.layouts[name], r)) for r in range(4))


def test_granite_has_its_experts_under_both_names() -> None:
    hub = {
        "model.layers.0.block_sparse_moe.input_linear.weight": (62, 1024, 1536),
        "model.layers.0.block_sparse_moe.output_linear.weight": (62, 1536, 512),
        "model.layers.0.block_sparse_moe.router.layer.weight": (62, 1536),
    }
    own = {
        "model.layers.0.block_sparse_moe.experts.gate_up_proj": (62, 1024, 1536),
        "model.layers.0.block_sparse_moe.experts.down_proj": (62, 1536, 512),
        "model.layers.0.block_sparse_moe.router.weight": (62, 1536),
    }
    found = assigned(GRANITE, "ep=2,tp=4,fsdp=2", **hub, **own)
    for theirs, ours in zip(hub, own, strict=True):
        assert found.layouts[theirs] is found.layouts[ours]


def test_names_of_stacked_experts() -> None:
    """transformers 5 calls Nemotron-H's model otherwise than the Hub, too."""
    table = load_recipe("nemotron_h").naming("stacked", NEMOTRON_H)
    found = {
        name: find_foreign_name(name, table)
        for name in (
            "backbone.layers.0.mixer.A_log",
            "backbone.norm_f.weight",
            "backbone.layers.1.mixer.experts.7.up_proj.weight",
            "lm_head.weight",
        )
    }
    assert [match and match[0] for match in found.values()] == [
        "model.layers.0.mixer.A_log",
        "model.norm_f.weight",
        "model.layers.1.mixer.experts.up_proj",
        None,
    ]
    stack = find_by_pattern("model.layers.1.mixer.experts.up_proj", table)
    assert isinstance(stack, Fusion)
    assert stack.tensors[127] == "backbone.layers.1.mixer.experts.127.up_proj.weight"
    assert find_by_pattern("model.layers.0.mixer.D", table) == "backbone.layers.0.mixer.D"
    lfm2 = load_recipe("lfm2").naming("stacked", {"num_experts": 3})
    stack = find_by_pattern("model.layers.1.feed_forward.experts.gate_up_proj", lfm2)
    assert isinstance(stack, Fusion)
    assert [name[-len("0.w1.weight") :] for name in stack.tensors[:2]] == [
        "0.w1.weight",
        "0.w3.weight",
    ]


def test_layers_that_predict_further_tokens_live_at_the_last_stage() -> None:
    names = {
        "backbone.layers.0.mixer.in_proj.weight": (10304, 2688),
        "backbone.layers.3.mixer.q_proj.weight": (4096, 2688),
        "mtp.layers.0.mixer.q_proj.weight": (4096, 2688),
        "mtp.layers.0.eh_proj.weight": (2688, 5376),
        "mtp.layers.1.mixer.experts.127.up_proj.weight": (1856, 2688),
    }
    found = assigned(NEMOTRON_H, "pp=2,ep=4,tp=2", **names)
    only = [dict(spec.only) for spec in found.specs.values()]
    assert only == [{"pp": (0,)}, *[{"pp": (1,)}] * 3, {"pp": (1,), "ep": (3,)}]


def test_linear_attention_is_cut_by_key_heads() -> None:
    names = {
        "model.layers.0.linear_attn.in_proj_qkvz.weight": (16 * (2 * 128 + 4 * 128), 2048),
        "model.layers.0.linear_attn.in_proj_ba.weight": (64, 2048),
        "model.layers.0.linear_attn.conv1d.weight": (8192, 1, 4),
        "model.layers.0.linear_attn.A_log": (32,),
        "model.layers.0.linear_attn.norm.weight": (128,),
        "model.layers.3.self_attn.q_proj.weight": (2 * 16 * 256, 2048),
        "mtp.fc.weight": (2048, 4096),
        "mtp.pre_fc_norm_hidden.weight": (2048,),
        "mtp.layers.0.self_attn.k_proj.weight": (512, 2048),
    }
    found = assigned(QWEN3_NEXT, "pp=2,tp=8", **names)
    qkvz, ba, conv, a_log, norm, query, *further = names
    # Two key heads a rank, with what their value heads have.
    assert rows_of(found.layouts[qkvz], 2) == list(range(2 * 2 * 768, 3 * 2 * 768))
    assert rows_of(found.layouts[ba], 2) == list(range(16, 24))
    query_rows, key_rows, value_rows = parts_of([2048, 2048, 4096])
    assert rows_of(found.layouts[conv], 2) == (
        query_rows[512:768] + key_rows[512:768] + value_rows[1024:1536]
    )
    assert rows_of(found.layouts[a_log], 2) == [8, 9, 10, 11]
    assert found.layouts[norm].tables[0].local_lengths.tolist() == [128]
    # Of every head its query and its gate.
    assert rows_of(found.layouts[query], 2) == list(range(4 * 512, 6 * 512))
    assert all(dict(found.specs[name].only) == {"pp": (1,)} for name in further)


def test_key_heads_are_shared_by_the_ranks_whose_value_heads_use_them() -> None:
    """Where query, key and value are not fused by key head, there may be more ranks than those."""
    config = QWEN3_NEXT | {"model_type": "qwen3_5_text", "linear_num_value_heads": 64}
    names = {
        "model.layers.0.linear_attn.in_proj_qkv.weight": (2 * 2048 + 8192, 2048),
        "model.layers.0.linear_attn.conv1d.weight": (2 * 2048 + 8192, 1, 4),
        "model.layers.0.linear_attn.in_proj_z.weight": (8192, 2048),
        "model.layers.0.linear_attn.in_proj_a.weight": (64, 2048),
    }
    found = assigned(config, "tp=32", **names)
    fused, conv, z, a = (found.layouts[name] for name in names)
    query_rows, key_rows, value_rows = parts_of([2048, 2048, 8192])
    # Rank 5 has value heads 10 and 11, which use key head 2.
    expected = query_rows[256:384] + key_rows[256:384] + value_rows[1280:1536]
    assert rows_of(fused, 5) == rows_of(conv, 5) == expected
    assert rows_of(z, 5) == list(range(1280, 1536))
    assert rows_of(a, 5) == [10, 11]
