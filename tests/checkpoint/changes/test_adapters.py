"""Adapters that PEFT saved, merged into their base, and those that are refused."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.changes.merged_weights import compare_weights
from checkpoint.checkpoint_files import tensor, write_file
from cli.command_runs import run_here
from reshard import checkpoint
from reshard.errors import FormatError, ReshardError, UsageError

RECORDS = Path(__file__).parents[2] / "golden" / "engines" / "peft.tar.xz"
CASES = ("plain", "patterns", "dora", "save", "embeddings", "bias", "swapped dora")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records, a folder each; not to be changed."""
    folder = tmp_path_factory.mktemp("peft")
    with tarfile.open(RECORDS) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_as_peft_merged_them(saved: Path, tmp_path: Path, case: str) -> None:
    adapters = [saved / case / "adapter", saved / case / "second"]
    for name, taken in (("merged", adapters[:1]), ("merged both", adapters)):
        target = tmp_path / name
        checkpoint.convert(saved / case / "base", target, to="full", adapters=taken)
        found = compare_weights(target, saved / case / name)
        # The sum of a product in another order: the last place of bfloat16 may differ.
        assert found.differing <= 0.002 * found.elements
        assert found.of_greatest < 2**-7
        assert compare_weights(saved / case / "base", target).differing > 100
        assert (target / "config.json").exists()
        assert not (target / "adapter_config.json").exists()
        assert not checkpoint.check_digests(checkpoint.open(target)).damaged


@pytest.mark.parametrize("case", ["plain", "dora", "swapped dora"])
def test_blocks_and_cuts_make_no_difference(
    saved: Path, tmp_path: Path, case: str, small_blocks: int
) -> None:
    base, adapters = saved / case / "base", [saved / case / "adapter"]
    checkpoint.convert(base, tmp_path / "whole", to="full", adapters=adapters)
    checkpoint.convert(base, tmp_path / "cut", to="tp=2", rules=["*=tp, ..."], adapters=adapters)
    assert checkpoint.compare(tmp_path / "whole", tmp_path / "cut").is_same


def test_a_base_that_is_cut(saved: Path, tmp_path: Path) -> None:
    base, adapters = saved / "plain" / "base", [saved / "plain" / "adapter"]
    checkpoint.convert(base, tmp_path / "tp", to="tp=2", rules=["*=tp, ..."])
    checkpoint.convert(tmp_path / "tp", tmp_path / "one", to="full", adapters=adapters)
    checkpoint.convert(base, tmp_path / "two", to="full", adapters=adapters)
    assert checkpoint.compare(tmp_path / "one", tmp_path / "two").is_same


def test_an_adapter_is_cut_with_its_base(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved / "plain" / "adapter", tmp_path / "adapter")
    shutil.copy(saved / "plain" / "base" / "config.json", folder)
    checkpoint.convert(folder, tmp_path / "tp", to="tp=2", recipe="llama")
    found = checkpoint.open(tmp_path / "tp")
    prefix = "base_model.model.model.layers.0"
    specs = {name.removeprefix(f"{prefix}."): tensor.spec for name, tensor in found.tensors.items()}
    assert specs["self_attn.q_proj.lora_A.weight"] == "-, -"
    assert specs["self_attn.q_proj.lora_B.weight"] in ("tp, -", "tp@heads4, -")
    assert specs["mlp.down_proj.lora_A.weight"] == "-, tp"
    assert specs["mlp.down_proj.lora_B.weight"] == "-, -"


