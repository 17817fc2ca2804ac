"""Help is there for every command, and what its examples say can be done."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click
import numpy as np
import pytest

import reshard
from cli.command_runs import run_alone, run_here, write_model
from reshard.cli.program import program
from selection import keep_spread

COMMANDS = ("example", "inspect", "plan", "convert", "verify", "diff", "apply", "explain")
GROUPS = ("recipe",)
# Their examples need a job or a bucket, and are tried in tests/cli/commands.
OF_JOBS = ("calibrate", "clean")
# Not among the first examples.
LAST = ("version",)


def examples(*command: str) -> list[list[str]]:
    """The arguments of all examples in the help of a command."""
    text = run_here(*command, "--help").output.partition("Examples:\n")[2].partition("\n\n")[0]
    lines = [line.strip().partition(" && ")[0] for line in text.splitlines()]
    assert all(line.startswith("reshard ") for line in lines)
    return [shlex.split(line)[1:] for line in lines]


@pytest.fixture
def llama(folder: Path) -> None:
    """A very small model of the kind that the examples speak of, under their name."""
    at = "model.layers.0"
    path = write_model(
        folder / "llama-3-8b",
        **{
            "model.embed_tokens.weight": np.ones((32, 16), np.float32),
            f"{at}.mlp.gate_proj.weight": np.ones((24, 16), np.float32),
            f"{at}.mlp.up_proj.weight": np.ones((24, 16), np.float32),
            f"{at}.mlp.down_proj.weight": np.ones((16, 24), np.float32),
            f"{at}.self_attn.q_proj.weight": np.ones((16, 16), np.float32),
            f"{at}.self_attn.k_proj.weight": np.ones((8, 16), np.float32),
            f"{at}.self_attn.v_proj.weight": np.ones((8, 16), np.float32),
            f"{at}.self_attn.o_proj.weight": np.ones((16, 16), np.float32),
            f"{at}.input_layernorm.weight": np.ones(16, np.float32),
            f"{at}.post_attention_layernorm.weight": np.ones(16, np.float32),
            "model.norm.weight": np.ones(16, np.float32),
            "lm_head.weight": np.ones((32, 16), np.float32),
        },
    )
    config = {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
    }
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.usefixtures("llama")
def test_the_examples_run() -> None:
    ran = 0
    for command in ("convert", "inspect", "plan", "verify", "explain"):
        for arguments in examples(command):
            run = run_here(*arguments)
            assert (run.code, run.errors) == (0, ""), arguments
            assert "rules that decided no tensor" not in run.output
            ran += 1
    assert ran >= 14


@pytest.mark.usefixtures("llama")
def test_the_first_examples_run_in_their_order() -> None:
    assert [arguments[0] for arguments in examples()] == [*COMMANDS, *GROUPS]
    for arguments in examples():
        assert run_here(*arguments).code == 0


def test_bare_command_is_help() -> None:
    assert run_here() == run_here("--help") == run_here("-h")
    assert run_here().code == 0


def test_help_has_the_commands_and_exit_codes() -> None:
    text = run_here("--help").output
    listed = text.partition("Commands:\n")[2]
    assert re.findall(r"^  (\w+)", listed, re.MULTILINE) == [*COMMANDS, *GROUPS, *OF_JOBS, *LAST]
    assert "..." not in listed
    codes = text.partition("Exit codes:\n")[2]
    assert re.findall(r"^    (\d)  ", codes, re.MULTILINE) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("command", [*COMMANDS, *LAST])
def test_the_help_of_a_command_is_complete(command: str) -> None:
    text = run_here(command, "--help").output
    assert 2 <= len(examples(command)) <= 5
    assert "Keys of --json:" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    found = program.get_command(click.Context(program), command)
    assert found is not None
    assert found.get_short_help_str(100) == program.summaries[command]
    for parameter in found.params:
        if isinstance(parameter, click.Option):
            assert parameter.help and parameter.help.endswith((".", "]")), parameter.name
        else:
            assert parameter.human_readable_name in text


def test_the_version_is_printed_by_both_modules_too(folder: Path) -> None:
    assert run_here("--version").output == f"reshard {reshard.__version__}\n"
    for module in ("reshard", "reshard.cli"):
        code = f"import runpy; runpy.run_module('{module}', run_name='__main__', alter_sys=True)"
        run = run_alone("--version", cwd=folder, code=code)
        assert (run.code, run.output) == (0, f"reshard {reshard.__version__}\n"), run.errors


@pytest.mark.parametrize(
    "command",
    keep_spread(
        5,
        [(), *((name,) for name in (*COMMANDS, *GROUPS, *OF_JOBS, *LAST))],
        "a process for another command",
    ),
)
def test_help_imports_little(folder: Path, command: tuple[str, ...]) -> None:
    code = (
        "import sys; from reshard.cli import main; done = main()\n"
        "names = [name for name in sys.modules if name.startswith('reshard.')]\n"
        "sys.exit(done or sum(name.count('.') > 1 for name in names))"
    )
    # Some 25 of the command itself; a format or a conversion would bring over a hundred more.
    assert run_alone(*command, "--help", cwd=folder, code=code).code < 70


def test_inspect_imports_only_the_format_of_its_checkpoint(folder: Path) -> None:
    code = (
        "import sys; from reshard.cli import main; done = main()\n"
        "names = ' '.join(sys.modules)\n"
        "others = ('conversion', 'comparison', 'formats.torch_dcp.reader')\n"
        "sys.exit(done or any(f'reshard.checkpoint.{one}' in names for one in others))"
    )
    assert run_alone("inspect", "model", cwd=folder, code=code).code == 0


def test_the_shells_complete(folder: Path) -> None:
    """Each shell gets its script; bash runs it, and words that are begun are completed."""
    for shell in ("bash", "zsh", "fish"):
        script = run_alone(cwd=folder, _RESHARD_COMPLETE=f"{shell}_source")
        assert script.code == 0
        assert "_RESHARD_COMPLETE=" in script.output
        assert "Usage" not in script.output

    def completed(words: str) -> list[str]:
        number = str(len(words.split(" ")) - 1)
        asked = {"_RESHARD_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": number}
        return run_alone(cwd=folder, **asked).output.split()

    assert completed("reshard veri") == ["plain,verify"]
    assert "plain,--recipe" in completed("reshard convert --re")
    # A path: the shell lists the files itself.
    assert completed("reshard inspect mod") == ["file,mod"]
