"""Several models in one checkpoint: which prefixes are those of models, and which are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.names.replay import read_records, recorded_model_types
from reshard.checkpoint.training.model_sets import expect_one_model, find_model_sets
from reshard.errors import RecipeError

LAYER = ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm")
NAMES = (
    "model.embed_tokens.weight",
    *(f"model.layers.{number}.{one}.weight" for number in range(2) for one in LAYER),
    "model.norm.weight",
)

Shapes = dict[str, tuple[int, ...]]


def shapes_under(*prefixes: str) -> Shapes:
    """One model under each prefix."""
    return {prefix + name: (4,) for prefix in prefixes for name in NAMES}


@pytest.mark.parametrize(
    ("prefixes", "sets"),
    [
        (("state_dict.module.", "ema_state_dict.module."), ("state_dict", "ema_state_dict")),
        (("state_dict.", "state_dict_ema."), ("state_dict", "state_dict_ema")),
        (("model.", "ema."), ("model", "ema")),
        (("model.", "model_ema."), ("model", "model_ema")),
        (("ema.", "net."), ("ema", "net")),
        (("generator.", "generator_ema."), ("generator", "generator_ema")),
        (("netG.", "netD."), ("netG", "netD")),
        (("net_g.", "net_d."), ("net_g", "net_d")),
        (("actor.", "critic."), ("actor", "critic")),
        (("student.", "teacher."), ("student", "teacher")),
        (("policy.", "ref_policy."), ("policy", "ref_policy")),
        (("policy.", "ref.", "reward."), ("policy", "ref", "reward")),
        (("state_dict.net.", "state_dict.net_ema."), ("state_dict.net", "state_dict.net_ema")),
        (
            ("state_dict.model.", "state_dict.ema_model.module."),
            ("state_dict.model", "state_dict.ema_model"),
        ),
        (("module.", "ema."), ("module", "ema")),
        (("ema.module.", "model.module."), ("ema", "model")),
        (("models.policy.", "models.ref."), ("models.policy", "models.ref")),
        (("models.0.", "models.1."), ("models.0", "models.1")),
        (("", "ema."), ("", "ema")),
        (("model.", "ema.model."), ("", "ema")),
        (("module.", ""), ("module", "")),
    ],
)
def test_pairs_that_trainers_save(prefixes: tuple[str, ...], sets: tuple[str, ...]) -> None:
    shapes = shapes_under(*prefixes) | {"rng_state": (8,), f"{prefixes[-1]}n_averaged": ()}
    assert find_model_sets(shapes) == dict.fromkeys(sets, len(NAMES))


def test_unknown_words_need_a_model_of_the_architecture() -> None:
    shapes = shapes_under("one.", "two.")
    assert find_model_sets(shapes) == {}
    known = find_model_sets(shapes, is_of_model=lambda name: name in NAMES)
    assert known == {"one": len(NAMES), "two": len(NAMES)}
    own = frozenset({"one"})
    assert find_model_sets(shapes, is_of_model=lambda name: True, own_words=own) == {}


def test_an_average_without_names() -> None:
    copies: Shapes = {f"ema.shadow_params.{number}": (4,) for number in range(len(NAMES))}
    count = len(NAMES)
    assert find_model_sets(shapes_under("net.") | copies) == {
        "net": count,
        "ema.shadow_params": count,
    }
    assert find_model_sets(shapes_under("") | copies) == {"": count, "ema.shadow_params": count}
    other = dict.fromkeys(copies, (5,))
    assert find_model_sets(shapes_under("net.") | other) == {}
    # Names without their dots, and a number of updates beside them.
    joined: Shapes = {f"model_ema.{name.replace('.', '')}": (4,) for name in NAMES}
    found = find_model_sets(shapes_under("model.") | joined | {"model_ema.num_updates": ()})
    assert found.keys() == {"model", "model_ema"}


@pytest.mark.parametrize(
    "names",
    [
        ("encoder.layers.0.w", "encoder.norm.w", "decoder.layers.0.w", "decoder.norm.w"),
        # Heads of one module, and layers whose names have such words.
        ("body.0.w", "body.2.w", "body.4.w", "body.6.w", "actor.w", "critic.w"),
        ("layers.0.ref_proj.w", "layers.0.k_proj.w", "layers.1.ref_proj.w", "layers.1.k_proj.w"),
        ("model.norm.w", "model.layers.0.w", "model.layers.1.w", "lm_head.w"),
        ("teacher.0.w", "teacher.1.w"),
    ],
)
def test_parts_of_one_model(names: tuple[str, ...]) -> None:
    assert find_model_sets(dict.fromkeys(names, (4,))) == {}


@pytest.mark.parametrize("model_type", recorded_model_types())
def test_no_recorded_model_is_two(model_type: str) -> None:
    for record in read_records(model_type):
        for prefix in ("", "state_dict.model.module."):
            assert find_model_sets({prefix + name: (4,) for name in record["tensors"]}) == {}


def test_the_error_lists_sets_and_options() -> None:
    expect_one_model(Path("run"), {})
    says = (
        r"run has 3 models .*: names without a prefix \(2 tensors\), ema \(2 tensors\), ref \(1 "
        r"tensor\)\. Choose one with --select ema or --select ref, or keep names without a prefix "
        r"with --exclude 'ema\.\*' --exclude 'ref\.\*'"
    )
    with pytest.raises(RecipeError, match=says):
        expect_one_model(Path("run"), {"": 2, "ema": 2, "ref": 1})
