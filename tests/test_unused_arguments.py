"""Arguments without an effect are refused, in every command and by the functions of the library.

`REFUSED` has for each option a command line in which nothing would read it; `ALWAYS_READ` has the
options that every run reads. A new option is in one of them.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import reshard
from cli.command_runs import run_here, write_model
from reshard._validation import check_used
from reshard.checkpoint.keywords import LayoutArguments, RequestArguments
from reshard.checkpoint.options import ConversionRequest, LoadOptions
from reshard.errors import UsageError

LAYER = "model.layers.0.self_attn"
LLAMA: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (32, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (32, 8),
    f"{LAYER}.q_proj.weight": (8, 8),
    f"{LAYER}.k_proj.weight": (4, 8),
    f"{LAYER}.v_proj.weight": (4, 8),
    f"{LAYER}.o_proj.weight": (8, 8),
    "model.layers.0.mlp.gate_proj.weight": (16, 8),
    "model.layers.0.mlp.up_proj.weight": (16, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 16),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.post_attention_layernorm.weight": (8,),
}
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "vocab_size": 32,
}
BY_RECIPE = "--recipe llama --option vocabulary=pad64"

# What a run permits or selects has nothing to do in some runs, and keeps its promise there.
ALWAYS_READ = {
    "convert": {
        *("source", "target", "check_copies", "to", "select", "include", "exclude", "strip_prefix"),
        *("rename", "rules", "allow", "dtype", "adapters", "format", "replicas", "target_kind"),
        *("dry_run", "extra_bytes", "threads", "overwrite", "restart", "as_json", "quiet"),
    },
    "diff": {
        *("before", "after", "out", "compression", "overwrite", "select", "check_copies"),
        *("allow", "extra_bytes", "threads", "as_json", "quiet"),
    },
    "verify": {
        *("left", "right", "left_names", "recipe", "target_kind", "dtype", "adapters", "select"),
        *("include", "exclude", "strip_prefix", "rename", "check_copies", "allow", "threads"),
        *("as_json", "quiet"),
    },
    "inspect": {"checkpoint", "digest", "patterns", "select", "check_copies", "as_json", "quiet"},
    "explain": {
        *("source", "target", "mesh_text", "target_mesh_text", "shape_text", "notation", "dtype"),
        *("lower", "as_json", "report_path"),
    },
}
ALWAYS_READ["plan"] = ALWAYS_READ["convert"] - {
    *("target", "dry_run", "overwrite", "restart", "quiet"),
} | {"report_path"}
ALWAYS_READ["apply"] = ALWAYS_READ["convert"] - {
    *("source", "check_copies", "target_kind", "dtype", "strip_prefix", "rename", "replicas"),
} | {"base", "deltas"}

# Of `convert`; `plan` refuses the same. {m} is the small model.
CONVERSIONS = {
    "source_mesh": ["{m} {t} --to full --source-mesh tp=2"],
    "source_rules": ["{m} {t} --to full --source-rule *=tp,..."],
    "source_recipe": ["{m} {t} --to full --source-recipe auto"],
    "layout": ["{m} {t} --layout {m}/config.json"],
    "mesh_order": [
        *("{m} {t} --to full --mesh-order tp", "{m} {t} --to 2 --mesh-order tp"),
        "{m} {t} --mesh-order tp",
    ],
    "recipe": ["{m} {t} --to full --recipe llama"],
    "options": [
        f"{{m}} {{t}} --to pp=1 {BY_RECIPE}",
        f"{{m}} {{t}} --to full {BY_RECIPE} --target-names megatron",
        f"{{m}} {{t}} --to tp=2 {BY_RECIPE} --rule *embed*=... --rule lm_head*=...",
        "{m} {t} --to tp=2 --recipe llama --option layer=bytes",
        "{m} {t} --to 2 --strategy recipe --option layer=bytes",
        "{m} {t} --to tp=2 --rule *=... --option vocabulary=pad64",
        "{m} {t} --to 2 --option vocabulary=pad64",
    ],
    "source_names": ["{m} {t} --to full --source-names megatron"],
    "target_names": ["{m} {t} --to full --target-names megatron"],
    "dequantize": ["{m} {t} --to full --dequantize"],
    "quantize": ["{p} {t} --to full --quantize fp8-block128"],
    "source_layout": ["{m} {t} --to full --source-layout {m}/config.json"],
    "strategy": ["{m} {t} --to full --strategy simple"],
    "training": ["{m} {t} --to full --training fsdp2"],
    "most_file_bytes": ["{m} {t} --to tp=2 --rule *=... --max-file 1MB"],
    "config": ["{m} {t} --to full --config {m}"],
}
RUNS = {
    "discard_others": ["{m} {t} --to full --discard-others"],
    "staging": [
        "{m} {t} --to full --staging {m}.st",
        "{m} {t} --to full --dry-run --staging {m}.st",
    ],
    "wait_for_ranks": ["{m} {t} --to full --wait-for-ranks 3"],
}
REPORTS = {"overwrite": ["--overwrite"], "ranks_per_host": ["--ranks-per-host 2"]}
BOTH = "x,- -,x --mesh x=2 --shape 4x4"
REFUSED: dict[str, dict[str, list[str]]] = {
    "convert": {**CONVERSIONS, **RUNS},
    "plan": {
        **{name: [one.replace("{t} ", "") for one in ones] for name, ones in CONVERSIONS.items()},
        **{name: [f"{{m}} --to full {one}" for one in ones] for name, ones in REPORTS.items()},
        "drawn": ["{m} --to full --picture lm_head.weight --json"],
    },
    "apply": {
        **{
            name: [one.replace("{t}", "{d} {t}") for one in ones]
            for name, ones in {**CONVERSIONS, **RUNS}.items()
            if not name.startswith("source_") and name != "config"
        },
        "source_names": ["{m} {d} {t} --to full --source-names megatron"],
        "source_layout": ["{m} {d} {t} --to full --source-layout {m}/config.json"],
        "replicas": ["{m} {d} {t} --replicas every"],
        "dtype": ["{m} {d} {t} --to full --dtype bf16"],
        "strip_prefix": ["{m} {d} {t} --to full --strip-prefix model."],
        "rename": ["{m} {d} {t} --to full --rename lm_head.weight=out"],
    },
    "diff": {"trust_digests": ["{m} {m} -o {t} --trust-digests"]},
    "verify": {
        "shows_all": ["{m} {m} --all --quiet"],
        "right_names": ["{m} {m} --for hf --right-names megatron"],
        "config": ["{m} {m} --config {m}"],
        "source_layout": ["{m} {m} --source-layout {m}/config.json"],
        "source_mesh": ["{m} {m} --source-mesh tp=2"],
        "source_rules": ["{m} {m} --source-rule *=tp,..."],
        "source_recipe": ["{m} {m} --source-recipe auto"],
    },
    "inspect": {
        "threads": ["{m} --threads 2"],
        "shows_all": ["{m} --all --quiet"],
        "drawn": ["{m} --picture norm --quiet", "{m} --picture norm --json"],
        "source_mesh": ["{m} --source-mesh tp=2"],
        "source_rules": ["{m} --source-rule *=tp,..."],
        "source_recipe": ["{m} --source-recipe auto"],
    },
    "explain": {
        **{name: [f"{BOTH} {one}" for one in ones] for name, ones in REPORTS.items()},
        "rank_text": ["[[0],[1]] [[0],[1]] --shape 2 --ranks 0-1"],
        "target_rank_text": ["[[0],[1]] [[0],[1]] --shape 2 --to-ranks 0-1"],
        "contents": [f"{BOTH} --contents --json"],
        "steps": ["x,- -,y --mesh x=4 --to-mesh y=2 --shape 4x4 --steps mlir"],
        "topology": [
            f"{BOTH} --topology h100-8",
            f"{BOTH} --dtype bfloat16 --topology h100-8 --lower jax",
        ],
    },
}
CASES = [
    pytest.param(command, line, id=f"{command} {name} {number}")
    for command, by_name in REFUSED.items()
    for name, lines in by_name.items()
    for number, line in enumerate(lines)
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small Llama, a model without layers, a delta, and the name of a target."""
    folder = tmp_path_factory.mktemp("unread")
    tensors = {name: np.ones(shape, np.float32) for name, shape in LLAMA.items()}
    model = write_model(folder / "m", **tensors)
    (model / "config.json").write_text(json.dumps(CONFIG))
    (folder / "p").mkdir()
    save_file({"a.weight": np.ones((4, 4), np.float32)}, folder / "p" / "model.safetensors")
    reshard.checkpoint.diff(model, model, folder / "d")
    return {name: folder / name for name in "mpdt"}


