"""Every command and picture in the documents, run."""

import doctest
import json
import os
import re
import shlex
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import save_file

import reshard
from cli.command_runs import mask_measurements, run_here
from reshard.recipes.library import load_recipe
from reshard.show import change_picture

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(document: Path, language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, document.read_text(), flags=re.MULTILINE | re.DOTALL)


def small_llama(folder: Path) -> None:
    """A Llama of 2 layers, 4 heads over 2 key/value heads, with every kind of its tensors."""
    random = np.random.default_rng(0)
    hidden, inner, keys, vocabulary = 16, 24, 8, 50
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for layer in range(2):
        of_layer = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": s for name, s in of_layer.items()}
    shapes["lm_head.weight"] = (vocabulary, hidden)
    folder.mkdir()
    tensors = {name: random.normal(size=s).astype(np.float32) for name, s in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))


WITH_COMMANDS = [document for document in DOCUMENTS if blocks(document, "console")]


def read_session(document: Path) -> list[tuple[str, str]]:
    """Return each command in the console blocks of a document, and the output shown below it."""
    session = []
    for block in blocks(document, "console"):
        before, *commands = re.split(r"^\$ ", block, flags=re.MULTILINE)
        assert commands and not before, f"{document.name}: a console block begins with a command"
        for text in commands:
            command, _, output = text.partition("\n")
            session.append((command, output))
    return session


def without_measurements(text: str) -> str:
    """Return output without trailing blanks, and without what differs in every run."""
    lines = [line.rstrip() for line in mask_measurements(text).splitlines()]
    return "\n".join(lines).strip("\n")


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=lambda path: path.name)
def test_commands_in_a_document_succeed_with_the_output_shown(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = read_session(document)
    if "reshard example model" not in dict(session):
        small_llama(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for command, output in session:
        words = shlex.split(command)
        assert words[0] == "reshard", command
        done = run_here(*words[1:], draws_boxes=True)
        assert done.code == 0, f"{command}\n{done.output}\n{done.errors}"
        if output.strip():
            assert without_measurements(done.output) == without_measurements(output), command


def test_the_readme_shows_the_output_of_its_first_commands() -> None:
    first = read_session(DOCUMENTS[0])[:4]
    assert [command.split()[1] for command, _ in first] == [
        *("example", "convert", "inspect", "verify")
    ]
    assert all(output.strip() for _, output in first)


def test_the_readme_fits_on_a_few_screens() -> None:
    assert len(DOCUMENTS[0].read_text().splitlines()) < 150


def test_the_quickstart_of_the_site_is_that_of_the_readme() -> None:
    def quickstart(document: Path) -> str:
        (text,) = re.findall(r"^## Quickstart\n(.*?)(?=^## )", document.read_text(), re.M | re.S)
        return str(text)

    assert quickstart(ROOT / "docs" / "index.md") == quickstart(DOCUMENTS[0]).replace(
        "](docs/", "]("
    )


def test_the_picture_in_the_readme_is_what_reshard_draws() -> None:
    source = reshard.spec(reshard.DeviceMesh.of(tp=4), "tp, -").layout((30522, 384))
    target = reshard.spec(reshard.DeviceMesh.of(tp=3), "-, tp").layout((30522, 384))
    plan = reshard.plan(source, target, dtype="float32")
    titles = ("tp, -   over tp=4", "-, tp   over tp=3")
    drawn = change_picture(source, target, titles=titles, plan=plan)
    assert blocks(DOCUMENTS[0], "text")[0].rstrip() == drawn.rstrip()


SESSIONS = [
    (document, code)
    for document in DOCUMENTS
    for code in blocks(document, "python")
    if ">>>" not in code
]


@pytest.mark.parametrize(("document", "code"), SESSIONS, ids=lambda item: getattr(item, "name", ""))
def test_sessions_with_checkpoints_run(
    document: Path, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_llama(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert "assert" in code, f"a session in {document.name} checks nothing"
    with mock.patch.dict(os.environ):
        exec(code, {"reshard": reshard})


PARTS_OF_EXAMPLES = [(document, code) for document in DOCUMENTS for code in blocks(document, "py")]


@pytest.mark.parametrize(
    ("document", "code"), PARTS_OF_EXAMPLES, ids=lambda item: getattr(item, "name", "")
)
def test_what_needs_several_ranks_is_part_of_an_example(document: Path, code: str) -> None:
    # The examples themselves are run by tests/torch.
    examples = [path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))]
    assert any(code in example for example in examples), f"{document.name}: {code}"


def read_examples(document: Path) -> list[str]:
    return [code for code in blocks(document, "python") if ">>>" in code]


SPMD_EXAMPLES = read_examples(ROOT / "docs" / "spmd.md")


@pytest.mark.parametrize("number", range(len(SPMD_EXAMPLES)))
def test_each_example_about_spmd_runs_alone(number: int) -> None:
    code = SPMD_EXAMPLES[number]
    test = doctest.DocTestParser().get_doctest(code, {}, f"example {number}", "docs/spmd.md", 0)
    output: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(
        test, out=output.append
    )
    assert (result.attempted > 2, result.failed) == (True, 0), "".join(output)


def test_the_page_about_spmd_has_no_parts_of_programs() -> None:
    assert not blocks(ROOT / "docs" / "spmd.md", "py")
    assert len(SPMD_EXAMPLES) > 10


def test_the_recipe_in_the_documents_loads(tmp_path: Path) -> None:
    names = []
    for text in blocks(ROOT / "docs" / "recipes.md", "toml"):
        (tmp_path / "recipe.toml").write_text(text)
        names.append(load_recipe(str(tmp_path / "recipe.toml")).name)
    assert names[0] == "two-layers"


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", document.read_text(), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)#]+)\)", prose):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


SHOWN = [*DOCUMENTS, *sorted((ROOT / "examples").glob("*.py"))]


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.name)
def test_what_is_shown_imports_from_two_levels_at_most(path: Path) -> None:
    """`from reshard.x import y`: what lies deeper may move."""
    lines = [line.lstrip(">. ") for line in path.read_text().splitlines()]
    imports = [line for line in lines if re.match(r"(?:from|import)\s+reshard\b", line)]
    assert not [line for line in imports if re.match(r"\w+\s+reshard(?:\.\w+){2}", line)]


def test_imports_of_three_levels_are_seen() -> None:
    deep = ["from reshard.plans.job import Job", "import reshard.plans.job"]
    assert all(re.match(r"\w+\s+reshard(?:\.\w+){2}", line) for line in deep)
    assert not re.match(r"\w+\s+reshard(?:\.\w+){2}", "from reshard.plans import Job")
