"""Records of model classes against tensors that transformers' classes had elsewhere.

`tests/golden/engines/judged` has configs and shapes of small models, which are not those that the
records were made of: each must fit, and none that is changed may.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reshard.checkpoint.architectures import records
from reshard.checkpoint.architectures.records import find_number, find_recorded_differences, holds

JUDGED = Path(__file__).parents[2] / "golden" / "engines" / "judged"
Shapes = dict[str, tuple[int, ...]]
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
SMALL = {
    **LLAMA,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
}


def judged() -> Iterator[tuple[dict[str, Any], Shapes]]:
    for path in sorted(JUDGED.glob("*.json")):
        for case in json.loads(path.read_text())["cases"]:
            for key in ("shapes", "hub_shapes"):
                shapes = {
                    name: tuple(map(int, text.split("x"))) if text else ()
                    for name, text in case.get(key, {}).items()
                }
                if shapes:
                    yield case["config"], shapes


def differences(config: dict[str, Any], shapes: Shapes) -> Any:
    found = find_recorded_differences(config, shapes)
    assert found is not None
    return found[0]


def small() -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (10, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{one}_proj.weight": (16, 16) for one in "qo"}
        shapes |= {f"{at}.self_attn.{one}_proj.weight": (8, 16) for one in "kv"}
        shapes |= {f"{at}.mlp.{one}_proj.weight": (24, 16) for one in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (16, 24)
        shapes |= {f"{at}.{one}_layernorm.weight": (16,) for one in ("input", "post_attention")}
    return {**shapes, "lm_head.weight": (10, 16)}


def test_models_that_were_judged_elsewhere() -> None:
    fit, changed = 0, 0
    for config, shapes in judged():
        found = find_recorded_differences(config, shapes)
        if found is None:
            continue
        differences, is_exact = found
        assert not differences, (config["model_type"], differences)
        fit += 1
        if not is_exact:
            continue
        name = sorted(shapes)[len(shapes) // 2]
        less = {key: shape for key, shape in shapes.items() if key != name}
        for wrong in (less, {**less, f"{name}x": shapes[name]}, {**shapes, name: (1, 2, 3, 4, 5)}):
            other = find_recorded_differences(config, wrong)
            assert other is not None and other[0], (config["model_type"], name)
            changed += 1
    assert fit > 300 and changed > 500, (fit, changed)


def test_wrong_tensors_are_named() -> None:
    assert not differences(SMALL, small())
    up = "model.layers.1.mlp.up_proj.weight"
    shapes = small()
    del shapes[up]
    assert differences(SMALL, shapes).missing == ((up, (24, 16)),)
    assert differences(SMALL, {**small(), "model.layers.2.mlp.up_proj.weight": (24, 16)}).unknown
    assert differences(SMALL, {**small(), up: (23, 16)}).misshapen == ((up, (23, 16), (24, 16)),)
    assert len(differences({**SMALL, "num_hidden_layers": 3}, small()).missing) == 9
    assert len(differences({**SMALL, "attention_bias": True}, small()).missing) == 8
    shapes = {name.replace("q_proj", "wq"): shape for name, shape in small().items()}
    found = differences(SMALL, shapes)
    assert [len(found.missing), len(found.unknown)] == [2, 2]


def test_a_size_that_the_config_leaves_out_leaves_lengths_open() -> None:
    config = {key: value for key, value in SMALL.items() if key != "intermediate_size"}
    assert not differences(config, small())
    assert differences(config, {**small(), "model.norm.weight": (3,)}).misshapen


def test_forms_that_are_right_too() -> None:
    bare = {name.removeprefix("model."): shape for name, shape in small().items()}
    assert not differences(SMALL, bare)
    head = bare.pop("lm_head.weight")
    assert differences(SMALL, bare).missing == (("lm_head.weight", head),)
    tied = {**SMALL, "tie_word_embeddings": True}
    assert not differences(tied, bare)
    assert not differences(tied, small())
    assert not differences({**SMALL, "architectures": ["LlamaModel"]}, bare)
    # The same tensor twice.
    assert len(differences(SMALL, {**small(), **bare}).unknown) == 20
    assert not differences(SMALL, {**small(), **bare}).missing
    # A head of another class of the model type.
    found = differences(SMALL, {**small(), "score.weight": (2, 16)})
    assert (found.unknown, found.ignored) == ((), ("score.weight",))
    labels = {**SMALL, "architectures": ["LlamaForSequenceClassification"]}
    labels["id2label"] = {str(n): str(n) for n in range(5)}
    rest = {name: shape for name, shape in small().items() if name != "lm_head.weight"}
    assert not differences(labels, {**rest, "score.weight": (5, 16)})
    assert differences(labels, {**rest, "score.weight": (2, 16)}).misshapen


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "unheard-of"},
        {"model_type": "../../x"},
        {"model_type": None},
        {**LLAMA, "architectures": ["OwnForCausalLM"]},
    ],
)
def test_classes_without_a_record(config: dict[str, Any]) -> None:
    assert find_recorded_differences(config, {}) is None


def test_every_record_can_be_read() -> None:
    folder = Path(records.__file__).parent / "recorded"
    names = [path.stem for path in folder.glob("*.json")]
    assert len(names) > 80
    for name in names:
        record = records._read_record(name)
        assert record is not None
        for own in record["classes"].values():
            assert all(row < len(record["rows"]) for form in own["forms"] for row in form)


CONFIG = {
    "a": 3,
    "b": 4,
    "no": None,
    "dense": [1],
    "kinds": ["full", "linear"],
    "pattern": "M*E",
    "inner": {"c": 2},
}


@pytest.mark.parametrize(
    ("term", "numbers"),
    [
        ("a", [0, 1, 2]),
        ("!no", [0, 1, 2]),
        ("a<>b", [0, 1, 2]),
        ("a==b", []),
        ("[n]>=inner.c", [2]),
        ("[n]<inner.c", [0, 1]),
        ("[n]>=absent", []),
        ("([n]+1)%inner.c==0", [1]),
        ("([n]+1)%inner.c<>0", [0, 2]),
        ("[n] in dense", [1]),
        ("[n] not in dense", [0, 2]),
        ("kinds[n]=linear", [1]),
        ("pattern[n]!=M", [1, 2]),
        ("pattern[n]=*", [1]),
    ],
)
def test_where_a_term_holds(term: str, numbers: list[int]) -> None:
    assert [n for n in range(3) if holds(term, CONFIG, (n,))] == numbers


def test_numbers_of_a_config() -> None:
    assert find_number("no|a*inner.c+1", CONFIG) == 7
    assert find_number("absent", CONFIG) is None
    assert find_number("a//no", CONFIG) is None
