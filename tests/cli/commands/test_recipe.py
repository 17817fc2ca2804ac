"""`reshard recipe show` and `check`: their output, checked by eye, and every way to misuse them.

`RESHARD_UPDATE_GOLDEN=1 pytest tests/cli/commands/test_recipe.py` writes the files anew; look at
every change.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cli.command_runs import Run, run_here, write_model

GOLDEN = Path(__file__).parents[2] / "golden" / "recipe"
MESH = ("--to", "pp=2,ep=2,tp=2")
# The models here lack norms, and others most of their tensors.
PARTIAL = ("--recipe", "auto", "--allow", "incomplete")

CASES: dict[str, tuple[str, ...]] = {
    "show": ("show",),
    "show_own": ("show", "./mine.toml"),
    "show_own_json": ("show", "./mine.toml", "--json"),
    "show_mixtral": ("show", "mixtral"),
    "check": ("check", "tiny", *MESH),
    "check_json": ("check", "tiny", "--to", "pp=2", "--json"),
    "check_options": ("check", "tiny", *MESH, "--option", "layer=sizes[0,2]", "--option", "tp="),
    "check_own": ("check", "tiny", "--to", "tp=3", "--recipe", "mine.toml", "--rule", "x=-"),
    "check_rules": ("check", "model", "--to", "tp=2", "--rule", "*.weight=tp, -"),
}
LEFT_OVER = {"check_own", "check_rules"}

OWN = """
name = "mine"
model_types = ["mine"]
axes = ["tp", "pp", "etp", "zero"]
storage = ["zero"]
[cuts]
rows = "balanced"
[stand_ins]
etp = "tp"
[numbers.block]
axis = "pp"
count = "n_layers|depth"
[coupled.states]
head = "ssm_heads"
group = "ssm_groups|1"
[[rules]]
pattern = "*.{block}.*.w2.weight"
spec = "-, etp"
[[rules]]
pattern = "*embed*"
spec = "tp@{rows}, ..."
at = { block = ["first"] }
when = "mixture"
note = "of interest"
"""


@pytest.fixture(autouse=True)
def models(folder: Path) -> None:
    """A very small Mixtral with tied embeddings, and a recipe of one's own."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (9, 4),
        "model.norm.weight": (4,),
    }
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (4, 4) for name in ("q", "k", "v", "o")}
        shapes[f"{at}.block_sparse_moe.gate.weight"] = (2, 4)
        for expert in range(2):
            for name, shape in (("w1", (6, 4)), ("w2", (4, 6)), ("w3", (6, 4))):
                shapes[f"{at}.block_sparse_moe.experts.{expert}.{name}.weight"] = shape
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    config = {
        "model_type": "mixtral",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "num_local_experts": 2,
        "tie_word_embeddings": True,
        "mixture": True,
    }
    path = write_model(folder / "tiny", **tensors)
    (path / "config.json").write_text(json.dumps(config))
    (folder / "mine.toml").write_text(OWN)


def run(*arguments: str) -> Run:
    return run_here("recipe", *arguments)


@pytest.mark.parametrize("name", CASES)
def test_output_is_as_checked_by_eye(name: str) -> None:
    found = run(*CASES[name])
    assert found.errors == ""
    assert found.code == (1 if name in LEFT_OVER else 0)
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("RESHARD_UPDATE_GOLDEN") == "1":
        golden.write_text(found.output, encoding="utf-8")
    assert found.output == golden.read_text(encoding="utf-8")


def test_every_golden_file_belongs_to_a_case() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == CASES.keys()


def test_the_bytes_per_rank_are_those_that_a_conversion_writes(folder: Path) -> None:
    """Every rank's own copies: the tensors that it reads back are those that were counted."""
    checked = run("check", "tiny", *MESH, "--json").json
    converted = run_here("convert", "tiny", "new", *MESH, *PARTIAL, "--replicas", "every")
    assert converted.code == 0
    listed = run_here("inspect", "new", "--json").json
    for rank in checked["ranks"]:
        of_rank = [t for t in listed["tensors"] if rank["rank"] in t["ranks"]]
        assert len(of_rank) == rank["tensors"]
    cuts = {tensor["name"]: tensor["cut"] for tensor in listed["tensors"]}
    for rule in checked["rules"]:
        assert cuts[rule["example"]] == rule["cut"]
    assert sum(rule["tensors"] for rule in checked["rules"]) == len(listed["tensors"])
    assert run_here("verify", "tiny", "new").code == 0


