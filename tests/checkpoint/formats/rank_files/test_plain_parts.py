"""Plain tensors of ranks are joined by a mesh and rules that the user gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard.checkpoint import compare, convert, open_checkpoint, plan_conversion, read_tensor
from reshard.checkpoint.blocks.block_io import OpenFiles
from reshard.checkpoint.storage.local_files import SourceFile
from reshard.cli import main
from reshard.errors import FormatError, ReshardError, UsageError

torch = pytest.importorskip("torch")

MESH, RULES = "pp=1, tp=4", ["up.*=tp, ...", "down=-, tp", "*=..."]


def whole() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "up.weight": torch.randn(10, 6),
        "up.bias": torch.randn(10),
        "down": torch.randn(6, 9),
        "norm": torch.randn(6),
    }


def parts(rank: int, ranks: int = 4) -> dict[str, Any]:
    """The part of a rank, cut as `torch.chunk` cuts: unevenly."""
    state = whole()

    def chunk(one: Any, dim: int) -> Any:
        # The last ranks may have less.
        size = -(-one.shape[dim] // ranks)
        start = min(rank * size, one.shape[dim])
        stop = min(start + size, one.shape[dim])
        return one.narrow(dim, start, stop - start).clone()

    return {
        "up.weight": chunk(state["up.weight"], 0),
        "up.bias": chunk(state["up.bias"], 0),
        "down": chunk(state["down"], 1),
        "norm": state["norm"],
    }


def save(folder: Path, name: str = "mp_rank_{rank:02d}.pt") -> Path:
    folder.mkdir(exist_ok=True)
    for rank in range(4):
        torch.save(parts(rank), folder / name.format(rank=rank))
    return folder


@pytest.mark.parametrize(
    "name", ["mp_rank_{rank:02d}.pt", "consolidated.{rank:02d}.pth", "model_rank_{rank}"]
)
def test_rules_join_plain_parts(tmp_path: Path, name: str) -> None:
    opened = open_checkpoint(save(tmp_path / "source", name), mesh=MESH, rules=RULES)
    for key, value in whole().items():
        assert opened[key].shape == tuple(value.shape)
        assert read_tensor(opened, key).tobytes() == value.numpy().tobytes()
    assert opened["down"].spec == "-, tp"
    convert(opened, tmp_path / "target", to="full")
    assert compare(opened, tmp_path / "target").is_same


def test_safetensors_files_of_ranks_are_read(tmp_path: Path) -> None:
    for rank in range(2):
        shards = {"w": tensor("bfloat16", (3, 4), rank), "b": tensor("float32", (4,), 7)}
        write_file(tmp_path / f"model_rank{rank}.safetensors", shards)
    opened = open_checkpoint(tmp_path, mesh="tp=2", rules=["w=tp, -", "*=..."])
    assert opened["w"].shape == (6, 4)
    expected = b"".join(tensor("bfloat16", (3, 4), rank).bits.tobytes() for rank in range(2))
    assert read_tensor(opened, "w").tobytes() == expected


def test_optimizer_state_is_sharded_as_its_parameter(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.full((3, 4), float(rank))}, tmp_path / f"model_rank{rank}.pt")
        state = {
            0: {"step": torch.tensor(4.0), "exp_avg": torch.full((3, 4), rank + 10.0)},
        }
        groups = [{"lr": 0.5, "params": [0]}]
        torch.save({"state": state, "param_groups": groups}, tmp_path / f"optim_rank{rank}.pt")
    opened = open_checkpoint(tmp_path, mesh="tp=2", rules=["w=tp, -"])
    found = read_tensor(opened, "optimizer.state.w.exp_avg")
    assert (opened["optimizer.state.w.exp_avg"].shape, opened["w"].shape) == ((6, 4), (6, 4))
    flat = np.frombuffer(found.tobytes(), np.float32).reshape(6, 4)
    assert flat[:, 0].tolist() == [10, 10, 10, 11, 11, 11]
    assert opened["optimizer.state.w.step"].shape == ()
    assert opened.values["optimizer.param_groups"] == [{"lr": 0.5, "params": ["w"]}]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({}, UsageError, "--source-mesh tp=4 --source-rule"),
        ({"rules": RULES}, UsageError, "without its mesh"),
        ({"mesh": MESH}, UsageError, "without rules"),
        ({"mesh": "tp=2", "rules": RULES}, UsageError, "has 2 ranks.*files of 4"),
        ({"mesh": MESH, "rules": RULES[:2]}, ReshardError, "norm"),
        (
            {"mesh": MESH, "rules": ["up.*=tp@balanced, ...", *RULES[1:]]},
            FormatError,
            r"'up.weight' of \[10, 6\].*rank 1 has|rank \d has \[\d, 6\].*expected",
        ),
        ({"mesh": MESH, "recipe": "auto"}, UsageError, "needs a config.json"),
    ],
)
def test_rules_that_do_not_fit_are_errors(
    tmp_path: Path, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        open_checkpoint(save(tmp_path), **arguments)


def test_rules_for_files_that_describe_their_shardings_are_an_error(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"w": tensor("float32", (2,), 1)})
    with pytest.raises(UsageError, match="specify how"):
        open_checkpoint(tmp_path, mesh="tp=2", rules=["*=tp"])


def test_a_recipe_joins_plain_parts(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 10,
    }
    shapes = {
        "model.embed_tokens.weight": (10, 16),
        "model.layers.0.self_attn.q_proj.weight": (16, 16),
        "model.layers.0.self_attn.k_proj.weight": (8, 16),
        "model.layers.0.self_attn.v_proj.weight": (8, 16),
        "model.layers.0.self_attn.o_proj.weight": (16, 16),
        "model.layers.0.mlp.gate_proj.weight": (24, 16),
        "model.layers.0.mlp.up_proj.weight": (24, 16),
        "model.layers.0.mlp.down_proj.weight": (16, 24),
        "model.layers.0.input_layernorm.weight": (16,),
        "model.layers.0.post_attention_layernorm.weight": (16,),
        "model.norm.weight": (16,),
        "lm_head.weight": (10, 16),
    }
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    columns = ("o_proj", "down_proj")
    for rank in range(2):
        part = {
            name: one
            if one.ndim == 1
            else one.chunk(2, 1 if any(word in name for word in columns) else 0)[rank].clone()
            for name, one in state.items()
        }
        torch.save(part, tmp_path / f"rank_{rank}.pt")
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_checkpoint(tmp_path, mesh="tp=2", recipe="auto")
    for name, one in state.items():
        assert read_tensor(opened, name).tobytes() == one.numpy().tobytes(), name


def test_other_rules_are_another_source(tmp_path: Path) -> None:
    """A run that was interrupted does not go on with parts that other rules put elsewhere."""
    for rank in range(2):
        torch.save({"w": torch.full((4, 4), float(rank))}, tmp_path / f"rank{rank}.pt")
    described = []
    for rule in ("w=tp, -", "w=tp@stride2, -"):
        opened = open_checkpoint(tmp_path, mesh="tp=2", rules=[rule])
        conversion = plan_conversion(opened, tmp_path.parent / "target", to="full")
        sources = OpenFiles(lambda name: SourceFile(tmp_path / name))
        described.append(conversion.description(sources))
        sources.close()
    assert described[0] != described[1]


def test_the_command_takes_a_mesh_and_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = str(save(tmp_path / "source")), str(tmp_path / "target")
    options = ["--source-mesh", "tp=4"]
    for rule in RULES:
        options += ["--source-rule", rule]
    for arguments in (
        ["inspect", source, *options],
        ["plan", source, "--to", "full", *options],
        ["convert", source, target, "--to", "full", "--quiet", *options],
        ["verify", source, target, *options],
    ):
        assert main(arguments) == 0, capsys.readouterr()
    assert main(["inspect", source]) != 0
    assert "--source-rule" in capsys.readouterr().err


def test_ranks_of_several_axes_are_neighbours_on_the_last(tmp_path: Path) -> None:
    grid = torch.arange(24.0).reshape(4, 6)
    # What has no ending is a rank's where it is a file of `torch.save`.
    (tmp_path / "rank_9").write_text("a note")
    (tmp_path / "rank_8").mkdir()
    for rank in range(4):
        row, column = divmod(rank, 2)
        part = grid[2 * row : 2 * row + 2, 3 * column : 3 * column + 3].clone()
        torch.save({"w": part}, tmp_path / f"rank_{rank}")
    opened = open_checkpoint(tmp_path, mesh="dp=2,tp=2", rules=["*=dp, tp"])
    assert np.array_equal(read_tensor(opened, "w"), grid.numpy())
    with pytest.raises(UsageError, match=r"product is 4.*--source-mesh dp=\.\.\.,tp="):
        open_checkpoint(tmp_path)


# Meta's Llama.


def write_meta(folder: Path, parameters: str | None, ranks: int = 2) -> Path:
    folder.mkdir()
    for rank in range(ranks):
        part = {
            "tok_embeddings.weight": torch.ones(6, 4),
            "layers.0.attention.wo.weight": torch.ones(8, 4),
        }
        torch.save(part, folder / f"consolidated.0{rank}.pth")
    if parameters is not None:
        (folder / "params.json").write_text(parameters)
    return folder


def test_the_embedding_is_over_its_rows_or_columns_by_its_shape(tmp_path: Path) -> None:
    by_columns = open_checkpoint(write_meta(tmp_path / "a", json.dumps({"dim": 8, "n_heads": 4})))
    assert by_columns.tensors["tok_embeddings.weight"].shape == (6, 8)
    assert by_columns.tensors["layers.0.attention.wo.weight"].shape == (8, 8)
    by_rows = open_checkpoint(write_meta(tmp_path / "b", json.dumps({"dim": 4, "n_heads": 4})))
    assert by_rows.tensors["tok_embeddings.weight"].shape == (12, 4)


def test_without_parameters_the_sharding_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"files of 2 ranks and no params.json"):
        open_checkpoint(write_meta(tmp_path / "a", None))


@pytest.mark.parametrize("parameters", ["{", "[]"])
def test_damaged_parameters_are_an_error(tmp_path: Path, parameters: str) -> None:
    with pytest.raises(FormatError, match=r"params\.json is not (a )?JSON"):
        open_checkpoint(write_meta(tmp_path / "a", parameters))


def test_key_value_heads_that_files_do_not_divide(tmp_path: Path) -> None:
    parameters = json.dumps({"dim": 8, "n_heads": 4, "n_kv_heads": 1})
    with pytest.raises(UsageError, match="1 key/value heads, which they do not divide"):
        open_checkpoint(write_meta(tmp_path / "a", parameters))
