"""One rank of a job of four: Megatron's modules to plain ones of Hugging Face names, and back.

What a Megatron rank has is cut from whole tensors by hand here. The plain side has the layouts of
shipped recipes; that these are right is tested in `tests/recipes`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import reshard
from rank_cases import run_cases
from refit_models import Values, expect, expect_same, laid_out, module_of, whole, zeros
from reshard.errors import ShardError
from reshard.megatron.names import MegatronNames, PipelineLayers
from reshard.megatron.ranks import MegatronRanks
from reshard.recipes.assignment import assign
from reshard.recipes.library import load_recipe
from reshard.recipes.naming import Fusion
from reshard.torch import MegatronModel, by_recipe, refit
from selection import choose

HEADS, GROUPS, HEAD, HIDDEN, INNER, VOCABULARY, LAYERS, EXPERTS = 8, 2, 4, 8, 12, 16, 4, 4
CONFIG = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
}
FEED_FORWARD = {
    "qwen3": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "qwen3_moe": ("mlp.experts.{}", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe.experts.{}", "w1", "w3", "w2"),
}
ROUTERS = {"qwen3_moe": "mlp.gate.weight", "mixtral": "block_sparse_moe.gate.weight"}


def plain(kind: str) -> Values:
    """The whole model by Hugging Face's names."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    where, gate, up, down = FEED_FORWARD[kind]
    for layer in range(LAYERS):
        of = f"model.layers.{layer}"
        shapes |= {
            f"{of}.input_layernorm.weight": (HIDDEN,),
            f"{of}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{of}.self_attn.k_proj.weight": (GROUPS * HEAD, HIDDEN),
            f"{of}.self_attn.v_proj.weight": (GROUPS * HEAD, HIDDEN),
            f"{of}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{of}.post_attention_layernorm.weight": (HIDDEN,),
        }
        if kind != "mixtral":
            shapes |= {f"{of}.self_attn.{x}_norm.weight": (HEAD,) for x in "qk"}
        if kind in ROUTERS:
            shapes[f"{of}.{ROUTERS[kind]}"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS if kind in ROUTERS else 1):
            at = f"{of}.{where.format(expert)}"
            shapes |= {f"{at}.{name}.weight": (INNER, HIDDEN) for name in (gate, up)}
            shapes[f"{at}.{down}.weight"] = (HIDDEN, INNER)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    return {name: whole(seed, *shape) for seed, (name, shape) in enumerate(shapes.items())}


CUT, EXPERT = {"tensor_model_parallel": True}, {"is_expert": True}
ROW = CUT | {"partition_dim": 1}


