"""What the shipped recipes make of published models, against counts made by hand."""

from __future__ import annotations

import itertools
import math
import re
from functools import cache

import numpy as np
import pytest

from recipes.published_models import (
    DEEPSEEK_V3,
    GPT2,
    LLAMA_3_8B,
    LLAMA_3_405B,
    MINI_LM,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    MODELS,
    QWEN2_7B,
    QWEN2_HALF_B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_HALF_B,
    SHORT_DEEPSEEK_V3,
    TINY_LLAMA,
    Config,
    PublishedModel,
)
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import Assignment, assign
from reshard.recipes.library import choose_recipe, load_recipe
from reshard.recipes.recipe import Recipe
from selection import choose, keep_covering, keep_spread, keep_where

EXPERTS = {"mixtral": 8, "qwen3_moe": 128, "deepseek_v3": 256}


def recipe_of(model: PublishedModel, **options: str) -> Recipe:
    recipe = choose_recipe(model.config)
    assert recipe is not None
    return recipe.with_options(options)


def assigned(model: PublishedModel, mesh: DeviceMesh | str, **options: str) -> Assignment:
    mesh = DeviceMesh.parse(mesh) if isinstance(mesh, str) else mesh
    recipe = recipe_of(model, **options)
    # What is held where is counted here, also where ranks could not compute with it.
    return assign(model.shapes, mesh, (), recipe, model.config, allow=["uncomputable"])


def elements(model: PublishedModel, found: Assignment) -> dict[int, int]:
    return found.rank_bytes(dict.fromkeys(model.shapes, 1))


def test_the_parameter_lists_have_the_published_sizes() -> None:
    assert {name: (len(model.shapes), model.parameters) for name, model in MODELS.items()} == {
        "bert": (104, 22_713_216 + 512),
        "gpt2": (160, 124_439_808 + 12 * 1024 * 1024),
        "llama": (291, 8_030_261_248),
        "tiny_llama": (201, 1_100_048_384),
        "mistral": (291, 7_241_732_096),
        "qwen2_tied": (290, 494_032_768),
        "qwen2": (339, 7_615_616_512),
        "qwen3_tied": (310, 596_049_920),
        "qwen3": (399, 8_190_735_360),
        "mixtral": (995, 46_702_792_704),
        "qwen3_moe": (18_867, 30_532_122_624),
        "deepseek_v3": (91_991, 684_531_386_000),
    }
    assert LLAMA_3_405B.parameters == 405_853_388_800
    main = [
        math.prod(shape)
        for name, shape in DEEPSEEK_V3.shapes.items()
        if not name.startswith("model.layers.61.") and not name.endswith("_scale_inv")
    ]
    assert sum(main) == 671_026_419_200


def test_every_model_is_of_its_own_recipe() -> None:
    for name, model in MODELS.items():
        recipe = recipe_of(model)
        assert recipe.name == str(model.config["model_type"])
        assert name.startswith(recipe.name) or name == "tiny_llama"


MESHES = [
    "tp=2",
    "tp=3",
    "fsdp=3",
    "pp=4",
    "ep=3",
    "dp=2,tp=4",
    "pp=3,tp=2",
    "pp=2,ep=3,tp=2",
    "ep=2,etp=2,fsdp=3",
    "pp=5,dp=2,ep=2,etp=3",
    "pp=2,dp=2,fsdp=2,ep=2,tp=2",
]


EVERY_MODEL = "every model on every mesh; each model and each mesh is in a default case"


@pytest.mark.parametrize(
    ("name", "text"),
    keep_covering(
        1,
        itertools.product([name for name in MODELS if name != "deepseek_v3"], MESHES),
        EVERY_MODEL,
    ),
)
def test_every_tensor_is_reported_and_whole(name: str, text: str) -> None:
    check_places(MODELS[name], DeviceMesh.parse(text))


@pytest.mark.exhaustive(reason="92,000 tensors; the short model has each kind of them")
def test_every_tensor_of_deepseek_v3_is_reported_and_whole() -> None:
    check_places(DEEPSEEK_V3, DeviceMesh.parse("pp=5,dp=2,ep=6,etp=3"))