def test_the_same_by_numpy(tmp_path: Path) -> None:
    """A convolution and a matrix of float32, against whole arrays."""
    random = np.random.default_rng(0)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    arrays = {
        "conv": (random.standard_normal((6, 4, 3, 3)), (2, 4, 3, 3), (6, 2, 1, 1)),
        "up": (random.standard_normal((6, 5)), (2, 5), (6, 2)),
    }
    wholes, parts = {}, {}
    expected = {}
    for name, (weight, a_shape, b_shape) in arrays.items():
        weight = weight.astype(np.float32)
        a, b = (random.standard_normal(s).astype(np.float32) for s in (a_shape, b_shape))
        wholes[f"{name}.weight"] = ("F32", weight.shape, weight.tobytes())
        parts[f"base_model.model.{name}.lora_A.weight"] = ("F32", a.shape, a.tobytes())
        parts[f"base_model.model.{name}.lora_B.weight"] = ("F32", b.shape, b.tobytes())
        product = b.reshape(6, 2).astype(np.float64) @ a.reshape(2, -1)
        expected[name] = weight + 2 * product.astype(np.float32).reshape(weight.shape)
    for folder, content in ((base, wholes), (adapter, parts)):
        folder.mkdir()
        write_raw(folder, content)
    write_config(adapter, {"peft_type": "LORA", "r": 2, "lora_alpha": 4})
    checkpoint.convert(base, tmp_path / "t", to="full", adapters=[adapter])
    found = checkpoint.open(tmp_path / "t")
    for name, array in expected.items():
        assert np.array_equal(checkpoint.read_tensor(found, f"{name}.weight"), array)


