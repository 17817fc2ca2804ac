"""Couplings: their members, and how many there are of each.

The names by which a rule cuts dimensions, read from its spec.

Cuts that ranks cannot compute with are refused, whoever chose them.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.cut_rules import parse_rule
from reshard.errors import RecipeError, UncomputableError, UsageError
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import Assignment, assign
from reshard.recipes.coupling import Coupling, find_annotations
from reshard.recipes.layer_placement import Numbering
from reshard.recipes.library import load_recipe
from reshard.recipes.overrides import parse_allowed
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule

HEADS = Coupling((("query", "heads"), ("key_value", "groups|heads"), ("rows", "heads * 4")))


def test_counts_by_the_config() -> None:
    assert HEADS.counts({"heads": 8, "groups": 2}) == {"query": 8, "key_value": 2, "rows": 32}
    assert HEADS.counts({"heads": 8}) == {"query": 8, "key_value": 8, "rows": 32}


def test_counts_by_the_layer() -> None:
    one = Coupling((("query", "heads[layer]"),))
    assert one.counts({"heads": [2, 4]}, {"layer": 1}) == {"query": 4}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"heads": 8, "groups": 3}, r"3 of key_value \(`groups\|heads`\) for 8 of query"),
        ({"heads": 0}, r"0 of query \(`heads`\) for 0 of query"),
        ({"groups": 3}, "`heads` is not in the model's config"),
        (None, "there is none; put the model's config.json"),
    ],
)
def test_counts_that_cannot_be(config: dict[str, object] | None, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        HEADS.counts(config)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ((), "a coupling without members; name what is counted"),
        ((("", "a"),), "the member '' of a coupling; give each a name"),
        ((("a.b", "a"),), "the member 'a.b' of a coupling"),
        ((("a", "a"), ("a", "b")), "the member 'a' of a coupling"),
        ((("a", "a b"),), "cannot read the expression 'a b'"),
    ],
)
def test_members_that_cannot_be(members: tuple[tuple[str, str], ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Coupling(members)


KNOWN = {"wide", "heads.query", "heads.key_value", "expert"}
WIDE, QUERY, KEY = "wide", "heads.query", "heads.key_value"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("tp, -", []),
        ("tp@heads{heads}, -", []),
        ("tp@{unknown}, -", []),
        ("tp@{wide}, -", [(0, 0, (WIDE,))]),
        ("-, tp@{ wide } ?!2", [(1, 0, (WIDE,))]),
        ("fsdp / tp@{heads.query}, -", [(0, 1, (QUERY,))]),
        ("..., tp@{wide}", [(-1, 0, (WIDE,))]),
        ("ep@{expert} / fsdp, ..., tp@{wide}, -",
         [(0, 0, ("expert",)), (-2, 0, (WIDE,))]),
        ("tp@{wide}@blocks[{a | b},{(a, b) // 2}], -", [(0, 0, (WIDE,))]),
        ("-, tp@{wide}@groups2", [(1, 0, (WIDE,))]),
        ("-, tp@{wide}@groups{pair}", [(1, 0, (WIDE,))]),
        ("tp@{wide}@halo[1,1], -", []),
        ("tp@joined[{q // 2 | r}@{heads.query},{k},{k}@{heads.key_value}] / fsdp, -",
         [(0, 0, (QUERY, None, KEY))]),
        ("tp@{wide}, - | only(pp=0)", [(0, 0, (WIDE,))]),
        ("", []),
    ],
)  # fmt: skip
def test_names_in_a_spec_are_found_by_dimension_and_level(
    spec: str, expected: list[tuple[int, int, tuple[str | None, ...]]]
) -> None:
    found = [(one.item, one.level, one.names) for one in find_annotations(spec, KNOWN)]
    assert found == expected


@pytest.mark.parametrize(
    ("spec", "rule", "length", "expected"),
    [
        ("tp@{wide}", "", 6, [(WIDE, 0, 6, 1)]),
        ("tp@{wide}", "heads2", 6, [(WIDE, 0, 6, 1)]),
        ("tp@{heads.query}", "heads2", 6, [(QUERY, 0, 6, 3)]),
        ("tp@{wide}@blocks[4,2]", "unit2@blocks[4,2]", 6, [(WIDE, 0, 4, 1), (WIDE, 4, 6, 1)]),
        ("tp@{wide}@groups2", "groups2", 6, [(WIDE, 0, 6, 2)]),
        ("tp@joined[8@{heads.query},2,4@{heads.key_value}]", "joined[8@heads4,2,4@heads2]", 14,
         [(QUERY, 0, 8, 2), (KEY, 10, 14, 2)]),
    ],
)  # fmt: skip
def test_the_blocks_of_an_annotated_rule_are_listed(
    spec: str, rule: str, length: int, expected: list[tuple[str, int, int, int]]
) -> None:
    (annotation,) = find_annotations(spec, KNOWN)
    assert annotation.list_blocks(parse_rule(rule), length) == expected


LAYERS, WIDTH, FEED_FORWARD = 3, 2, 48


def llama_shapes(query: int, key_value: int, layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama with so many heads of two rows, and a bias of each query row."""
    rows = query * WIDTH
    shapes = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (64, rows))
    shapes["model.norm.weight"] = (rows,)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}self_attn.q_proj.weight": (rows, rows),
            f"{at}self_attn.q_proj.bias": (rows,),
            f"{at}self_attn.k_proj.weight": (key_value * WIDTH, rows),
            f"{at}self_attn.v_proj.weight": (key_value * WIDTH, rows),
            f"{at}self_attn.o_proj.weight": (rows, rows),
            f"{at}mlp.gate_proj.weight": (FEED_FORWARD, rows),
            f"{at}mlp.up_proj.weight": (FEED_FORWARD, rows),
            f"{at}mlp.down_proj.weight": (rows, FEED_FORWARD),
        }
    return shapes