def megatron(kind: str, ranks: MegatronRanks, rank: int) -> Iterator[tuple[str, Any, Any]]:
    """What a rank of Megatron calls it, has of it, and says of it."""
    values = plain(kind)
    tp, ep = rank % ranks.tp, rank % ranks.ep
    stage = rank // (ranks.world_size // ranks.pp)
    share = LAYERS // ranks.pp
    if stage == 0:
        embedding = values["model.embed_tokens.weight"]
        yield "embedding.word_embeddings.weight", embedding.chunk(ranks.tp)[tp], CUT
    for number in range(share):
        of, layer = f"decoder.layers.{number}", f"model.layers.{stage * share + number}"
        attention = f"{of}.self_attention"
        parts = [values[f"{layer}.self_attn.{x}_proj.weight"].chunk(GROUPS) for x in "qkv"]
        qkv = torch.cat([part[group] for group in range(GROUPS) for part in parts])
        yield f"{attention}.linear_qkv.weight", qkv.chunk(ranks.tp)[tp], CUT
        norm = values[f"{layer}.input_layernorm.weight"]
        name = "input_layernorm.weight" if kind == "mixtral" else None
        yield f"{of}.{name or 'self_attention.linear_qkv.layer_norm_weight'}", norm, {}
        if kind != "mixtral":
            for x in "qk":
                yield (
                    f"{attention}.{x}_layernorm.weight",
                    values[f"{layer}.self_attn.{x}_norm.weight"],
                    {},
                )
        output = values[f"{layer}.self_attn.o_proj.weight"]
        yield f"{attention}.linear_proj.weight", output.chunk(ranks.tp, dim=1)[tp], ROW
        norm = values[f"{layer}.post_attention_layernorm.weight"]
        if kind == "qwen3":
            yield f"{of}.mlp.linear_fc1.layer_norm_weight", norm, {}
            yield from gated(f"{of}.mlp", values, f"{layer}.mlp", kind, ranks.tp, tp)
            continue
        yield f"{of}.pre_mlp_layernorm.weight", norm, {}
        yield f"{of}.mlp.router.weight", values[f"{layer}.{ROUTERS[kind]}"], {}
        for local in range(EXPERTS // ranks.ep):
            expert = ep * (EXPERTS // ranks.ep) + local
            at = f"{layer}.{FEED_FORWARD[kind][0].format(expert)}"
            experts = f"{of}.mlp.experts"
            if kind == "mixtral":
                experts += f".local_experts.{local}"
            for name, value, says in gated(experts, values, at, kind, 1, 0):
                yield name + (str(local) if kind != "mixtral" else ""), value, says | EXPERT
    if stage == ranks.pp - 1:
        yield "decoder.final_layernorm.weight", values["model.norm.weight"], {}
        yield "output_layer.weight", values["lm_head.weight"].chunk(ranks.tp)[tp], CUT


def gated(
    of: str, values: Values, at: str, kind: str, tp: int, rank: int
) -> Iterator[tuple[str, torch.Tensor, Any]]:
    _, gate, up, down = FEED_FORWARD[kind]
    parts = [values[f"{at}.{name}.weight"].chunk(tp)[rank] for name in (gate, up)]
    yield f"{of}.linear_fc1.weight", torch.cat(parts), CUT
    yield f"{of}.linear_fc2.weight", values[f"{at}.{down}.weight"].chunk(tp, dim=1)[rank], ROW


def model_of(kind: str, ranks: MegatronRanks, is_empty: bool) -> MegatronModel:
    layers = PipelineLayers.even(LAYERS, ranks.pp)
    given = [
        (name, torch.zeros_like(value) if is_empty else value.clone(), says)
        for name, value, says in megatron(kind, ranks, dist.get_rank())
    ]
    return MegatronModel(module_of(given), MegatronNames(ranks, layers, EXPERTS))


def engine(kind: str, sizes: dict[str, int], is_empty: bool) -> tuple[Values, Any, Any]:
    """This rank's own tensors by the whole model's names, the mesh and the assignment."""
    values, mesh = plain(kind), reshard.DeviceMesh.of(**sizes)
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    layouts = assign(shapes, mesh, (), load_recipe(kind), CONFIG).layouts
    held = laid_out(zeros(values) if is_empty else values, layouts)
    return {n: local for n, (local, _) in held.items() if local is not None}, mesh, shapes


CASES = [
    ("qwen3", MegatronRanks(tp=2, pp=2), {"tp": 4}),
    ("qwen3", MegatronRanks(tp=2, pp=2), {"dp": 2, "tp": 2}),
    ("qwen3", MegatronRanks(tp=4), {"pp": 2, "tp": 2}),
    ("qwen3", MegatronRanks(tp=2, dp=2), {"fsdp": 2, "tp": 2}),
    ("qwen3", MegatronRanks(pp=4), {"pp": 2, "fsdp": 2}),
    ("qwen3_moe", MegatronRanks(dp=2, pp=2, ep=2), {"ep": 4}),
    ("qwen3_moe", MegatronRanks(dp=4, ep=4), {"pp": 2, "ep": 2}),
    ("mixtral", MegatronRanks(tp=2, pp=2, ep=2, etp=1), {"ep": 2, "tp": 2}),
]


def models_move_between_all_pairs_of_recipes() -> None:
    """Between every pair, in both directions, all of it by the recipe's tables."""
    for kind, ranks, sizes in choose(CASES[1::3], CASES):
        names = load_recipe(kind).naming("megatron", CONFIG)
        what = f"{kind}, {ranks} to {sizes}"
        own, mesh, shapes = engine(kind, sizes, is_empty=True)
        full, _, _ = engine(kind, sizes, is_empty=False)
        laid = by_recipe(own, mesh, shapes, load_recipe(kind), config=CONFIG)
        refit(model_of(kind, ranks, is_empty=False), laid, source_names=names)
        expect_same(own, full, what)
        back = model_of(kind, ranks, is_empty=True)
        refit(laid, back, target_names=names)
        expected = model_of(kind, ranks, is_empty=False)
        expect_same(back.chunks.state_dict(), expected.chunks.state_dict(), f"back, {what}")


def ranks_share_one_key_and_value_head() -> None:
    """Ranks have stretches of queries, keys and values that follow one another once."""
    rank, ranks = dist.get_rank(), MegatronRanks(tp=4)
    names = load_recipe("qwen3").naming("megatron", CONFIG | {"num_key_value_heads": 1})
    rows = {"q": HEADS * HEAD, "k": HEAD, "v": HEAD}
    right = {
        f"model.layers.0.self_attn.{x}_proj.weight": whole(number, rows[x], HIDDEN)
        for number, x in enumerate("qkv")
    }
    part = torch.cat([*right.values()]).chunk(ranks.tp)[rank]
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    layers = PipelineLayers.even(1, pp=1)
    for is_back in (False, True):
        own = module_of([(name, torch.zeros_like(part) if is_back else part.clone(), CUT)])
        model = MegatronModel(own, MegatronNames(ranks, layers))
        plain_side = right if is_back else zeros(right)
        if is_back:
            refit(plain_side if rank == 0 else None, model, target_names=names)
            expect_same(own.state_dict(), {name: part}, "one head, back")
        else:
            refit(model, plain_side if rank == 0 else None, source_names=names)
            if rank == 0:
                expect_same(plain_side, right, "one head")


def stages_and_experts_count_from_0() -> None:
    """Stages and expert ranks that count what they have from 0."""
    rank = dist.get_rank()
    for kind, sizes in (("qwen3", {"pp": 2, "tp": 2}), ("qwen3_moe", {"pp": 2, "ep": 2})):
        recipe = load_recipe(kind)
        own, mesh, shapes = engine(kind, sizes, is_empty=True)
        full, _, _ = engine(kind, sizes, is_empty=False)
        counted = {}
        for name, value in own.items():
            words = name.split(".")
            if "layers" in words:
                words[2] = str(int(words[2]) - 2 * (rank // 2))
            if "experts" in words:
                words[5] = str(int(words[5]) - 2 * (rank % 2))
            counted[".".join(words)] = value
        expect(
            (counted.keys() == own.keys()) == (rank == 0 or (rank < 2 and kind == "qwen3")), kind
        )
        module = module_of([(name, value, {}) for name, value in counted.items()])
        laid = by_recipe(module, mesh, shapes, recipe, config=CONFIG, counts_from_zero=True)
        ranks = MegatronRanks(dp=2, pp=2, ep=2)
        names = recipe.naming("megatron", CONFIG)
        refit(model_of(kind, ranks, is_empty=False), laid, source_names=names)
        expect_same(own, full, f"{kind} from 0")
        # A fourth layer where the stage has two.
        wrong = counted | {"model.layers.3.input_layernorm.weight": torch.zeros(HIDDEN)}
        laid = by_recipe(wrong, mesh, shapes, recipe, config=CONFIG, counts_from_zero=True)
        try:
            refit(model_of(kind, ranks, is_empty=False), laid, source_names=names)
        except ShardError as error:
            expect("model.layers.3.input_layernorm.weight" in str(error), str(error))
        else:
            raise SystemExit("a layer too many was accepted")


def fused_modules_of_vllm_are_filled() -> None:
    """vLLM's modules: queries, keys and values of this rank in one tensor, shared heads too."""
    recipe = load_recipe("qwen3")
    ranks = MegatronRanks(tp=2, pp=2)
    for sizes in ({"tp": 4}, {"tp": 2, "pp": 2}):
        own, mesh, shapes = engine("qwen3", sizes, is_empty=True)
        full, _, _ = engine("qwen3", sizes, is_empty=False)
        packed, expected = (engine_parameters(of) for of in (own, full))
        names = recipe.naming("vllm", CONFIG)
        laid = by_recipe(packed, mesh, shapes, recipe, config=CONFIG, naming=names)
        table = recipe.naming("megatron", CONFIG)
        refit(model_of("qwen3", ranks, is_empty=False), laid, source_names=table)
        expect_same(packed, expected, f"vLLM, {sizes}")
        if dist.get_rank() == 1:
            name = next(name for name in packed if "qkv_proj" in name)
            packed[name] = packed[name][1:]
        laid = by_recipe(packed, mesh, shapes, recipe, config=CONFIG, naming=names)
        try:
            refit(laid, model_of("qwen3", ranks, is_empty=True), target_names=table)
        except ShardError as error:
            expect("q_proj.weight: rank 1 has local shape" in str(error), str(error))
        else:
            raise SystemExit("a fused tensor that is too short was accepted")


def mistakes_of_one_rank_are_raised_on_all() -> None:
    """One rank's mistake is raised by the refit, on every rank and at once."""
    rank, recipe = dist.get_rank(), load_recipe("qwen3")
    own, mesh, shapes = engine("qwen3", {"tp": 4}, is_empty=True)
    packed = engine_parameters(own)
    grouped = {"*.qkv_proj.weight": Fusion(("*.q_proj.weight", "*.k_proj.weight"), groups=2)}
    norm = "model.norm.weight"
    twice = {**own, "other": own[norm].clone()}
    right = {"model": own, "shapes": shapes, "config": CONFIG}
    for wrong, told in (
        ({"model": packed, "naming": grouped}, "in 2 groups"),
        ({"model": packed, "naming": lambda name: name[99]}, "IndexError"),
        ({"model": 5}, "a model of type int"),
        ({"config": {}}, "num_attention_heads"),
        ({"shapes": {"a": "xy"}}, "shape 'xy' of 'a'"),
        ({"shapes": {"a": 3}}, "shape 3 of 'a'"),
        ({"shapes": {"a": (2, -1)}}, "shape (2, -1) of 'a'"),
        ({"mesh": None}, "'NoneType'"),
        ({"naming": {"other": norm}, "model": twice}, "two tensors of the model"),
    ):
        given: dict[str, Any] = {"mesh": mesh, **right, **(wrong if rank == 2 else {})}
        laid = by_recipe(recipe=recipe, **given)
        expect(bool(laid.problems) == (rank == 2), f"{wrong}: {laid.problems}")
        refused(laid, model_of("qwen3", MegatronRanks(tp=4), is_empty=True), told)
    # On each rank one tensor has the name, but not the same.
    swapped = {("other" if name == norm and rank == 2 else name): own[name] for name in own}
    laid = by_recipe(swapped, mesh, shapes, recipe, config=CONFIG, naming={"other": norm})
    told = f"two tensors of the source, {norm!r} of rank 0 and '{norm}, as other' of rank 2"
    refused(laid, model_of("qwen3", MegatronRanks(tp=4), is_empty=True), told)


def refused(source: Any, target: Any, told: str) -> None:
    table = load_recipe("qwen3").naming("megatron", CONFIG)
    begun_s = time.monotonic()
    try:
        refit(source, target, target_names=table)
    except ShardError as error:
        expect(told in str(error), f"{told!r} is not in {error}")
        expect(time.monotonic() - begun_s < 30, "too late")
        return
    raise SystemExit(f"nothing was raised where {told!r} was expected")


def engine_parameters(own: Values) -> Values:
    found = {}
    for name, value in own.items():
        *_, which, _ = name.split(".")
        if which == "q_proj":
            parts = [own[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif which == "gate_proj":
            parts = [value, own[name.replace("gate_proj", "up_proj")]]
            found[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        elif which not in ("k_proj", "v_proj", "up_proj"):
            found[name] = value
    return found


def an_engine_on_later_ranks_counts_from_0() -> None:
    """A trainer on ranks 0 and 1; an engine on ranks 2 and 3, which its mesh calls 0 and 1."""
    rank, recipe = dist.get_rank(), load_recipe("qwen3")
    values = plain("qwen3")
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    mesh = reshard.DeviceMesh.of(pp=2)
    layouts = assign(shapes, mesh, (), recipe, CONFIG).layouts
    held = laid_out(zeros(values), layouts, 2)
    own = {n: local for n, (local, _) in held.items() if local is not None}
    packed = engine_parameters(own) if rank > 1 else None
    counted = packed
    if packed is not None:
        places = {name: name.split(".") for name in packed}
        for words in places.values():
            if "layers" in words:
                words[2] = str(int(words[2]) - 2 * (rank - 2))
        counted = {".".join(places[name]): value for name, value in packed.items()}
    laid = by_recipe(
        counted,
        mesh,
        shapes,
        recipe,
        config=CONFIG,
        counts_from_zero=True,
        first_rank=2,
        naming=recipe.naming("vllm", CONFIG),
    )
    trainer = model_of("qwen3", MegatronRanks(tp=2), is_empty=False) if rank < 2 else None
    refit(
        trainer, laid, source_names=recipe.naming("megatron", CONFIG), target_offset=2, cast=False
    )
    if packed is not None:
        full = {
            n: local for n, (local, _) in laid_out(values, layouts, 2).items() if local is not None
        }
        expect_same(packed, engine_parameters(full), "on later ranks")


def main() -> None:
    run_cases(
        [
            models_move_between_all_pairs_of_recipes,
            ranks_share_one_key_and_value_head,
            stages_and_experts_count_from_0,
            fused_modules_of_vllm_are_filled,
            an_engine_on_later_ranks_counts_from_0,
            mistakes_of_one_rank_are_raised_on_all,
        ]
    )


if __name__ == "__main__":
    main()
