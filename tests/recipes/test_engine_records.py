"""Recipes beside what engines hold, as `make engines` recorded it of their real ranks.

A recipe cuts every tensor as the engine reads it, or the difference is one of those named here,
each with its reason: what an engine does otherwise than others, and ranks compute with it all the
same.
"""

from __future__ import annotations

import fnmatch
from typing import Any, NamedTuple

import pytest

from engines.layout_records import RecordedLayout, families_of, read_layouts
from reshard.errors import RecipeError
from reshard.recipes import Recipe, assign, choose_recipe
from reshard.recipes.engine_layouts.layout_differences import list_differences


class Known(NamedTuple):
    """A difference that is known: of which engine, families and tensors, and why it is there."""

    engine: str
    families: str
    patterns: tuple[str, ...]
    reason: str


VOCABULARY = (
    "*embed_tokens.weight",
    "*word_embeddings.weight",
    "*wte.weight",
    "*embeddings.weight",
    "*embed_in.weight",
    "embed_out.weight",
    "*lm_head.weight",
    "*lm_head.bias",
)
KNOWN = (
    Known("vllm", "*", VOCABULARY, "pads the whole vocabulary to a multiple of 64, then divides"),
    Known("vllm", "gpt-oss", ("*down_proj_bias",), "the first rank alone adds the bias"),
    Known("vllm", "olm*", ("*[qk]_norm.weight",), "whole: a rank takes its part when it computes"),
    Known("vllm", "*", ("*model.norm.weight", "*ln_f.*", "*wpe.weight"), "every stage has it"),
    *(
        Known(
            "vllm",
            family,
            ("*shared_expert*",),
            "whole where experts are over replicas: ranks share the tokens, not the expert",
        )
        for family in ("deepseek-v3", "llama4")
    ),
)


def options_of(recorded: RecordedLayout, recipe: Recipe) -> dict[str, str]:
    """The options with which a recipe deals experts out as the engine does: whole, over all."""
    if "ep=" not in recorded.parallelism:
        return {}
    over = [axis for axis in ("dp", "fsdp", "tp") if axis in recorded.layout.mesh.axis_names]
    # Where experts do not divide, counts differ by at most one.
    balanced = {"expert": "balanced"} if "expert" in recipe.numbers else {}
    return {"ep": " ".join(over), "etp": "", **balanced}


def find_differences(engine: str, recorded: RecordedLayout) -> list[str]:
    """The patterns of tensors that recipe and engine place differently, but for known ones."""
    layout = recorded.layout
    recipe = choose_recipe(recorded.config)
    assert recipe is not None, recorded.config["model_type"]
    shapes = {name: source.shape for name, source in layout.sources.items()}
    recipe = recipe.with_options(options_of(recorded, recipe))
    found = assign(shapes, layout.mesh, (), recipe, recorded.config)
    known = [
        pattern
        for one in KNOWN
        if one.engine == engine and fnmatch.fnmatchcase(recorded.family, one.families)
        for pattern in one.patterns
    ]
    return [
        f"{recorded.parallelism} {one.pattern}: rank {one.rank} {one.ours}, there {one.theirs}"
        for one in list_differences(found.layouts, layout.source_layouts())
        if not any(fnmatch.fnmatchcase(one.names[0], pattern) for pattern in known)
    ]


@pytest.mark.parametrize("family", families_of("vllm"))
def test_recipes_cut_as_vllm_reads(family: str) -> None:
    wrong = [line for one in read_layouts("vllm", family) for line in find_differences("vllm", one)]
    assert not wrong


def test_every_known_difference_is_one() -> None:
    """No entry that hides nothing."""
    seen: set[tuple[Known, str]] = set()
    for engine in ("vllm",):
        for family in families_of(engine):
            for recorded in read_layouts(engine, family):
                recipe: Any = choose_recipe(recorded.config)
                recipe = recipe.with_options(options_of(recorded, recipe))
                shapes = {name: one.shape for name, one in recorded.layout.sources.items()}
                try:
                    found = assign(shapes, recorded.layout.mesh, (), recipe, recorded.config)
                except RecipeError:
                    continue
                for one in list_differences(found.layouts, recorded.layout.source_layouts()):
                    for known in KNOWN:
                        if not fnmatch.fnmatchcase(family, known.families):
                            continue
                        for pattern in known.patterns:
                            if fnmatch.fnmatchcase(one.names[0], pattern):
                                seen.add((known, pattern))
    assert {(known, pattern) for known in KNOWN for pattern in known.patterns} == seen