# 128 heads of 192 rows over three ranks would cut blocks of 128 through.
@pytest.mark.parametrize(
    "text", keep_spread(3, [text for text in MESHES if text != "tp=3"], EVERY_MODEL)
)
def test_every_tensor_of_a_short_deepseek_v3_is_reported_and_whole(text: str) -> None:
    check_places(SHORT_DEEPSEEK_V3, DeviceMesh.parse(text))


def check_places(model: PublishedModel, mesh: DeviceMesh) -> None:
    """Every tensor is on its stage and with its expert, and cut without holes."""
    found = assigned(model, mesh)
    assert found.unknown == ()
    kind = str(model.config["model_type"])
    expected_axes = {"tp", "fsdp", "pp"} | ({"ep", "etp"} if kind in EXPERTS else set())
    assert set(found.unused_axes) == set(mesh.axis_names) - expected_axes
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    stages, groups = sizes.get("pp", 1), sizes.get("ep", 1)
    layers = int(str(model.config.get("num_hidden_layers", model.config.get("n_layer"))))
    stage_of = {
        layer: stage
        for stage, chosen in enumerate(np.array_split(np.arange(layers), stages))
        for layer in chosen.tolist()
    }
    at_first = re.compile(r"embeddings\.|wpe\.|wte\.|model\.embed_tokens")
    is_tied = bool(model.config.get("tie_word_embeddings")) or kind == "gpt2"
    for table in {table for layout in found.layouts.values() for table in layout.tables}:
        assert table.uncovered() == []
    for name, layout in found.layouts.items():
        layer = re.search(r"(?:layers?|h)\.(\d+)\.", name)
        expert = re.search(r"experts\.(\d+)\.", name)
        if layer:
            expected = {stage_of.get(int(layer[1]), stages - 1)}
        elif at_first.match(name):
            tied = is_tied and not name.startswith(("wpe", "embeddings"))
            expected = {0, stages - 1} if tied else {0}
        else:
            expected = {stages - 1}
        held_by = layout.holders
        if "pp" in sizes:
            assert coordinates(mesh, "pp", held_by) == expected, name
        if "ep" in sizes:
            chunk = -(-EXPERTS.get(kind, 1) // groups)
            among = {int(expert[1]) // chunk} if expert else set(range(groups))
            assert coordinates(mesh, "ep", held_by) == among, name
        here = mesh.size * len(expected) // stages // (groups if expert else 1)
        assert len(held_by) == here, name


@cache
def coordinates(mesh: DeviceMesh, axis: str, ranks: tuple[int, ...]) -> set[int]:
    along = mesh.coordinates([axis])
    return {int(along[rank]) for rank in ranks}


# What tensor parallelism leaves whole: norms, biases added after the sum, routers, small ends.
WHOLE_UNDER_TP = {
    "bert": r"LayerNorm|output\.dense\.bias|position|token_type|pooler",
    "gpt2": r"ln_|wpe|\.attn\.bias|c_proj\.bias",
    "llama": r"norm",
    "mistral": r"norm",
    "qwen2": r"norm",
    "qwen3": r"norm",
    "mixtral": r"norm|moe\.gate\.",
    "qwen3_moe": r"norm|mlp\.gate\.",
    "deepseek_v3": r"norm|mlp\.gate\.|_a_proj|eh_proj",
}


@pytest.mark.parametrize(
    "name",
    keep_where(
        lambda name: name not in ("deepseek_v3", "llama", "mistral", "qwen2_tied", "qwen3_tied"),
        [*MODELS, "short_deepseek_v3"],
        "a smaller model of the same recipe is a default case",
    ),
)
def test_nothing_is_replicated_by_accident(name: str) -> None:
    model = MODELS.get(name, SHORT_DEEPSEEK_V3)
    whole = re.compile(WHOLE_UNDER_TP[str(model.config["model_type"])])
    tensor_parallel = assigned(model, "tp=2")
    for tensor, layout in tensor_parallel.layouts.items():
        is_whole = layout.local_shape(0) == layout.shape
        assert is_whole == bool(whole.search(tensor)), tensor
    # FSDP cuts everything, but for buffers that are the same in every layer.
    for tensor, layout in assigned(model, "fsdp=2").layouts.items():
        is_whole = layout.local_shape(0) == layout.shape
        assert is_whole == bool(re.search(r"position_ids|\.attn\.bias", tensor)) or (
            layout.shape[0] == 1
        ), tensor


# By hand: elements of one rank, for meshes whose sizes divide everything.


def shared(stages: int, stage: int, first: float, layer: float, layers: int, last: float) -> float:
    """Elements on a stage of a model whose layers are all alike."""
    here = len(np.array_split(np.arange(layers), stages)[stage])
    return here * layer + first * (stage == 0) + last * (stage == stages - 1)


def number(config: Config, key: str) -> int:
    return int(str(config[key]))


def dense_elements(model: PublishedModel, mesh: DeviceMesh, rank: int) -> float:
    """Llama and its kin, Mixtral and Qwen3-MoE: see the comment at each line."""
    config, shapes = model.config, model.shapes
    sizes = dict.fromkeys(("tp", "fsdp", "ep", "pp"), 1) | dict(
        zip(mesh.axis_names, mesh.shape, strict=True)
    )
    tp, fsdp, ep, pp = (sizes[axis] for axis in ("tp", "fsdp", "ep", "pp"))
    etp = sizes.get("etp", tp)
    at = "model.layers.0"
    vocabulary, hidden = shapes["model.embed_tokens.weight"]
    (query_rows, _) = shapes[f"{at}.self_attn.q_proj.weight"]
    (key_rows, _) = shapes[f"{at}.self_attn.k_proj.weight"]
    by_heads = query_rows * hidden * 2  # queries and output
    by_key_heads = key_rows * hidden * 2  # keys and values
    norms = 2 * hidden
    if f"{at}.self_attn.q_proj.bias" in shapes:
        by_heads += query_rows
        by_key_heads += 2 * key_rows
    if f"{at}.self_attn.q_norm.weight" in shapes:
        norms += 2 * 128
    layer = norms + by_heads / tp + by_key_heads / min(tp, number(config, "num_key_value_heads"))
    experts = EXPERTS.get(str(config["model_type"]))
    if experts is None:
        layer += 3 * hidden * shapes[f"{at}.mlp.up_proj.weight"][0] / tp
    else:
        intermediate = config.get("moe_intermediate_size", config.get("intermediate_size"))
        one = 3 * hidden * int(str(intermediate))
        layer += experts * hidden + experts / ep * one / etp  # the router, and its share of them
    embedding = vocabulary * hidden / tp
    is_tied = bool(config["tie_word_embeddings"])
    layers, stage = number(config, "num_hidden_layers"), int(mesh.coordinates(["pp"])[rank])
    if is_tied and pp == 1:
        return (layers * layer + hidden + embedding) / fsdp
    return shared(pp, stage, embedding, layer, layers, hidden + embedding) / fsdp


HELD = [
    LLAMA_3_8B,
    LLAMA_3_405B,
    TINY_LLAMA,
    MISTRAL_7B,
    QWEN2_7B,
    QWEN2_HALF_B,
    QWEN3_8B,
    QWEN3_HALF_B,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
]


@pytest.mark.parametrize(
    ("model", "text"),
    keep_covering(
        1,
        itertools.product(
            HELD,
            [
                "pp=1,tp=1",
                "pp=1,tp=2",
                "pp=1,dp=2,tp=2",
                "pp=1,fsdp=2,dp=2",
                "pp=1,fsdp=2,tp=2",
                "pp=3,tp=2",
                "pp=4,fsdp=2",
                "pp=1,ep=4,tp=2",
                "pp=1,ep=2,etp=4,tp=2",
                "pp=3,dp=2,ep=2,fsdp=2,tp=2",
                "pp=2,ep=8,etp=1,tp=2",
            ],
        ),
        EVERY_MODEL,
    ),
    ids=lambda given: (
        given if isinstance(given, str) else f"{given.config['model_type']}-{given.parameters}"
    ),
)
def test_every_rank_holds_its_shards_of_published_models(model: PublishedModel, text: str) -> None:
    mesh = DeviceMesh.parse(text)
    found = elements(model, assigned(model, mesh))
    assert found == {rank: dense_elements(model, mesh, rank) for rank in mesh.devices}


@pytest.mark.parametrize("tp", [4, 8, 16, 32])
def test_more_ranks_than_key_value_heads(tp: int) -> None:
    mesh = DeviceMesh.of(pp=1, dp=2, tp=tp)
    # 18,867 tensors of experts take long: by default over one number of ranks.
    large = [QWEN3_30B_A3B] if tp == 8 else choose([], [QWEN3_30B_A3B])
    for model in (LLAMA_3_8B, TINY_LLAMA, *large):
        found = elements(model, assigned(model, mesh))
        assert found == {rank: dense_elements(model, mesh, rank) for rank in mesh.devices}


def deepseek_elements(tp: int, fsdp: int, ep: int, etp: int, pp: int, stage: int) -> float:
    """DeepSeek-V3 with its scales, by hand from its report and files."""
    hidden, heads, vocabulary = 7168, 128, 129280

    def scaled(rows: int, columns: int) -> float:
        return rows * columns + rows * columns / 128 / 128

    whole = scaled(1536, hidden) + 576 * hidden + 5 * 56 + 1536 + 512 + 2 * hidden
    by_heads = (
        scaled(heads * 192, 1536) + scaled(heads * 256, 512) + scaled(hidden, heads * 128)
    ) / tp
    dense = 3 * scaled(18432, hidden) / tp
    expert = 3 * scaled(2048, hidden)
    mixture = 256 * hidden + 256 + expert / tp + 256 / ep * expert / etp
    ends = vocabulary * hidden / tp
    # The 62nd layer predicts a further token: two norms, a projection, and ends of its own.
    further = mixture + whole + by_heads + 2 * ends + 3 * hidden + hidden * 2 * hidden
    layers = np.array_split(np.arange(61), pp)[stage]
    total = sum(whole + by_heads + (dense if layer < 3 else mixture) for layer in layers)
    total += ends if stage == 0 else 0
    total += ends + hidden + further if stage == pp - 1 else 0
    return float(total / fsdp)


@pytest.mark.exhaustive(reason="92,000 tensors take long; a short DeepSeek-V3 is cut by default")
@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("pp=1,tp=8", (8, 1, 1, 8)),
        ("pp=1,fsdp=8,ep=8", (1, 8, 8, 1)),
        ("pp=4,dp=2,ep=16,tp=2", (2, 1, 16, 2)),
        ("pp=16,ep=4,etp=1,tp=4", (4, 1, 4, 1)),
    ],
)
def test_every_rank_holds_its_share_of_deepseek_v3(
    text: str, sizes: tuple[int, int, int, int]
) -> None:
    mesh = DeviceMesh.parse(text)
    found = elements(DEEPSEEK_V3, assigned(DEEPSEEK_V3, mesh))
    stage = mesh.coordinates(["pp"])
    pp = mesh.axis_size("pp")
    for rank in mesh.devices:
        expected = deepseek_elements(*sizes, pp, int(stage[rank]))
        # fsdp cuts between blocks, which 1536, 576 and 2048 rows have too few of to be even.
        assert math.isclose(found[rank], expected, rel_tol=0 if "fsdp" not in text else 0.01)