@pytest.mark.parametrize(("command", "line"), CASES)
def test_an_option_that_nothing_reads_is_refused(
    places: dict[str, Path], command: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    run = run_here(command, *(word.format(**places) for word in line.split(" ")))
    assert run.code in (2, 3), run
    assert not run.output or "--json" in line
    assert not places["t"].exists()


@pytest.mark.parametrize("command", sorted(REFUSED))
def test_every_option_is_always_read_or_refused_somewhere(command: str) -> None:
    module = importlib.import_module(f"reshard.cli.commands.{command}")
    names = {parameter.name for parameter in getattr(module, command).params}
    refused, read = {*REFUSED[command]}, ALWAYS_READ[command]
    assert refused | read == names
    assert not refused & read


def test_the_error_names_what_would_read_it(places: dict[str, Path]) -> None:
    model = str(places["m"])
    for to, expected in (
        ("pp=1", "sharded over tp, and the mesh pp=1 has no such axis"),
        ("full", "such as to='tp=2', and to='full' is none"),
    ):
        names = ("--target-names", "megatron") if to == "full" else ()
        run = run_here("plan", model, "--to", to, *BY_RECIPE.split(" "), *names)
        assert expected in run.errors
    by_axis = run_here("plan", model, "--to", "x=2", *BY_RECIPE.split(" "), "--option", "tp=x")
    assert by_axis.code == 0, by_axis.errors
    run = run_here("inspect", model, "--threads", "2")
    assert "--digest" in run.errors


VALUES: dict[str, Any] = {
    "format": "torch-dcp",
    "replicas": "every",
    "most_file_bytes": 100,
    "dtype": "bf16",
    "dequantize": True,
    "quantize": "fp8-block128",
    "training": "fsdp2",
    "adapters": ["adapter"],
    "source_layout": "layout.json",
    "check_copies": "all",
}


def test_load_refuses_what_only_conversions_read(places: dict[str, Path]) -> None:
    own = {*LoadOptions.__dataclass_fields__}
    assert {*RequestArguments.__annotations__} - {*LayoutArguments.__annotations__} == {*VALUES}
    for name in {*VALUES} - own:
        with pytest.raises(UsageError, match=f"{name}=.* has no effect here"):
            reshard.checkpoint.load(places["m"], **{name: VALUES[name]})
    default = {name: getattr(ConversionRequest, name) for name in {*VALUES} - own}
    assert reshard.checkpoint.load(places["m"], **default)


def test_load_refuses_options_that_no_rule_reads(places: dict[str, Path]) -> None:
    given: dict[str, Any] = {"recipe": "llama", "options": {"vocabulary": "pad64"}}
    with pytest.raises(UsageError, match="'vocabulary' of the recipe 'llama' has no effect here"):
        reshard.checkpoint.load(places["m"], to="pp=1", **given)
    assert reshard.checkpoint.load(places["m"], to="tp=2", **given)["lm_head.weight"].shape[0] == 64


def test_a_table_of_names_does_not_read_a_recipe(places: dict[str, Path]) -> None:
    table = {name.replace("model.", "m."): name for name in LLAMA}
    with pytest.raises(UsageError, match="a recipe"):
        reshard.checkpoint.plan_conversion(
            places["m"], places["t"], to="full", recipe="llama", target_names=table
        )
    reshard.checkpoint.plan_conversion(places["m"], places["t"], to="full", target_names=table)


def test_what_is_read_passes() -> None:
    check_used("--threads 2", True, "it is for --digest")