def test_a_conversion_has_the_same_notes() -> None:
    arguments = ("tiny", "new", "--to", "pp=2", *PARTIAL)
    plan = run_here("plan", "tiny", "--to", "pp=2", *PARTIAL)
    (note,) = run("check", "tiny", "--to", "pp=2", "--json").json["notes"]
    assert note.startswith("model.embed_tokens.weight: tied with the output layer")
    assert f"note: {note}" in plan.output
    assert f"note: {note}" in run_here("convert", *arguments).output


def test_options_reach_conversions() -> None:
    arguments = ("tiny", "--to", "tp=2", *PARTIAL, "--option", "vocabulary=pad4")
    planned = run_here("plan", *arguments, "--json").json
    cuts = {tensor["name"]: tensor["cut"] for tensor in planned["tensors"]}
    assert cuts["model.embed_tokens.weight"] == "tp@pad4, -"
    assert run_here("convert", "tiny", "new", *arguments[1:]).code == 0
    assert run_here("verify", "tiny", "new").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "nix"), "unknown recipe 'nix'; The shipped recipes are "),
        (("show", "nix.toml"), "cannot read the recipe file nix.toml: No such file"),
        (("shwo",), "no command 'shwo'; did you mean 'show'?"),
        (("check", "tiny"), "Missing option '--to'"),
        (("check", "tiny", "--to", "4"), "cannot read the mesh '4'; write axes with sizes"),
        (("check", "model", "--to", "tp=2"), "no shipped recipe for the model type 'unheard-of'"),
        (("check", "nothing", "--to", "tp=2"), "no checkpoint at nothing"),
        (("check", "tiny", *MESH, "--option", "x=1"), "recipe 'mixtral' has no option 'x'; its"),
        (("check", "tiny", *MESH, "--option", "layer"), "the option 'layer' has no name or no"),
        (("check", "tiny", *MESH, "--option", "ep=a", "--option", "ep=b"), "is given twice"),
        (("check", "tiny", *MESH, "--option", "vocabulary=x"), "the cut 'x' is not a cut rule"),
        (("check", "tiny", *MESH, "--option", "ep=dp"), "axis 'ep' cannot be mapped to 'dp': unkn"),
        (("check", "tiny", *MESH, "--option", "layer=sizes[3]"), "1 sizes for 2 parts"),
        (("check", "tiny", *MESH, "--rule", "x=-", "--option", "tp="), "--option without a recipe"),
    ],
)
def test_mistakes_are_reported(arguments: tuple[str, ...], message: str) -> None:
    found = run(*arguments)
    assert (found.code, found.output) == (2, "")
    assert message in found.errors


def test_options_without_a_recipe_are_refused() -> None:
    found = run_here("convert", "tiny", "new", "--to", "2", "--option", "vocabulary=pad")
    assert found.code == 2
    assert "the option 'vocabulary' without a recipe that has it" in found.errors


def test_bare_command_is_help() -> None:
    assert run() == run("--help")
    assert run().code == 0
    assert "Commands:\n  show" in run().output


@pytest.mark.parametrize("name", ["show", "check"])
def test_help_has_examples_that_run(folder: Path, name: str) -> None:
    (folder / "tiny").rename(folder / "llama-3-8b")
    text = run(name, "--help").output
    assert all(len(line) <= 100 for line in text.splitlines())
    examples = text.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert len(examples) == 3
    for line in examples:
        arguments = shlex.split(line)[1:]
        assert run_here(*arguments).code in (0, 1), line


@pytest.mark.parametrize(("name", "arguments"), [("check", ("tiny", *MESH)), ("show", ("llama",))])
def test_json_has_the_keys_that_help_lists(name: str, arguments: tuple[str, ...]) -> None:
    content = run(name, *arguments, "--json").json
    text = run(name, "--help").output.partition("Keys of --json:")[2].partition("\n\n")[0]
    text = text.partition("or\n")[2] or text
    outer = re.sub(r"\[?\{[^{}]*\}\]?", "", text)
    assert set(re.findall(r"\w+", outer)) == content.keys()
    for key, inner in re.findall(r"(\w+) \[\{([^\[\]]*?)\}\]", text):
        for item in content[key]:
            assert item.keys() == set(re.findall(r"\w+", inner))