def test_scales_lie_with_the_weights_they_scale() -> None:
    layouts = assigned(SHORT_DEEPSEEK_V3, "tp=32,ep=4").layouts
    for name in (
        "model.layers.0.mlp.up_proj",
        "model.layers.5.mlp.experts.7.gate_proj",
        "model.layers.5.mlp.shared_experts.down_proj",
        "model.layers.5.self_attn.o_proj",
        "model.layers.5.self_attn.q_b_proj",
        "model.layers.5.self_attn.kv_b_proj",
    ):
        weight, scale = layouts[f"{name}.weight"], layouts[f"{name}.weight_scale_inv"]
        assert weight.holders == scale.holders
        for rank in weight.holders:
            boxes, scales = weight.boxes(rank), scale.boxes(rank)
            assert len(boxes) == len(scales)
            for box, of in zip(boxes, scales, strict=True):
                assert of.start == tuple(a // 128 for a in box.start)
                assert of.stop == tuple(-(-b // 128) for b in box.stop)


def gpt2_elements(tp: int, pp: int, place: int, stage: int) -> float:
    """GPT-2 with its masks, whose heads and rows divide by tp; its vocabulary does not."""
    hidden, rows = 768, -(-50257 // tp)
    cut = 4 * hidden * hidden + 8 * hidden * hidden + 3 * hidden + 4 * hidden
    layer = 1024 * 1024 + cut / tp + 4 * hidden + 2 * hidden
    words = (min(50257, rows * (place + 1)) - rows * place) * hidden
    first, last = words + 1024 * hidden, 2 * hidden + (words if pp > 1 else 0)
    return shared(pp, stage, first, layer, 12, last)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 3), (4, 1), (2, 4), (12, 2)])
def test_every_rank_holds_its_share_of_gpt2(tp: int, pp: int) -> None:
    mesh = DeviceMesh.of(pp=pp, tp=tp)
    total = elements(GPT2, assigned(GPT2, mesh))
    for rank in mesh.devices:
        assert total[rank] == gpt2_elements(tp, pp, rank % tp, rank // tp)


def test_gpt2_queries_keys_and_values_are_cut_by_the_same_heads() -> None:
    layouts = assigned(GPT2, "tp=5").layouts
    for rank, heads in enumerate([3, 3, 3, 3, 0]):
        weight, bias = (layouts[f"h.0.attn.c_attn.{part}"] for part in ("weight", "bias"))
        assert weight.local_shape(rank) == (768, 3 * heads * 64)
        assert bias.local_shape(rank) == (3 * heads * 64,)
        starts = [box.start[1] for box in weight.boxes(rank)]
        assert starts == ([part * 768 + rank * 192 for part in range(3)] if heads else [])
        assert [box.start[0] for box in bias.boxes(rank)] == starts
        assert layouts["h.0.attn.c_proj.weight"].local_shape(rank) == (heads * 64, 768)
    up, down = layouts["h.3.mlp.c_fc.weight"], layouts["h.3.mlp.c_proj.weight"]
    assert up.tables[1] is down.tables[0]


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_gpt2_names_with_and_without_a_prefix(prefix: str) -> None:
    shapes = {f"{prefix}{name}": shape for name, shape in GPT2.shapes.items()}
    shapes["lm_head.weight"] = (50257, 768)
    found = assign(shapes, DeviceMesh.of(pp=2, tp=4), (), load_recipe("gpt2"), GPT2.config)
    assert found.unknown == ()
    assert str(found.specs["lm_head.weight"]) == "tp, - | only(pp=1)"
    assert str(found.specs[f"{prefix}wte.weight"]) == "tp, -"
    assert found.notes == (
        f"{prefix}wte.weight: tied with the output layer, so the last stage has a copy of it",
    )


def test_stacked_experts_are_cut_like_separate_ones() -> None:
    mesh = DeviceMesh.of(ep=3, etp=2)
    stacked = {
        "model.layers.0.mlp.experts.gate_up_proj": (8, 2 * 10, 6),
        "model.layers.0.mlp.experts.down_proj": (8, 6, 10),
    }
    separate = {
        f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight": shape
        for expert in range(8)
        for name, shape in (("gate", (10, 6)), ("up", (10, 6)), ("down", (6, 10)))
    }
    config = {"num_experts": 8, "moe_intermediate_size": 10, "n_routed_experts": 8}
    for recipe in ("qwen3_moe", "deepseek_v3"):
        options = {"feed_forward": "ceil"}
        found = assign(
            stacked | separate, mesh, (), load_recipe(recipe).with_options(options), config
        ).layouts
        for rank in range(6):
            held = {
                e
                for e in range(8)
                if found[f"model.layers.0.mlp.experts.{e}.up_proj.weight"].local_shape(rank)
            }
            first, last = min(held, default=0), max(held, default=-1) + 1
            gate, up = (
                found[f"model.layers.0.mlp.experts.{first}.{name}_proj.weight"].boxes(rank)[0]
                for name in ("gate", "up")
            )
            boxes = found["model.layers.0.mlp.experts.gate_up_proj"].boxes(rank)
            assert [(b.start, b.stop) for b in boxes] == [
                ((first, gate.start[0], 0), (last, gate.stop[0], 6)),
                ((first, 10 + up.start[0], 0), (last, 10 + up.stop[0], 6)),
            ]
            ((low, high),) = found["model.layers.0.mlp.experts.down_proj"].boxes(rank)
            down = found[f"model.layers.0.mlp.experts.{first}.down_proj.weight"].boxes(rank)[0]
            assert (low, high) == ((first, *down.start), (last, *down.stop))


def test_a_vocabulary_is_padded_on_request() -> None:
    found = assigned(MINI_LM, "tp=4", vocabulary="pad128")
    embedding = found.layouts["embeddings.word_embeddings.weight"]
    assert [embedding.local_shape(rank) for rank in range(4)] == [(7680, 384)] * 4
    assert [embedding.boxes(rank)[0].shape[0] for rank in range(4)] == [7680, 7680, 7680, 7482]
    both = assigned(GPT2, "tp=4,fsdp=2", vocabulary="pad64").layouts["wte.weight"]
    assert [both.local_shape(rank) for rank in range(8)] == [(12608 // 2, 768)] * 8
    assert both.tables[0].uncovered() == []


def test_layers_over_stages_by_hand_and_by_bytes() -> None:
    given = assigned(TINY_LLAMA, "pp=4", layer="sizes[4,7,7,4]")
    stages = [
        {
            int(name.split(".")[2])
            for name, at in given.layouts.items()
            if rank in at.holders and "layers" in name
        }
        for rank in range(4)
    ]
    assert stages == [set(range(4)), set(range(4, 11)), set(range(11, 18)), set(range(18, 22))]
    even = elements(QWEN2_HALF_B, assigned(QWEN2_HALF_B, "pp=4"))
    balanced = elements(QWEN2_HALF_B, assigned(QWEN2_HALF_B, "pp=4", layer="bytes"))
    assert max(balanced.values()) < max(even.values())
    layer = (QWEN2_HALF_B.parameters - 151936 * 896 - 896) // 24
    embedding = 151936 * 896
    best = min(
        max(embedding + a * layer, b * layer, c * layer, embedding + 896 + (24 - a - b - c) * layer)
        for a in range(25)
        for b in range(25 - a)
        for c in range(25 - a - b)
    )
    assert max(balanced.values()) == best


def test_dense_layers_weigh_less_than_those_of_experts() -> None:
    model = SHORT_DEEPSEEK_V3
    mesh = DeviceMesh.of(pp=3, ep=8)
    found = assigned(model, mesh, layer="bytes")
    assert max(elements(model, found).values()) < max(
        elements(model, assigned(model, mesh)).values()
    )
    layers: list[set[int]] = [set(), set(), set()]
    for name, layout in found.layouts.items():
        if "layers" in name:
            layers[layout.holders[0] // 8].add(int(name.split(".")[2]))
    # In billions on each rank: the ends 0.93 each, three dense layers 0.58 each, five layers of
    # experts 1.65 each, and one of 3.6 behind the last: 6.0, 5.0 and 4.5 is the best there is.
    assert layers == [set(range(5)), {5, 6, 7}, {8}]


def test_experts_over_axes_of_other_names() -> None:
    """DeepSeek's own serving: attention over tp, experts over all ranks of dp and tp."""
    mesh = DeviceMesh.of(dp=2, tp=4)
    found = assigned(QWEN3_30B_A3B, mesh, ep="dp tp", etp="")
    for expert in (0, 15, 16, 127):
        layout = found.layouts[f"model.layers.7.mlp.experts.{expert}.up_proj.weight"]
        assert layout.holders == (expert // 16,)
        assert layout.local_shape(expert // 16) == (768, 2048)
    assert found.unused_axes == ()
    total = elements(QWEN3_30B_A3B, found)
    assert len(set(total.values())) == 1