def write_raw(folder: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    header, data = {}, b""
    for name, (tag, shape, content) in tensors.items():
        ends = [len(data), len(data) + len(content)]
        header[name] = {"dtype": tag, "shape": list(shape), "data_offsets": ends}
        data += content
    text = json.dumps(header).encode()
    name = "adapter_model" if any("lora" in one for one in tensors) else "model"
    path = folder / f"{name}.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_config(folder: Path, config: Any) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(config))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "IA3"}, "type 'IA3'"),
    "no kind": ({"peft_type": None}, "type None"),
    "experts": ({"target_parameters": ["experts.up"]}, "target_parameters"),
    "layers again": ({"layer_replication": [[0, 2]]}, "layer_replication"),
    "a changed base": ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4'"),
    "another rank": ({"r": 5}, "are of rank 4, its config has rank 5"),
    "a rank of text": ({"r": "4"}, "r of .* is '4'"),
    "an alpha that is none": ({"lora_alpha": None}, "lora_alpha of .* is None"),
    "DoRA without magnitudes": ({"use_dora": True}, "has no magnitude"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_would_merge_differently_are_refused_by_their_config(
    saved: Path, tmp_path: Path, name: str
) -> None:
    changes, says = REFUSED[name]
    adapter = shutil.copytree(saved / "plain" / "adapter", tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    write_config(adapter, {**config, **changes})
    with pytest.raises(UsageError, match=says):
        checkpoint.convert(saved / "plain" / "base", tmp_path / "t", to="full", adapters=[adapter])
    assert not (tmp_path / "t").exists()


def test_an_adapter_of_another_model_is_refused(saved: Path, tmp_path: Path) -> None:
    adapters = [saved / "plain" / "adapter"]
    with pytest.raises(UsageError, match="does not have; is it"):
        checkpoint.convert(
            saved / "swapped dora" / "base", tmp_path / "t", to="full", adapters=adapters
        )
    with pytest.raises(UsageError, match=r"no adapter_config\.json"):
        checkpoint.convert(
            saved / "plain" / "base", tmp_path / "t", to="full", adapters=[saved / "plain" / "base"]
        )
    base = tmp_path / "base"
    base.mkdir()
    names = checkpoint.open(saved / "plain" / "base").tensors
    write_file(base / "model.safetensors", {name: tensor("float32", (3, 3), 1) for name in names})
    with pytest.raises(UsageError, match="do not change a weight of shape"):
        checkpoint.convert(base, tmp_path / "t", to="full", adapters=adapters)


def test_a_change_of_a_quantised_weight_is_refused(saved: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    names = checkpoint.open(saved / "plain" / "base").tensors
    types = {name: "uint8" if "q_proj" in name else "float32" for name in names}
    write_file(
        base / "model.safetensors",
        {name: tensor(types[name], one.shape, 1) for name, one in names.items()},
    )
    with pytest.raises(UsageError, match=r"is of uint8.*--dequantize"):
        checkpoint.convert(base, tmp_path / "t", to="full", adapters=[saved / "plain" / "adapter"])


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 99999])
def test_adapters_without_a_valid_config_are_refused(
    saved: Path, tmp_path: Path, content: bytes
) -> None:
    adapter = shutil.copytree(saved / "plain" / "adapter", tmp_path / "adapter")
    (adapter / "adapter_config.json").write_bytes(content)
    with pytest.raises(FormatError):
        checkpoint.convert(saved / "plain" / "base", tmp_path / "t", to="full", adapters=[adapter])


@pytest.mark.parametrize(
    "options",
    [
        {"dequantize": True},
        {"quantize": "fp8-block128"},
        {"target_names": "megatron", "recipe": "llama"},
    ],
)
def test_merging_excludes_other_changes(
    saved: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="adapters cannot go together"):
        checkpoint.convert(
            saved / "plain" / "base",
            tmp_path / "t",
            to="full",
            adapters=[saved / "plain" / "adapter"],
            **options,
        )


@pytest.mark.parametrize("case", ["plain", "dora", "save"])
def test_merging_and_casting_at_once_equals_one_after_the_other(
    saved: Path, tmp_path: Path, case: str, small_blocks: int
) -> None:
    """The same as the one after the other: what is merged is rounded to its type first."""
    base, adapters = saved / case / "base", [saved / case / "adapter"]
    own = {one.dtype.name for one in checkpoint.open(base).tensors.values()}
    dtype = "fp32" if own == {"bfloat16"} else "bf16"
    checkpoint.convert(base, tmp_path / "merged", to="full", adapters=adapters)
    checkpoint.convert(tmp_path / "merged", tmp_path / "two steps", to="full", dtype=dtype)
    checkpoint.convert(
        base, tmp_path / "cut", to="tp=2", rules=["*=tp, ..."], adapters=adapters, dtype=dtype
    )
    assert {one.dtype.name for one in checkpoint.open(tmp_path / "cut").tensors.values()} != own
    assert checkpoint.compare(tmp_path / "two steps", tmp_path / "cut").is_same
    assert not checkpoint.check_digests(checkpoint.open(tmp_path / "cut")).damaged
    verify = ["verify", base, tmp_path / "cut", "--adapter", adapters[0]]
    assert run_here(*verify, "--dtype", dtype).code == 0
    assert run_here(*verify).code == 1
    assert run_here("verify", base, tmp_path / "cut", "--dtype", dtype).code == 1


def test_a_base_in_names_of_another_program(saved: Path, tmp_path: Path) -> None:
    base, adapters = saved / "plain" / "base", [saved / "plain" / "adapter"]
    names = {"recipe": "llama", "to": "tp=2"}
    checkpoint.convert(
        base, tmp_path / "megatron", target_names="megatron", format="torch-dcp", **names
    )
    checkpoint.convert(
        tmp_path / "megatron", tmp_path / "out", source_names="megatron", adapters=adapters, **names
    )
    checkpoint.convert(base, tmp_path / "merged", to="full", adapters=adapters)
    assert checkpoint.compare(tmp_path / "merged", tmp_path / "out").is_same


@pytest.mark.parametrize("adapters", ["path", 3, [3]])
def test_adapters_that_are_not_a_list_of_paths_are_refused(
    saved: Path, tmp_path: Path, adapters: Any
) -> None:
    with pytest.raises(UsageError, match="list of paths"):
        checkpoint.convert(saved / "plain" / "base", tmp_path / "t", to="full", adapters=adapters)


def test_a_changed_adapter_is_another_conversion(saved: Path, tmp_path: Path) -> None:
    """A run that was interrupted does not go on with another adapter."""
    base, adapter = saved / "plain" / "base", saved / "plain" / "adapter"

    class Stop(Exception):
        pass

    def stop(_: Any) -> None:
        raise Stop

    with pytest.raises(Stop):
        checkpoint.convert(base, tmp_path / "t", to="full", adapters=[adapter], progress=stop)
    with pytest.raises(ReshardError, match="another conversion"):
        checkpoint.convert(base, tmp_path / "t", to="full", adapters=[saved / "plain" / "second"])
    checkpoint.convert(base, tmp_path / "t", to="full", adapters=[adapter])
    found = compare_weights(tmp_path / "t", saved / "plain" / "merged")
    assert found.differing <= 0.002 * found.elements