def assign_llama(
    query: int, key_value: int, mesh: str, *rules: str, allow: tuple[str, ...] = (), **options: str
) -> Assignment:
    recipe = load_recipe("llama").with_options(options)
    config = {
        "num_attention_heads": query,
        "num_key_value_heads": key_value,
        "num_hidden_layers": LAYERS,
    }
    by_hand = [Rule.parse(text) for text in rules]
    shapes = llama_shapes(query, key_value)
    return assign(shapes, DeviceMesh.parse(mesh), by_hand, recipe, config, allow=allow)


@pytest.mark.parametrize(
    ("query", "key_value", "tp", "message", "sizes"),
    [
        (40, 10, 4, "rank 1 would hold heads.key_value 3-5 of model.layers.0.self_attn.k_proj.weig"
         "ht, and its heads.query 10-19 of model.layers.0.self_attn.q_proj.weight use 2-4",
         "1, 2, 5, 10, 20, 40"),
        (8, 2, 3, "rank 1 would hold heads.key_value 0 of .*, and its heads.query 3-5 of .* use 0-",
         "1, 2, 4, 8"),
        (6, 2, 3, "rank 1 would hold heads.key_value 0 of .*, and its heads.query 2-3 of .* use 0-",
         "1, 2, 6"),
        (12, 4, 6, "rank 1 would hold heads.key_value 0 of .* heads.query 2-3 of .* use 0-1",
         "1, 2, 4, 12"),
        (28, 4, 8, "rank 1 would hold heads.key_value 0 of .* heads.query 4-7 of .* use 0-1",
         "1, 2, 4, 28"),
        (8, 8, 16, "ranks 0 and 1 would both hold heads.query 0 of .*, which would count twice in",
         "1, 2, 4, 8"),
        (9, 3, 2, "rank 1 would hold heads.key_value 2 of .* heads.query 5-8 of .* use 1-2",
         "1, 3, 9"),
        (5, 5, 2, "rank 0 would hold 3 of heads.query of .*, and rank 1 2; every rank needs equal",
         "1, 5"),
        (12, 4, 8, "rank 1 would hold heads.key_value 0 of .* heads.query 2-3 of .* use 0-1",
         "1, 2, 4, 12"),
    ],
)  # fmt: skip
def test_heads_that_do_not_go(
    query: int, key_value: int, tp: int, message: str, sizes: str
) -> None:
    """With the rank, what it holds and needs, and the sizes that would do."""
    with pytest.raises(UncomputableError, match=message) as caught:
        assign_llama(query, key_value, f"tp={tp}")
    assert f"tp has size {tp}; sizes that would do: {sizes}" in str(caught.value)
    assert "(and 2 operators like it)" in str(caught.value)
    assert "--allow uncomputable" in str(caught.value)
    found = assign_llama(query, key_value, f"tp={tp}", allow=("uncomputable",))
    assert len(found.uncomputable) == 1
    assert found.uncomputable[0] in str(caught.value)


