"""The shipped recipes on the parameters of published models."""

from __future__ import annotations

import math

import pytest

from recipes.published_models import LLAMA_3_8B, MINI_LM, TINY_LLAMA, PublishedModel
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import Assignment, assign
from reshard.recipes.library import choose_recipe, load_recipe, shipped_recipes
from reshard.sharding import spec


def _assigned(model: PublishedModel, **mesh: int) -> Assignment:
    recipe = choose_recipe(model.config)
    # What is held where is counted here, also where ranks could not compute with it.
    allow = ["uncomputable"]
    return assign(model.shapes, DeviceMesh.of(**mesh), (), recipe, model.config, allow=allow)


def _elements(found: Assignment, rank: int) -> int:
    """How many elements a rank holds, halves of a tensor counted from its own local shapes."""
    return sum(math.prod(layout.local_shape(rank) or (0,)) for layout in found.layouts.values())


def test_the_parameter_lists_have_the_published_sizes() -> None:
    assert MINI_LM.parameters - 512 == 22_713_216
    assert len(MINI_LM.shapes) == 104
    assert LLAMA_3_8B.parameters == 8_030_261_248
    assert len(LLAMA_3_8B.shapes) == 291
    assert TINY_LLAMA.parameters == 1_100_048_384
    assert len(TINY_LLAMA.shapes) == 201


@pytest.mark.parametrize("model", [MINI_LM, LLAMA_3_8B, TINY_LLAMA])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 16])
def test_no_tensor_is_unmatched_or_cut_short(model: PublishedModel, tp: int) -> None:
    found = _assigned(model, dp=2, tp=tp)
    assert found.unknown == ()
    assert found.unused_axes == ("dp",)
    for name, layout in found.layouts.items():
        for dimension, table in enumerate(layout.tables):
            assert table.uncovered() == [], (name, dimension)


# Parameters that tensor parallelism leaves whole on every rank, counted by hand.
MINI_LM_REPLICATED = (
    (1 + 384) * 512  # position ids and embeddings
    + 2 * 384  # token types
    + (1 + 2 * 6) * 2 * 384  # layer norms
    + 6 * 2 * 384  # biases of the row-parallel layers
    + 384 * 384
    + 384  # pooler
)


def test_mini_lm_over_four_ranks() -> None:
    found = _assigned(MINI_LM, tp=4)
    # The vocabulary does not divide: 30522 = 7631 * 3 + 7629.
    embedding = found.layouts["embeddings.word_embeddings.weight"]
    rows = [7631, 7631, 7631, 7629]
    assert [embedding.local_shape(rank) for rank in range(4)] == [(n, 384) for n in rows]
    cut = MINI_LM.parameters - MINI_LM_REPLICATED - 30522 * 384
    assert cut % 4 == 0
    for rank in range(4):
        assert _elements(found, rank) == MINI_LM_REPLICATED + cut // 4 + rows[rank] * 384


def test_mini_lm_is_cut_by_whole_heads() -> None:
    # 12 heads of 32 over 5 ranks: 3, 3, 3, 3 and none; by rows it would be 77 each.
    found = _assigned(MINI_LM, tp=5)
    at = "encoder.layer.0.attention"
    for rank, heads in enumerate([3, 3, 3, 3, 0]):
        for name in ("query", "key", "value"):
            assert found.layouts[f"{at}.self.{name}.weight"].local_shape(rank) == (heads * 32, 384)
            assert found.layouts[f"{at}.self.{name}.bias"].local_shape(rank) == (heads * 32,)
        assert found.layouts[f"{at}.output.dense.weight"].local_shape(rank) == (384, heads * 32)
        assert found.layouts[f"{at}.output.dense.bias"].local_shape(rank) == (384,)


def test_feed_forward_layers_are_cut_alike() -> None:
    for model, first, second in (
        (MINI_LM, "encoder.layer.5.intermediate.dense", "encoder.layer.5.output.dense"),
        (LLAMA_3_8B, "model.layers.31.mlp.up_proj", "model.layers.31.mlp.down_proj"),
        (LLAMA_3_8B, "model.layers.31.mlp.gate_proj", "model.layers.31.mlp.down_proj"),
    ):
        layouts = _assigned(model, tp=7).layouts
        up, down = layouts[f"{first}.weight"], layouts[f"{second}.weight"]
        assert up.tables[0] is down.tables[1]
        assert up.tables[0].parts == 7
        assert up.tables[1].parts == down.tables[0].parts == 1


@pytest.mark.parametrize("prefix", ["bert.", "roberta.", "model.encoder_q."])
def test_bert_names_with_a_prefix(prefix: str) -> None:
    recipe, mesh = load_recipe("bert"), DeviceMesh.of(tp=4)
    shapes = {f"{prefix}{name}": shape for name, shape in MINI_LM.shapes.items()}
    found = assign(shapes, mesh, (), recipe, MINI_LM.config)
    plain = assign(MINI_LM.shapes, mesh, (), recipe, MINI_LM.config)
    assert found.specs == {f"{prefix}{name}": cut for name, cut in plain.specs.items()}
    assert found.unknown == ()