@pytest.fixture
def phi() -> None:
    """40 query and 10 key/value heads of two rows, as Phi-4 has; and a tensor of no recipe."""
    at = "model.layers.0.self_attn"
    tensors = {
        f"{at}.{name}_proj.weight": np.ones((heads * 2, 80), np.float16)
        for name, heads in (("q", 40), ("k", 10), ("v", 10))
    }
    tensors[f"{at}.o_proj.weight"] = np.ones((80, 80), np.float16)
    write_files("phi", tensors, {"num_attention_heads": 40, "num_key_value_heads": 10})
    write_files("more", {**tensors, "odd": np.ones(3, np.float16)}, {"num_attention_heads": 40})


def write_files(name: str, tensors: dict[str, Any], config: dict[str, int]) -> None:
    Path(name).mkdir()
    save_file(tensors, Path(name) / "model.safetensors")
    config = {"num_key_value_heads": 10, "num_hidden_layers": 1, **config}
    (Path(name) / "config.json").write_text(json.dumps({"model_type": "llama", **config}))


@pytest.mark.usefixtures("phi")
@pytest.mark.parametrize("command", ["plan", "convert"])
def test_uncomputable_shards_are_refused_before_anything_is_written(command: str) -> None:
    target = ("new",) if command == "convert" else ()
    arguments = (command, "phi", *target, "--to", "tp=4", *PARTIAL)
    there = sorted(Path().rglob("*"))
    found = run_here(*arguments)
    assert (found.code, found.output) == (2, "")
    assert "rank 1 would hold heads.key_value 3-5 of" in found.errors
    assert re.search(
        r"heads.query 10-19 of model.layers.0.self_attn.._proj.weight use 2-4", found.errors
    )
    assert "sizes that would do: 1, 2, 5, 10, 20, 40" in found.errors
    assert sorted(Path().rglob("*")) == there
    assert run_here(*arguments, "--json").json["error"]["kind"] == "UncomputableError"
    assert run_here(*arguments, "--allow", "unknown").code == 2
    assert not Path("new").exists()
    assert run_here(*arguments, "--allow", "uncomputable").code == 0
    assert Path("new").exists() == (command == "convert")


@pytest.mark.usefixtures("phi")
def test_uncomputable_shards_are_reported() -> None:
    found = run("check", "phi", "--to", "tp=4")
    assert found.code == 1
    assert "not computable: rank 1 would hold heads.key_value 3-5 of" in found.output
    (text,) = run("check", "phi", "--to", "tp=4", "--json").json["uncomputable"]
    assert "use 2-4; tp has size 4" in text
    assert run("check", "phi", "--to", "tp=4", "--allow", "uncomputable").code == 0
    assert run("check", "phi", "--to", "tp=4", "--allow", "unknown").code == 1
    assert run("check", "phi", "--to", "tp=5").code == 0
    planned = run_here(*("plan", "phi", "--to", "tp=4", *PARTIAL, "--allow", "uncomputable"))
    assert "note: not computable: rank 1 would hold" in planned.output


@pytest.mark.usefixtures("phi")
def test_a_part_of_a_model_that_no_rule_names_is_refused() -> None:
    arguments = ("convert", "more", "new", "--to", "tp=2", "--recipe", "llama", *PARTIAL[2:])
    found = run_here(*arguments)
    assert "1 tensor unknown: odd. Nothing was written" in found.errors
    config = json.loads(Path("more/config.json").read_text())
    Path("more/config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}))
    found = run_here(*arguments)
    assert (found.code, Path("new").exists()) == (2, False)
    assert "no rule of the recipe 'llama' matches 1 of 5 tensors: odd. Give rules" in found.errors
    Path("more/config.json").write_text(json.dumps(config))
    assert run("check", "more", "--to", "tp=2").code == 1
    assert run("check", "more", "--to", "tp=2", "--allow", "unknown").code == 0
    found = run_here("convert", "phi", "new", "--to", "tp=2", "--rule", "nothing=tp, -")
    assert found.code == 2 and "no rule given matches 4 of 4 tensors" in found.errors
    found = run_here(*arguments, "--allow", "everything")
    assert found.code == 2 and "'everything' is not one of" in found.errors
    assert run_here(*arguments, "--allow", "unknown").code == 0
    assert run_here("convert", "more", "all", *arguments[3:], "--rule", "odd=-").code == 0


@pytest.mark.usefixtures("phi")
def test_the_error_for_an_unknown_model_names_a_similar_model() -> None:
    config = json.loads(Path("phi/config.json").read_text())
    Path("phi/config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}))
    found = run("check", "phi", "--to", "tp=2")
    assert found.code == 2
    assert "it resembles llama, whose rules match 4 of 4" in found.errors
    assert run("check", "phi", "--to", "tp=2", "--recipe", "llama").code == 0