@pytest.mark.parametrize(
    ("query", "key_value", "mesh"),
    [
        (8, 2, "tp=4"), (8, 2, "tp=8"), (40, 10, "tp=5"), (40, 10, "tp=20"), (9, 3, "tp=3"),
        (8, 2, "tp=2,fsdp=3"), (8, 2, "fsdp=5,dp=2"), (8, 2, "pp=2,tp=8,dp=2"), (6, 1, "tp=6"),
        (9, 3, "dp=4"), (8, 8, "other=3,tp=2"),
    ],
)  # fmt: skip
def test_heads_that_go(query: int, key_value: int, mesh: str) -> None:
    """Also where several ranks hold one head, and where axes divide storage or hold copies."""
    assert assign_llama(query, key_value, mesh).uncomputable == ()


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 24))
def test_every_rank_has_the_heads_that_its_queries_use(groups: int, each: int, tp: int) -> None:
    """What goes is told by the definition, head by head, from the layouts."""
    query = groups * each
    found = assign_llama(query, groups, f"tp={tp}", allow=("uncomputable",))
    at = "model.layers.0.self_attn"
    goes, seen = True, []
    for rank in range(tp):
        heads = []
        for name, dimension in (("q", 0), ("k", 0), ("o", 1)):
            layout = found.layouts[f"{at}.{name}_proj.weight"]
            boxes = layout.boxes(rank)
            indices = {i for b in boxes for i in range(b.start[dimension], b.stop[dimension])}
            heads.append({i // WIDTH for i in indices})
        used = [head // each for head in sorted(heads[0])]
        goes &= heads[0] == heads[2] and set(used) == heads[1]
        goes &= len({used.count(head) for head in used}) <= 1
        seen += heads[0]
        goes &= len(heads[0]) * tp == query
    goes &= sorted(seen) == list(range(query))
    assert goes == (not found.uncomputable)


@pytest.mark.parametrize(
    ("mesh", "rule", "message"),
    [
        ("tp=4", "*.k_proj.weight=tp, -", r"rank 0 would hold 0:1 of .*k_proj.weight, which "
         r"splits a unit \(heads.key_value\); 4 ranks along tp would do"),
        ("tp=2", "*.k_proj.weight=-, tp", "dimension 1 of .*k_proj.weight would be sharded"),
        ("tp=2", "*.o_proj.weight=-, -", "rank 0 would hold heads.query 0-3 of .*q_proj.weight, and"
         " 0-7 of .*o_proj.weight; both are computed with together"),
        ("tp=2", "*.[qo]_proj.*=...", "ranks 0 and 1 would both hold heads.query 0-7 of"),
        ("tp=2", "*.q_proj.bias=...", "rank 0 would hold .* 0-3 of .*weight, and 0-7 of .*bias"),
        ("tp=8", "*.[kv]_proj.*=...", "rank 0 would hold heads.key_value 0-1 of .* use 0"),
        ("tp=2", "*.layers.1.*.q_proj.*=tp@cyclic2, ...", "hold heads.query 0, 2, 4 and 1 str"),
        ("tp=2,fsdp=2", "*.q_proj.weight=fsdp, -", "0-7 of .*q_proj.weight, and 0-3 of .*q_proj.b"),
        ("tp=4", "*.gate_proj.weight=tp@unit16, -", "rank 0 would hold feed_forward 0:16 of .*gate_"
         "proj.weight, and 0:12 of .*up_proj.weight; .*; shard all tensors of feed_forward alike"),
        ("tp=4", "*.mlp.*=...", "ranks 0 and 1 would both hold feed_forward 0:48 of .*gate_proj"),
        ("tp=2,pp=3", "*.0.mlp.up_proj.weight=tp, - | only(pp=1)", "rank 0 would hold .* none of "),
    ],
)  # fmt: skip
def test_rules_given_by_hand_that_break_an_operator(mesh: str, rule: str, message: str) -> None:
    with pytest.raises(UncomputableError, match=message):
        assign_llama(8, 2, mesh, rule)
    assert assign_llama(8, 2, mesh, rule, allow=("uncomputable",)).uncomputable


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        ("tp=4", ["lm_head.weight=..."]),
        ("tp=4", ["*.k_proj.weight=tp@heads2, -"]),
        ("tp=2,pp=3", ["*.q_proj.weight=tp, -"]),
        ("tp=2,fsdp=2", ["*.q_proj.weight=tp, fsdp"]),
        ("tp=2", ["*.q_proj.*=tp@cyclic2, ...", "*.o_proj.*=-, tp@cyclic2",
                  "*.[kv]_proj.*=tp@heads2, -"][2:]),
        ("tp=4", ["*.gate_proj.*=tp@balanced, -", "*.up_proj.*=tp@unit12, -"]),
        ("tp=5", ["*.self_attn.[qkv]_proj.*=tp@sizes[4,4,4,4,0], ...", "nothing=-"][1:]),
    ],
)  # fmt: skip
def test_rules_given_by_hand_that_break_nothing(mesh: str, rules: list[str]) -> None:
    query, key_value = (5, 5) if mesh == "tp=5" else (8, 2)
    assert assign_llama(query, key_value, mesh, *rules).uncomputable == ()


def test_an_option_or_a_mapping_of_axes_that_breaks_an_operator() -> None:
    with pytest.raises(UncomputableError, match="ranks 0 and 1 would both hold feed_forward 0:24 "):
        assign_llama(8, 2, "tp=4", feed_forward="heads2")
    with pytest.raises(UncomputableError, match="x y has size 3; sizes that would do: 1, 2, 4, 8"):
        assign_llama(8, 2, "x=3,y=1", tp="x y")
    assert not assign_llama(8, 2, "x=2,y=2", tp="x y").uncomputable
    # An axis that computes does not only divide storage, whatever its name.
    with pytest.raises(UncomputableError, match="dp has size 3"):
        assign_llama(8, 2, "dp=3", tp="dp")


def test_unknown_words_of_allow_are_refused() -> None:
    with pytest.raises(UsageError, match="'all' cannot be allowed; choose from incomplete"):
        assign_llama(8, 2, "tp=2", allow=("all",))
    with pytest.raises(UsageError, match=r"allow 'unknown'; give a list"):
        assign({"a": (2,)}, DeviceMesh.of(tp=2), allow="unknown")


EXPERTS = Recipe(
    *("moe", "", (), ("tp", "ep", "etp", "fsdp", "pp")),
    rules=(
        Rule("l.{layer}.e.{expert}.up", "etp@{width} / fsdp, -"),
        Rule("l.{layer}.e.{expert}.down", "-, etp@{width}"),
        Rule("l.{layer}.up", "ep@{expert}, etp@{width}@blocks[{w},{w}]"),
        Rule("l.{layer}.down", "ep@{expert}, -, etp@{width}"),
    ),
    cuts={"width": "ceil"},
    numbers={"layer": Numbering("pp", "1"), "expert": Numbering("ep", "experts")},
    stand_ins={"etp": "tp"},
)
SINGLE = {f"l.0.e.{e}.{name}": (6, 6) for e in range(4) for name in ("up", "down")}
STACKED = {"l.0.up": (4, 12), "l.0.down": (4, 3, 6)}


def assign_experts(shapes: dict[str, tuple[int, ...]], mesh: str, *rules: str) -> Assignment:
    by_hand = [Rule.parse(text) for text in rules]
    config = {"experts": 4, "w": 6}
    return assign(shapes, DeviceMesh.parse(mesh), by_hand, EXPERTS, config)


@pytest.mark.parametrize("mesh", ["ep=2", "ep=3,etp=2", "ep=8", "ep=2,etp=4,fsdp=2"])
def test_experts_that_go(mesh: str) -> None:
    """Fewer on the last rank, or none, is no harm: their sums are put together by expert."""
    assert not assign_experts(SINGLE | STACKED, mesh).uncomputable


@pytest.mark.parametrize(
    ("shapes", "mesh", "rule", "message"),
    [
        (
            SINGLE,
            "ep=2",
            "l.0.e.3.up=-, - | only(ep=0)",
            "rank 1 would hold no width of .*3.up, an",
        ),
        (
            SINGLE,
            "ep=2,etp=2",
            "*.up=...",
            "rank 0 would hold width 0:6 of .*up, and 0:3 of .*down",
        ),
        (STACKED, "ep=2", "l.0.up=ep@cyclic1, -", "rank 0 would hold expert 0:1, 2:3 of l.0.up"),
        (
            STACKED,
            "ep=2,etp=2",
            "l.0.up=ep, etp",
            "hold .* 0:6 of .*up.*0:6., and none of ",
        ),
        (STACKED, "ep=2", "*=...", "ranks 0 and 1 would both hold expert 0:4 of l.0.up"),
    ],
)
def test_experts_that_do_not_go(
    shapes: dict[str, tuple[int, ...]], mesh: str, rule: str, message: str
) -> None:
    with pytest.raises(UncomputableError, match=message):
        assign_experts(shapes, mesh, rule)


KEYS = "{k * 2}@{heads.key_value}"
FUSED = Recipe(
    *("fused", "", (), ("tp",)),
    rules=(
        Rule("qkvs", f"tp@joined[{{q * 2}}@{{heads.query}},{KEYS},{KEYS}], -"),
        Rule("out", "-, tp@{heads.query}"),
    ),
    coupled={"heads": Coupling((("query", "q"), ("key_value", "k")))},
)  # fmt: skip


@pytest.mark.parametrize(
    ("tp", "rule", "message"),
    [
        (4, "x=-", ""),
        (8, "x=-", ""),
        (
            3,
            "x=-",
            r"key_value 0 of qkvs\[16:20\], and its heads.query 3-5 of qkvs\[0:16\]",
        ),
        # By rows: the first half of the ranks has queries, the other keys and values.
        (2, "qkvs=tp, -", r"rank 0 would hold heads.query 0-5 of qkvs\[0:16\], and 0-3 of out"),
        (
            2,
            "qkvs=tp@blocks[16,8], -",
            r"rank 0 would hold .* 0-1 of qkvs\[16:20\], and no",
        ),
        (2, "qkvs=tp@blocks[16,4,4], -", ""),
        (4, "qkvs=tp@blocks[16,4,4], -", "which splits a unit"),
    ],
)
def test_fused_tensors(tp: int, rule: str, message: str) -> None:
    """Each block of them is a tensor of its own."""
    shapes = {"qkvs": (24, 4), "out": (4, 16)}
    config = {"q": 8, "k": 2}
    found = assign(
        *(shapes, DeviceMesh.of(tp=tp), [Rule.parse(rule)], FUSED, config),
        allow=["uncomputable"],
    )
    assert bool(found.uncomputable) == bool(message)
    if message:
        with pytest.raises(UncomputableError, match=message):
            assign(shapes, DeviceMesh.of(tp=tp), [Rule.parse(rule)], FUSED, config)


def test_units_of_several_of_a_member() -> None:
    """Groups of a key/value head and its queries, and an output with columns of each query."""
    recipe = Recipe(
        *("groups", "", (), ("tp",)),
        rules=(Rule("grouped", "tp@{heads.group}, -"), Rule("out", "-, tp@{heads.query}")),
        coupled={"heads": Coupling((("group", "k"), ("query", "q")))},
    )
    shapes, config = {"grouped": (24, 4), "out": (4, 16)}, {"q": 8, "k": 2}
    assert not assign(shapes, DeviceMesh.of(tp=2), (), recipe, config).uncomputable
    with pytest.raises(UncomputableError, match=r"ranks 0 and 1 would both hold heads.group 0 of"):
        assign(shapes, DeviceMesh.of(tp=4), (), recipe, config)
    by_hand = [Rule("out", "-, tp@sizes[4,12]")]
    with pytest.raises(UncomputableError, match=r"heads.query 0-1 of out, and its .*group 0 of"):
        assign(shapes, DeviceMesh.of(tp=2), by_hand, recipe, config)


def test_layers_with_other_numbers_of_heads() -> None:
    """Each layer by its own, and the number of the layer that does not go is told."""
    recipe = Recipe(
        *("kinds", "", (), ("tp", "pp")),
        rules=(
            Rule("l.{layer}.q", "tp@{heads.query}, -"),
            Rule("l.{layer}.k", "tp@{heads.key_value}, -"),
        ),
        numbers={"layer": Numbering("pp", "2")},
        coupled={"heads": Coupling((("query", "8"), ("key_value", "kv[layer]")))},
    )
    shapes = {"l.0.q": (8, 1), "l.0.k": (8, 1), "l.1.q": (8, 1), "l.1.k": (8, 1)}
    recipe_config = {"kv": [8, 2]}
    assert not assign(shapes, DeviceMesh.of(tp=4), (), recipe, recipe_config).uncomputable
    with pytest.raises(UncomputableError, match=r" of l\.1\.k") as caught:
        assign(shapes, DeviceMesh.of(tp=2), [Rule("l.1.k", "tp@cyclic2, -")], recipe, recipe_config)
    assert "2 ranks along tp" in str(caught.value)


def test_a_former_word_still_counts_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="'unmatched' is now 'unknown'"):
        assert parse_allowed(["unmatched"]) == {"unknown"}