def test_bert_heads_for_tasks() -> None:
    expected = {
        "cls.predictions.bias": ((30522,), "tp"),
        "cls.predictions.decoder.bias": ((30522,), "tp"),
        "cls.predictions.decoder.weight": ((30522, 384), "tp, -"),
        "cls.predictions.transform.LayerNorm.gamma": ((384,), "-"),
        "cls.predictions.transform.dense.bias": ((384,), "-"),
        "cls.predictions.transform.dense.weight": ((384, 384), "-, -"),
        "cls.seq_relationship.bias": ((2,), "-"),
        "cls.seq_relationship.weight": ((2, 384), "-, -"),
        "lm_head.bias": ((50265,), "tp"),
        "lm_head.decoder.bias": ((50265,), "tp"),
        "lm_head.decoder.weight": ((50265, 384), "tp, -"),
        "lm_head.dense.weight": ((384, 384), "-, -"),
        "lm_head.layer_norm.weight": ((384,), "-"),
        "classifier.weight": ((3, 384), "-, -"),
        "classifier.dense.weight": ((384, 384), "-, -"),
        "classifier.out_proj.bias": ((3,), "-"),
        "qa_outputs.weight": ((2, 384), "-, -"),
        "bert.embeddings.token_type_ids": ((1, 512), "-, -"),
        "bert.encoder.layer.3.attention.self.distance_embedding.weight": ((1023, 32), "-, -"),
        "bert.encoder.layer.3.crossattention.self.key.bias": ((384,), "tp@heads12"),
    }
    shapes = {name: shape for name, (shape, _) in expected.items()}
    found = assign(shapes, DeviceMesh.of(tp=4), (), load_recipe("bert"), MINI_LM.config)
    assert {name: str(cut) for name, cut in found.specs.items()} == {
        name: text for name, (_, text) in expected.items()
    }
    assert found.unknown == ()


@pytest.mark.parametrize(
    ("model", "norms", "key_value", "key_value_heads"),
    [
        (LLAMA_3_8B, 65 * 4096, 32 * 2 * 1024 * 4096, 8),
        (TINY_LLAMA, 45 * 2048, 22 * 2 * 256 * 2048, 4),
    ],
)
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_llama_ranks_hold_their_tensor_parallel_shards(
    model: PublishedModel, norms: int, key_value: int, key_value_heads: int, tp: int
) -> None:
    found = _assigned(model, dp=2, tp=tp)
    cut = model.parameters - norms - key_value
    assert cut % tp == 0
    expected = norms + cut // tp + key_value // min(tp, key_value_heads)
    for rank in (0, 1, tp, 2 * tp - 1):
        assert _elements(found, rank) == expected


@pytest.mark.parametrize("tp", [4, 16])
def test_llama_queries_lie_with_their_key_value_heads(tp: int) -> None:
    layouts = _assigned(LLAMA_3_8B, tp=tp).layouts
    at, head = "model.layers.0.self_attn", 4096 // 32
    for rank in range(tp):
        ((queries,), (keys,), (values,), (outputs,)) = (
            layouts[f"{at}.{name}_proj.weight"].boxes(rank) for name in "qkvo"
        )
        first, last = queries.start[0] // head, queries.stop[0] // head
        assert last - first == 32 // tp
        assert (keys.start[0] // head, keys.stop[0] // head) == (first // 4, (last - 1) // 4 + 1)
        assert keys == values
        assert (outputs.start[1], outputs.stop[1]) == (queries.start[0], queries.stop[0])


def test_llama_before_grouped_queries() -> None:
    """Configs without key/value heads, biases, and the rotary buffers of old conversions."""
    expected = {
        "model.layers.0.self_attn.k_proj.weight": ((256, 256), "tp@heads8, -"),
        "model.layers.0.self_attn.q_proj.bias": ((256,), "tp@heads8"),
        "model.layers.0.self_attn.k_proj.bias": ((256,), "tp@heads8"),
        "model.layers.0.self_attn.v_proj.bias": ((256,), "tp@heads8"),
        "model.layers.0.self_attn.o_proj.bias": ((256,), "-"),
        "model.layers.0.mlp.gate_proj.bias": ((512,), "tp"),
        "model.layers.0.mlp.up_proj.bias": ((512,), "tp"),
        "model.layers.0.mlp.down_proj.bias": ((256,), "-"),
        "model.layers.0.self_attn.rotary_emb.inv_freq": ((16,), "-"),
        "model.rotary_emb.inv_freq": ((16,), "-"),
        "embed_tokens.weight": ((1000, 256), "tp, -"),
        "norm.weight": ((256,), "-"),
        "score.weight": ((2, 256), "-, -"),
    }
    shapes = {name: shape for name, (shape, _) in expected.items()}
    config = {"model_type": "llama", "num_attention_heads": 8}
    found = assign(shapes, DeviceMesh.of(tp=4), (), load_recipe("llama"), config)
    assert {name: str(cut) for name, cut in found.specs.items()} == {
        name: text for name, (_, text) in expected.items()
    }
    assert found.unknown == ()


@pytest.mark.parametrize("model", [MINI_LM, TINY_LLAMA])
def test_a_mesh_without_tp_holds_copies(model: PublishedModel) -> None:
    found = _assigned(model, dp=2)
    assert found.unknown == ()
    for name, shape in model.shapes.items():
        assert found.specs[name] is spec(DeviceMesh.of(dp=2), "...", ndim=len(shape))


@pytest.mark.parametrize("name", sorted(one for one in shipped_recipes() if load_recipe(one).names))
def test_a_name_of_two_conventions_is_the_same_tensor(name: str) -> None:
    # Which of them a checkpoint is in cannot be told by its names.
    meanings: dict[str, set[str]] = {}
    for table in load_recipe(name).names.values():
        for pattern, meaning in table.items():
            meanings.setdefault(pattern, set()).add(repr(meaning))
    assert {pattern: found for pattern, found in meanings.items() if len(found) > 1} == {}
