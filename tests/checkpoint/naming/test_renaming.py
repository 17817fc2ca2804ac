"""Checkpoints by other names, fused and apart, against arrays put together by NumPy."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from checkpoint.checkpoint_files import (
    Cut,
    Tensor,
    beside,
    cuts,
    read_file,
    small_folder,
    tensor,
    write_file,
    write_ranks,
)
from checkpoint.test_memory import SLACK_BYTES, measure, write_holes
from reshard import DeviceMesh, checkpoint, spec
from reshard.checkpoint.blocks import fusing
from reshard.checkpoint.conversion.plan import plan_conversion
from reshard.checkpoint.formats.safetensors.sharded import shard_file_name
from reshard.checkpoint.training.plain_state import find_groups, in_plain_values
from reshard.checkpoint.training.state import find_training_state
from reshard.dtypes import dtype
from reshard.errors import DigestError, RecipeError, ReshardError, UsageError
from reshard.recipes.naming import Fusion
from selection import choose, keep_alternate

# Two key/value heads of four rows; each serves two of the four query heads.
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HIDDEN, HEAD, INNER, WORDS = 16, 4, 24, 30


def llama() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (WORDS, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (WORDS, HIDDEN),
    }
    for layer in range(2):
        of = f"model.layers.{layer}."
        shapes |= {
            f"{of}self_attn.q_proj.weight": (4 * HEAD, HIDDEN),
            f"{of}self_attn.k_proj.weight": (2 * HEAD, HIDDEN),
            f"{of}self_attn.v_proj.weight": (2 * HEAD, HIDDEN),
            f"{of}self_attn.o_proj.weight": (HIDDEN, 4 * HEAD),
            f"{of}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{of}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{of}mlp.down_proj.weight": (HIDDEN, INNER),
            f"{of}input_layernorm.weight": (HIDDEN,),
            f"{of}post_attention_layernorm.weight": (HIDDEN,),
        }
    return {
        name: tensor("bfloat16", shape, seed) for seed, (name, shape) in enumerate(shapes.items())
    }


def megatron_rank(model: Mapping[str, Tensor], rank: int, tp: int) -> dict[str, Tensor]:
    """What Megatron has on a tensor-parallel rank: slices of NumPy, by its own names."""

    def rows(name: str, heads: int = 1) -> np.ndarray:
        """This rank's rows of a tensor, `heads` at a time along the first dimension."""
        bits = model[name].bits
        return np.split(bits.reshape(heads, -1, *bits.shape[1:]), tp)[rank]

    def part(bits: np.ndarray) -> Tensor:
        return Tensor(dtype("bfloat16"), np.ascontiguousarray(bits))

    words = -(-WORDS // tp)
    ours = slice(words * rank, words * rank + words)
    found = {
        "embedding.word_embeddings.weight": part(model["model.embed_tokens.weight"].bits[ours]),
        "output_layer.weight": part(model["lm_head.weight"].bits[ours]),
        "decoder.final_layernorm.weight": model["model.norm.weight"],
    }
    for layer in range(2):
        own, theirs = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        # For each query group its queries, its keys, its values.
        groups = [
            np.concatenate(
                [rows(f"{own}self_attn.{which}_proj.weight", 2)[group] for which in ("q", "k", "v")]
            )
            for group in range(2 // tp)
        ]
        inner = [
            np.split(model[f"{own}mlp.{w}_proj.weight"].bits, tp)[rank] for w in ("gate", "up")
        ]
        columns = {
            "self_attention.linear_proj.weight": f"{own}self_attn.o_proj.weight",
            "mlp.linear_fc2.weight": f"{own}mlp.down_proj.weight",
        }
        found |= {
            f"{theirs}self_attention.linear_qkv.weight": part(np.concatenate(groups)),
            f"{theirs}mlp.linear_fc1.weight": part(np.concatenate(inner)),
            f"{theirs}input_layernorm.weight": model[f"{own}input_layernorm.weight"],
            f"{theirs}pre_mlp_layernorm.weight": model[f"{own}post_attention_layernorm.weight"],
        }
        for name, of in columns.items():
            found[theirs + name] = part(np.split(model[of].bits, tp, axis=1)[rank])
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_file(folder / "model.safetensors", llama())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_whole_tensors_in_megatrons_names(model: Path, small_blocks: int) -> None:
    target = model.with_name("whole")
    names = {"recipe": "auto", "to": "full"}
    report = checkpoint.convert(model, target, target_names="megatron", **names)
    assert read_file(target / "model.safetensors") == megatron_rank(llama(), 0, 1)
    assert report.read_bytes == checkpoint.open(model).size_bytes, "each byte is read once"
    checkpoint.convert(target, model.with_name("back"), source_names="megatron", **names)
    assert read_file(model.with_name("back") / "model.safetensors") == llama()


def test_ranks_as_megatron_has_them(model: Path, small_blocks: int) -> None:
    target = model.with_name("ranks")
    checkpoint.convert(
        model, target, to="tp=2", recipe="llama", target_names="megatron", replicas="every"
    )
    for rank in range(2):
        assert read_file(target / shard_file_name(rank)) == megatron_rank(llama(), rank, 2)


def test_ranks_as_vllm_has_them(model: Path, small_blocks: int) -> None:
    target = model.with_name("ranks")
    checkpoint.convert(model, target, to="tp=2", recipe="llama", target_names="vllm")
    whole = llama()
    for rank in range(2):
        found = read_file(target / shard_file_name(rank))
        for fused, members in (
            ("self_attn.qkv_proj", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            ("mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"]),
        ):
            of = "model.layers.1."
            parts = [np.split(whole[f"{of}{m}.weight"].bits, 2)[rank] for m in members]
            assert (found[f"{of}{fused}.weight"].bits == np.concatenate(parts)).all()


@pytest.mark.parametrize(
    ("to", "form"),
    keep_alternate(
        ["tp=2,pp=2", "tp=2,fsdp=2", "fsdp=3", "dp=2", "tp=2", "3"],
        ["sharded-safetensors", "torch-dcp"],
        "the other format; names do not depend on it",
    ),
)
def test_from_one_convention_to_the_other(
    model: Path, small_blocks: int, to: str, form: str
) -> None:
    """Cut for ranks by one's names, then for others by the other's, then back."""
    first, second, back = (model.with_name(name) for name in ("first", "second", "back"))
    recipe = {"recipe": "auto", "allow": ["incomplete"]}
    checkpoint.convert(model, first, to=to, format=form, target_names="megatron", **recipe)
    both = {"source_names": "megatron", "target_names": "vllm"}
    checkpoint.convert(first, second, to="tp=2", **both, **recipe)
    checkpoint.convert(second, back, to="full", source_names="vllm", **recipe)
    assert read_file(back / "model.safetensors") == llama()


@pytest.mark.parametrize("to", ["full", "tp=2,ep=2,pp=2", "ep=2,etp=2"])
def test_experts_by_name(tmp_path: Path, small_blocks: int, to: str) -> None:
    """Gate and up of each expert are one parameter, numbered behind its name."""
    shapes = {"model.embed_tokens.weight": (8, 4)}
    for layer, expert in np.ndindex(2, 4):
        of = f"model.layers.{layer}.mlp.experts.{expert}."
        shapes |= {f"{of}gate_proj.weight": (6, 4), f"{of}up_proj.weight": (6, 4)}
        shapes |= {f"{of}down_proj.weight": (4, 6)}
    whole = {name: tensor("int16", shape, n) for n, (name, shape) in enumerate(shapes.items())}
    source, made, back = (tmp_path / name for name in ("source", "made", "back"))
    source.mkdir()
    write_file(source / "model.safetensors", whole)
    config = {**CONFIG, "model_type": "qwen3_moe", "num_experts": 4}
    (source / "config.json").write_text(json.dumps(config))
    partial = {"recipe": "auto", "allow": ["incomplete"]}
    checkpoint.convert(source, made, to=to, target_names="megatron", **partial)
    found = checkpoint.open(made)
    fc1 = checkpoint.read_tensor(found, "decoder.layers.1.mlp.experts.linear_fc1.weight3")
    of = "model.layers.1.mlp.experts.3."
    both = [whole[f"{of}{which}_proj.weight"].bits for which in ("gate", "up")]
    assert fc1.tobytes() == np.concatenate(both).tobytes()
    checkpoint.convert(made, back, to="full", source_names="megatron", **partial)
    assert read_file(back / "model.safetensors") == whole


@st.composite
def fusions(draw: st.DrawFn) -> tuple[Fusion, dict[str, Tensor], Tensor]:
    """A fusion, its members, and the fused parameter as NumPy makes it."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    at = draw(st.integers(0, len(shape) - 1))
    stacked, transposed = draw(st.integers(0, 3)), len(shape) > 1 and draw(st.booleans())
    names = "abcd"[: draw(st.integers(2 - bool(stacked or transposed), 4))]
    shares = tuple(draw(st.sampled_from([1, 1, 2, 3])) for _ in names)
    groups, size = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    members, numbers, fused = {}, [f"{n}" for n in range(stacked)] or [""], []
    for seed, number in enumerate(numbers):
        own = {}
        for name, share in zip(names, shares, strict=True):
            shape[at] = groups * share * size
            own[name + number] = tensor("int16", tuple(shape), 10 * seed + ord(name))
        pieces = [
            np.split(bits.bits, groups, axis=at)[group]
            for group in range(groups)
            for bits in own.values()
        ]
        fused.append(np.concatenate(pieces, axis=at))
        members |= own
    whole = np.stack(fused) if stacked else fused[0]
    if transposed:
        whole = np.ascontiguousarray(whole.swapaxes(-1, -2))
    patterns = tuple(name + "{}" * bool(stacked) for name in names)
    fusion = Fusion(patterns, shares, groups, at, stacked, transposed)
    return fusion, members, Tensor(dtype("int16"), whole)


FusionCase = tuple[Fusion, dict[str, Tensor], Tensor, Cut, Cut]


@st.composite
def sharded_fusions(draw: st.DrawFn) -> FusionCase:
    """A fusion, its members, the fused parameter, and a sharding of each."""
    fusion, members, fused = draw(fusions())
    return fusion, members, fused, draw(cuts(members)), draw(cuts({"fused": fused}))


def fusion_with_a_shard_of_halo_only() -> FusionCase:
    """Members of one element; a rank without elements of its own holds it as a halo of `d`."""
    members = {name: tensor("int16", (1, 1), ord(name)) for name in "abcd"}
    fused = Tensor(dtype("int16"), np.concatenate([one.bits for one in members.values()]))
    mesh = DeviceMesh.of(x=2, y=2)
    specs = dict.fromkeys("abc", spec(mesh, "-, -")) | {"d": spec(mesh, "-, x@pad2 / y@halo[1,0]")}
    fused_specs = {"fused": spec(mesh, "x@pad2 / y@halo[2,0], -")}
    return Fusion(tuple("abcd")), members, fused, (mesh, specs), (mesh, fused_specs)


@settings(max_examples=choose(12, 100))
@given(sharded_fusions(), st.sampled_from(["x=2", "x=3"]), st.sampled_from([16, 1000]))
@example(fusion_with_a_shard_of_halo_only(), "x=2", 16)
def test_any_fusion_of_any_cut(case: FusionCase, to: str, block_bytes: int) -> None:
    fusion, members, fused, members_cut, fused_cut = case
    table = {"fused": fusion}
    for before, after, (mesh, specs), names in (
        (members, {"fused": fused}, members_cut, {"target_names": table}),
        ({"fused": fused}, members, fused_cut, {"source_names": table}),
    ):
        with small_folder(block_bytes) as folder:
            write_ranks(folder / "cut", before, mesh, specs)
            checkpoint.convert(folder / "cut", folder / "full", to="full", **names)
            assert read_file(folder / "full" / "model.safetensors") == after
            # A member cut by ceil, whatever the groups: heads are, where there are enough.
            rules = ["*=..."] if fusion.groups != 1 else ["*=x, ..."]
            checkpoint.convert(folder / "cut", folder / "x", to=to, rules=rules, **names)
            found = checkpoint.open(folder / "x")
            for name, whole in after.items():
                assert checkpoint.read_tensor(found, name).tobytes() == whole.bits.tobytes()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fused_tensors_of_torch_are_compared_with_checksums(tmp_path: Path) -> None:
    """Also of a member that it saved transposed, so that it is read with strides."""
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    a, b = torch.arange(48.0).reshape(8, 6), torch.arange(30.0).reshape(6, 5).t()
    folder = tmp_path / "dcp"
    dcp.save({"a": a, "b": b, "step": 3}, checkpoint_id=folder, no_dist=True)
    table = {"c": Fusion(("a", "b"), (8, 5))}
    checkpoint.convert(folder, tmp_path / "full", to="full", target_names=table)
    found = checkpoint.read_tensor(checkpoint.open(tmp_path / "full"), "c")
    assert (found == torch.cat([a, b]).numpy()).all()
    checkpoint.convert(
        folder,
        tmp_path / "other",
        to="x=2",
        rules=["*=-, x"],
        format="torch-dcp",
        target_names=table,
    )
    state = {"c": torch.zeros(13, 6), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "other", no_dist=True)
    assert torch.equal(state["c"], torch.cat([a, b])) and state["step"] == 3
    path = folder / "__0_0.distcp"
    for whole in (a.numpy().tobytes(), b.t().contiguous().numpy().tobytes()):
        content = path.read_bytes()
        at = content.index(whole) + 20
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(DigestError, match="checksum"):
            checkpoint.convert(folder, tmp_path / "no", to="full", target_names=table, restart=True)
        path.write_bytes(content)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_checksums_of_tensors_read_by_columns(tmp_path: Path, small_blocks: int) -> None:
    """Of members that lie beside each other, what is between is read along: twice in all."""
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    whole = torch.arange(78.0).reshape(6, 13)
    folder = tmp_path / "dcp"
    dcp.save({"c": whole}, checkpoint_id=folder, no_dist=True)
    names = {"source_names": {"c": Fusion(("a", "b"), (8, 5), dimension=1)}}
    checkpoint.convert(folder, tmp_path / "full", to="full", **names)
    found = checkpoint.open(tmp_path / "full")
    assert (checkpoint.read_tensor(found, "a") == whole[:, :8].numpy()).all()
    assert (checkpoint.read_tensor(found, "b") == whole[:, 8:].numpy()).all()
    path = folder / "__0_0.distcp"
    content = path.read_bytes()
    at = content.index(whole.numpy().tobytes()) + 20
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(DigestError, match="checksum"):
        checkpoint.convert(folder, tmp_path / "no", to="full", **names)


def test_digests_of_renamed_and_fused_tensors_are_compared(model: Path) -> None:
    recipe = {"recipe": "auto", "to": "full"}
    source = model.with_name("source")
    checkpoint.convert(model, source, to="full")
    conversion = plan_conversion(source, model.with_name("x"), target_names="megatron", **recipe)
    fused = {
        one.name.rpartition(".layers.1.")[2].partition(".weight")[0] for one in conversion.apart
    }
    assert {"self_attn.q_proj", "mlp.up_proj"} <= fused
    path = source / "model.safetensors"
    whole, content = llama(), path.read_bytes()
    for name, expected in (
        ("mlp.down_proj", r"decoder.layers.1.mlp.linear_fc2.weight"),
        ("mlp.up_proj", r"model.layers.1.mlp.up_proj.weight"),
    ):
        at = content.index(whole[f"model.layers.1.{name}.weight"].bits.tobytes())
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(DigestError, match=expected):
            checkpoint.convert(source, model.with_name("x"), target_names="megatron", **recipe)


def test_other_names_are_another_conversion(model: Path) -> None:
    texts = set()
    for names in (None, "megatron", "vllm", {"x.*": "model.*"}, {"y.*": "model.*"}):
        conversion = plan_conversion(
            model,
            model.with_name("x"),
            to="full",
            recipe="auto" if isinstance(names, str) else None,
            target_names=names,
        )
        texts.add(conversion.resolved["target_names"])
    assert len(texts) == 5


@pytest.mark.parametrize("names", ["source_names", "target_names"])
def test_memory_is_bounded(tmp_path: Path, names: str) -> None:
    rows = {"q": 8192, "k": 4096, "v": 4096}
    shapes = {f"model.layers.0.self_attn.{n}_proj.weight": (r, 2048) for n, r in rows.items()}
    if names == "source_names":
        shapes = {"decoder.layers.0.self_attention.linear_qkv.weight": (16384, 2048)}
    source = write_holes(tmp_path / "source", shapes)
    (source / "config.json").write_text(json.dumps(CONFIG))
    how = {"to": "full", "recipe": "auto", names: "megatron", "allow": ["incomplete"]}
    peak_bytes = measure(source, tmp_path / "target", how, extra_bytes=32 << 20)
    assert peak_bytes < (32 << 20) + SLACK_BYTES


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ({"f": Fusion(("a", "z"))}, {"to": "full"}, "'f' is fused of tensors of which .* has no 'z'"),
    ({"f": Fusion(("a", "n"))}, {"to": "full"}, r"int16 \[4, 6\], and 'n', int16 \[6\]"),
    ({"f": Fusion(("a", "h"))}, {"to": "full"}, r"and 'h', float32 \[4, 6\]"),
    ({"f": Fusion(("a", "b"), (1, 3))}, {"to": "full"}, "not in the proportion of 1:3"),
    ({"f": Fusion(("a", "b"), (1, 1), 5)}, {"to": "full"}, "'f': length 8 cannot be cut into 5"),
    ({"f": Fusion(("n", "o"), dimension=1)}, {"to": "full"}, "'f' cannot be fused of"),
    ({"b": "a"}, {"to": "full"}, "would both be 'b'"),
    ({"z": "q"}, {"to": "full"}, "no name in .*, such as 'a', is one that the table"),
    ("megatron", {"to": "full"}, "are those of a recipe; name one as well"),
    ("theirs", {"to": "full", "recipe": "llama"}, "no names of 'theirs'"),
    (["a"], {"to": "full"}, "a table of names and Fusions"),
    ({"a": 3}, {"to": "full"}, "a table of names and Fusions"),
    (
        {"f": Fusion(("a", "b"))},
        {"to": "x=2", "rules": ["a=x, -", "b=-, x", "*=..."]},
        "shard them over the same axes, or keep them apart",
    ),
    (
        {"f": Fusion(("a", "b"), (1, 1), 4)},
        {"to": "x=8", "rules": ["[ab]=x, -", "*=..."]},
        "in 4 groups, which 8 ranks cannot be given whole",
    ),
]


@pytest.mark.parametrize(("names", "options", "match"), WRONG)
def test_members_that_cannot_be_fused_are_refused(
    tmp_path: Path, names: Any, options: dict[str, Any], match: str
) -> None:
    shapes = {"a": (4, 6), "b": (4, 6), "n": (6,), "o": (6,)}
    tensors = {name: tensor("int16", shape) for name, shape in shapes.items()}
    write_file(tmp_path / "model.safetensors", {**tensors, "h": tensor("float32", (4, 6))})
    with pytest.raises((RecipeError, UsageError), match=match):
        checkpoint.convert(tmp_path, beside(tmp_path, "t"), target_names=names, **options)


def test_parameters_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    tensors = {"f": tensor("int16", (5, 6)), "a": tensor("int16", (2,)), "s": tensor("int16", ())}
    write_file(tmp_path / "model.safetensors", tensors)
    for names, match in (
        ({"f": Fusion(("x", "y"))}, "'f': length 5 cannot be cut"),
        ({"f": Fusion(("a", "y"), (1, 5), dimension=1)}, "'f' and 'a' in .* would both be 'a'"),
        ({"s": Fusion(("x", "y"))}, r"'s' has shape \[\], and is fused along dimension 0"),
        ({"f": Fusion(("x", "y"), ("heads", 1))}, "needs numbers of a config.json"),
    ):
        with pytest.raises(ReshardError, match=match):
            checkpoint.convert(tmp_path, beside(tmp_path, "t"), to="full", source_names=names)


def test_more_pieces_than_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "MAX_BOXES", 7)
    write_file(tmp_path / "model.safetensors", {"f": tensor("int16", (32, 2))})
    table = {"f": Fusion(("x", "y"), groups=4)}
    checkpoint.convert(tmp_path, beside(tmp_path, "t"), to="full", source_names=table)
    table = {"f": Fusion(("x", "y"), groups=8)}
    with pytest.raises(RecipeError, match="'x' would consist of more than 7 ranges of files"):
        checkpoint.convert(tmp_path, beside(tmp_path, "u"), to="full", source_names=table)


def test_rules_are_for_the_recipes_names(model: Path) -> None:
    conversion = plan_conversion(
        model,
        model.with_name("x"),
        to="tp=2",
        recipe="auto",
        rules=["lm_head.weight=-, tp"],
        target_names="megatron",
    )
    tensors = conversion.write_plan.tensors
    assert tensors["output_layer.weight"].spec == "-, tp"
    assert tensors["decoder.layers.0.self_attention.linear_qkv.weight"].spec == "tp@heads2, -"
    fc1 = tensors["decoder.layers.0.mlp.linear_fc1.weight"]
    assert fc1.spec == f"tp@blocks[{INNER},{INNER}], -"
    assert fc1.layout is spec(DeviceMesh.of(tp=2), fc1.spec).layout((2 * INNER, HIDDEN))
    assert math.prod(fc1.shape) == 2 * INNER * HIDDEN


def with_optimizer(model: Mapping[str, Tensor], weights: str, container: str) -> dict[str, Tensor]:
    """A model behind a prefix, with the state of Adam beside it."""
    found = {weights + name: one for name, one in model.items()}
    for seed, (name, one) in enumerate(model.items()):
        for key in ("exp_avg", "master"):
            of = f"{container}.state.{name}.{key}"
            found[of] = tensor("float32", one.bits.shape, 1000 + 2 * seed + (key == "master"))
        found[f"{container}.state.{name}.step"] = tensor("float32", (), 7)
    return found


@pytest.mark.parametrize(("weights", "container"), [("", "optimizer"), ("model.", "optim")])
def test_optimizer_state_is_renamed_and_fused_as_its_parameter(
    tmp_path: Path, weights: str, container: str
) -> None:
    model = with_optimizer(llama(), weights, container)
    source = tmp_path / "source"
    source.mkdir()
    write_file(source / "model.safetensors", model)
    (source / "config.json").write_text(json.dumps(CONFIG))
    there = tmp_path / "megatron"
    checkpoint.convert(source, there, to="full", recipe="llama", target_names="megatron")
    made = read_file(there / "model.safetensors")
    mlp = "layers.0.mlp."
    for before, behind in ((weights, ""), (f"{container}.state.", ".exp_avg")):
        parts = [model[f"{before}model.{mlp}{w}_proj.weight{behind}"].bits for w in ("gate", "up")]
        found = made[f"{before}decoder.{mlp}linear_fc1.weight{behind}"].bits
        np.testing.assert_array_equal(found, np.concatenate(parts))
    step = f"{container}.state.decoder.layers.1.self_attention.linear_qkv.weight.step"
    assert made[step].bits.shape == ()
    assert not any("proj.weight" in name and "q_proj" in name for name in made)
    # Cut over ranks, what is fused is cut as the fused weight.
    planned = plan_conversion(
        source, tmp_path / "cut", to="tp=2", recipe="llama", target_names="megatron"
    ).write_plan.tensors
    for one in ("self_attention.linear_qkv", "mlp.linear_fc1", "self_attention.linear_proj"):
        weight = planned[f"{weights}decoder.layers.0.{one}.weight"]
        moment = planned[f"{container}.state.decoder.layers.0.{one}.weight.exp_avg"]
        assert (moment.layout, moment.spec) == (weight.layout, weight.spec)
    back = tmp_path / "back"
    checkpoint.convert(there, back, to="full", recipe="llama", source_names="megatron")
    assert {n: t.bits.tobytes() for n, t in read_file(back / "model.safetensors").items()} == {
        n: t.bits.tobytes() for n, t in model.items()
    }


def test_optimizer_state_of_another_shape_is_not_fused(tmp_path: Path) -> None:
    model = llama()
    name = "model.layers.0.mlp.gate_proj.weight"
    model[f"optimizer.state.{name}.exp_avg_sq_col"] = tensor("float32", (HIDDEN,))
    source = tmp_path / "source"
    source.mkdir()
    write_file(source / "model.safetensors", model)
    (source / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(RecipeError, match="state of another shape"):
        plan_conversion(source, tmp_path / "t", to="full", recipe="llama", target_names="megatron")


def test_numbered_optimizer_state_cannot_be_renamed(tmp_path: Path) -> None:
    names = ["layers.0.gate", "layers.0.up", "norm"]
    state = {"model": {one: torch.zeros(4, 3) for one in names}}
    state["optimizer"] = {
        "state": {n: {"exp_avg": torch.zeros(4, 3)} for n in range(3)},
        "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}],
    }
    torch.save(state, tmp_path / "state.pt")
    table = {"layers.*.fused": Fusion(("layers.*.gate", "layers.*.up")), "last": "norm"}
    with pytest.raises(
        RecipeError, match=r"state\.0\.exp_avg' has a number for .*--training fsdp2"
    ):
        plan_conversion(tmp_path / "state.pt", tmp_path / "out", to="full", target_names=table)


@pytest.mark.parametrize("style", ["fsdp2", "reshard"])
def test_groups_list_parameters_by_their_new_names(tmp_path: Path, style: str) -> None:
    names = ["layers.0.gate", "layers.0.up", "norm"]
    moments = {name: {"exp_avg": torch.zeros(4, 3), "step": torch.tensor(1.0)} for name in names}
    groups = [
        {"lr": 0.1, "params": names[:2], "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0},
        {"lr": 0.2, "params": names[2:], "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0},
    ]
    model = {name: torch.zeros(4, 3) for name in names}
    optimizer = {"state": moments, "param_groups": groups}
    torch.save({"model": model, "optim": optimizer}, tmp_path / "state.pt")
    table = {"layers.*.fused": Fusion(("layers.*.gate", "layers.*.up")), "last": "norm"}
    format = {"fsdp2": "torch-dcp", "reshard": "deepspeed-universal"}[style]
    out, back = tmp_path / "out", tmp_path / "back"
    # As values, and from pickled items of a distributed checkpoint.
    checkpoint.convert(tmp_path / "state.pt", out, to="full", format=format, target_names=table)
    checkpoint.convert(out, back, to="full", format=format, source_names=table)
    for folder, expected in ((out, [["layers.0.fused"], ["last"]]), (back, [names[:2], ["norm"]])):
        opened = in_plain_values(checkpoint.open(folder))
        state = find_training_state(opened)
        assert state is not None
        found = find_groups(opened.values, state)
        assert [group["params"] for group in found] == expected
        assert [group["lr"] for group in found] == [0.1, 0.2]
