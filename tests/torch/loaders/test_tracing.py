"""Loaders of all kinds, traced both ways: without values, and by values.

Each traced layout is checked by what the same loader does with random values.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import RunError, UsageError
from reshard.layout import Box
from reshard.recipes.engine_layouts import ParameterLayout, RankLayout
from reshard.torch.loaders.tracing import trace_loading

Pairs = Iterable[tuple[str, torch.Tensor]]
Sources = dict[str, tuple[str, tuple[int, ...]]]

HIDDEN, HEAD, QUERIES, KEYS, INNER = 12, 4, 6, 2, 10


def build(layout: ParameterLayout, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """A parameter put together from its pieces; -7 where it is computed or not filled."""
    built = torch.full(layout.shape, -7.0, dtype=torch.float64)
    for box, source, view, _ in layout.pieces:
        flat = values[source].reshape(-1).to(torch.float64)
        places = torch.from_numpy(view.positions(box.shape))
        built[slices(box)] = flat[places]
    for box, value in layout.constants:
        built[slices(box)] = value
    return built


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def known(layout: ParameterLayout) -> torch.Tensor:
    """Whether an element is copied or constant."""
    flags = torch.ones(layout.shape, dtype=torch.bool)
    for box in [one.box for one in layout.computed] + [*layout.unfilled]:
        flags[slices(box)] = False
    return flags


def check(
    make: Callable[[], Any],
    load: Callable[[Any, Any], Any],
    sources: Sources,
    *,
    form: str = "pairs",
    values: bool = True,
) -> RankLayout:
    """Trace a loader without values, compare with random values and with the trace by values."""
    with torch.device("meta"):
        model = make()
    traced = trace_loading(lambda w: load(model, w), sources, model, form=form, values=False)
    compare(traced, make, load, sources, form)
    if values:
        by_values = trace_loading(lambda w: load(model, w), sources, model, form=form, values=True)
        assert by_values.method == "values"
        compare(by_values, make, load, sources, form)
        assert by_values.tied == traced.tied
        for name, layout in traced.parameters.items():
            other = by_values.parameters[name]
            assert other.shape == layout.shape
            numbers = {s: torch.arange(math.prod(shape)) for s, (_, shape) in sources.items()}
            # What is computed of no source may be a constant by its values.
            flags = known(layout)
            for one in layout.computed:
                if not one.sources:
                    flags[slices(one.box)] = known(other)[slices(one.box)]
            assert torch.equal(flags, known(other)), name
            same = build(layout, numbers) == build(other, numbers)
            assert same[known(layout)].all(), name
    return traced


def compare(
    traced: RankLayout,
    make: Callable[[], Any],
    load: Callable[[Any, Any], Any],
    sources: Sources,
    form: str,
) -> None:
    """A traced layout gives what the loader gives of random values."""
    real = make()
    generator = torch.Generator().manual_seed(0)
    given = {
        name: torch.randint(1, 100, shape, generator=generator).to(getattr(torch, dtype))
        for name, (dtype, shape) in sources.items()
    }
    before = {n: t.clone() for n, t in named(real).items()}
    # Of copies, since a loader may write to its sources.
    copies = {name: value.clone() for name, value in given.items()}
    load(real, copies if form == "dict" else iter(copies.items()))
    after = named(real)
    assert [*after] == [*traced.parameters]
    for name, layout in traced.parameters.items():
        flags = known(layout)
        assert layout.shape == tuple(after[name].shape)
        assert str(after[name].dtype) == f"torch.{layout.dtype.name}"
        built = build(layout, given)
        assert torch.equal(built[flags], after[name].detach().to(torch.float64)[flags]), name
        for box in layout.unfilled:
            assert torch.equal(after[name][slices(box)], before[name][slices(box)])


def named(model: Any) -> dict[str, torch.Tensor]:
    if isinstance(model, dict):
        return model
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def holder(**shapes: tuple[int, ...]) -> Callable[[], torch.nn.Module]:
    """A module with parameters of these shapes."""

    def make() -> torch.nn.Module:
        module = torch.nn.Module()
        for name, shape in shapes.items():
            parameter = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
            module.register_parameter(name, parameter)
        return module

    return make


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_fused_attention_with_heads_held_several_times(rank: int) -> None:
    """Six query heads over three ranks are not asked for: 2 key heads over 4 ranks of 8 heads."""
    queries, keys, ranks = 8, 2, 4
    rows = queries // ranks * HEAD
    sources: Sources = {
        "q": ("bfloat16", (queries * HEAD, HIDDEN)),
        "k": ("bfloat16", (keys * HEAD, HIDDEN)),
        "v": ("bfloat16", (keys * HEAD, HIDDEN)),
    }

    def load(model: Any, weights: Pairs) -> None:
        at = {"q": 0, "k": rows, "v": rows + HEAD}
        for name, weight in weights:
            part = rank if name == "q" else rank * keys // ranks
            size = rows if name == "q" else HEAD
            loaded = weight.narrow(0, part * size, size)
            model.qkv.data.narrow(0, at[name], size).copy_(loaded)

    traced = check(holder(qkv=(rows + 2 * HEAD, HIDDEN)), load, sources)
    pieces = traced["qkv"].pieces
    assert [(one.source, one.view.offset) for one in pieces] == [
        ("q", rank * rows * HIDDEN),
        ("k", rank // 2 * HEAD * HIDDEN),
        ("v", rank // 2 * HEAD * HIDDEN),
    ]
    # The parameter is float32, and its sources are not: a cast is noted.
    assert {one.steps for one in pieces} == {("to float32",)}


def test_gate_and_up_and_a_bias() -> None:
    sources: Sources = {
        "gate": ("float32", (INNER, HIDDEN)),
        "up": ("float32", (INNER, HIDDEN)),
        "bias": ("float32", (2 * INNER,)),
    }

    def load(model: Any, weights: Pairs) -> None:
        for name, weight in weights:
            if name == "bias":
                model.bias.data[:] = weight.chunk(2)[1][1:6]
            else:
                half = model.gate_up.data.chunk(2)[name == "up"]
                half.copy_(weight[INNER // 2 :])

    traced = check(holder(gate_up=(INNER, HIDDEN), bias=(INNER // 2,)), load, sources)
    assert traced["gate_up"].is_copied
    assert len(traced["gate_up"].pieces) == 2


def test_stacked_experts_of_separate_tensors() -> None:
    experts = 5
    sources: Sources = {
        f"experts.{e}.{w}": ("float32", (INNER, HIDDEN) if w != "w2" else (HIDDEN, INNER))
        for e in range(experts)
        for w in ("w1", "w2", "w3")
    }

    def load(model: Any, weights: Pairs) -> None:
        half = INNER // 2
        for name, weight in weights:
            _, expert, which = name.split(".")
            if which == "w2":
                model.w2.data[int(expert)].copy_(weight[:, half:])
            else:
                target = model.w13.data[int(expert)]
                target.narrow(0, half * (which == "w3"), half).copy_(weight.narrow(0, half, half))

    make = holder(w13=(experts, INNER, HIDDEN), w2=(experts, HIDDEN, INNER // 2))
    traced = check(make, load, sources)
    assert len(traced["w13"].pieces) == 2 * experts
    assert not traced.unread


def test_stacked_tensors_are_transposed_and_interleaved() -> None:
    """As in gpt-oss: gate and up in turn, input by output."""
    experts = 3
    sources: Sources = {"gate_up": ("float32", (experts, HIDDEN, 2 * INNER))}

    def load(model: Any, weights: Pairs) -> None:
        ((_, weight),) = weights
        gate, up = weight[..., ::2], weight[..., 1::2]
        model.w13.data.copy_(torch.cat([gate, up], dim=-1).permute(0, 2, 1).contiguous())
        model.back.data.copy_(torch.stack([gate, up], dim=-1).reshape(weight.shape))

    make = holder(w13=(experts, 2 * INNER, HIDDEN), back=(experts, HIDDEN, 2 * INNER))
    traced = check(make, load, sources)
    assert [one.view.strides for one in traced["w13"].pieces] == [(240, 2, 20), (240, 2, 20)]


def test_a_padded_vocabulary() -> None:
    sources: Sources = {"embed": ("float32", (10, HIDDEN))}

    def load(model: Any, weights: Pairs) -> None:
        for _, weight in weights:
            shard = weight[6:10]
            model.embed.data[: len(shard)].copy_(shard)
            model.embed.data[len(shard) :].fill_(0)
            padded = torch.nn.functional.pad(weight, (0, 0, 0, 2), value=3.0)
            model.head.data.copy_(padded[6:])

    traced = check(holder(embed=(6, HIDDEN), head=(6, HIDDEN)), load, sources)
    assert [(one.box.start, one.value) for one in traced["embed"].constants] == [((4, 0), 0.0)]
    assert [(one.box.start, one.value) for one in traced["head"].constants] == [((4, 0), 3.0)]


def test_computed_elements_are_not_copies() -> None:
    sources: Sources = {
        "A_log": ("float32", (8,)),
        "norm": ("float32", (HIDDEN,)),
        "weight": ("float32", (4, 4)),
        "scale": ("float32", (2, 2)),
    }

    def load(model: Any, weights: Pairs) -> None:
        given = dict(weights)
        model.A.data.copy_(-torch.exp(given["A_log"][4:].float()))
        model.norm.data.copy_(given["norm"] + 1)
        scale = given["scale"].repeat_interleave(2, 0).repeat_interleave(2, 1)
        model.dequantised.data.copy_(given["weight"] * scale)

    traced = check(holder(A=(4,), norm=(HIDDEN,), dequantised=(4, 4)), load, sources)
    (decay,) = traced["A"].computed
    assert decay.operations == ("exp", "neg")
    assert decay.sources == ("A_log",)
    assert decay.view is not None and decay.view.offset == 4
    assert traced["norm"].computed[0].operations == ("add(1)",)
    (product,) = traced["dequantised"].computed
    assert (product.operations, product.sources) == (("mul",), ("weight", "scale"))


def test_operations_are_named_by_values_too() -> None:
    with torch.device("meta"):
        model = holder(A=(4,))()
    traced = trace_loading(
        lambda weights: model.A.data.copy_(-torch.exp(dict(weights)["A_log"])),
        {"A_log": ("float32", (4,))},
        model,
        values=True,
    )
    assert traced["A"].computed[0].operations == ("exp", "neg")
    assert traced["A"].computed[0].sources == ("A_log",)


def test_chains_of_new_tensors() -> None:
    sources: Sources = {"a": ("float32", (6, 4)), "b": ("float32", (3, 4))}

    def load(model: Any, weights: Pairs) -> None:
        given = dict(weights)
        together = torch.cat([given["a"], given["b"]])
        buffer = torch.empty(2, 9, 4)
        buffer[0] = together
        buffer[1] = together.flip(0).clone()
        turned = buffer.reshape(2, 3, 3, 4).transpose(1, 2).reshape(18, 4)
        model.w.data.copy_(turned.t()[1:, 2:])
        model.v.data.copy_(given["b"].to(torch.bfloat16).repeat(2, 1)[1:5].expand(3, 4, 4))

    traced = check(holder(w=(3, 16), v=(3, 4, 4)), load, sources)
    assert {one.steps for one in traced["v"].pieces} == {("to bfloat16", "to float32")}
    assert {one.view.strides[0] for one in traced["v"].pieces} == {0}


def test_known_indices_are_traced() -> None:
    sources: Sources = {"w": ("float32", (8, 4)), "v": ("float32", (3, 4))}

    def load(model: Any, weights: Pairs) -> None:
        given = dict(weights)
        order = torch.arange(8).view(4, 2).t().reshape(-1)
        model.permuted.data.copy_(given["w"][order])
        model.chosen.data.copy_(given["w"].index_select(1, torch.tensor([3, 0])))
        model.put.data.index_copy_(0, torch.tensor([2, 0, 3]), given["v"])
        model.put.data[torch.tensor([False, True, False, False])] = given["w"][:1]
        model.masked.data.copy_(torch.where(torch.arange(4) < 2, given["w"], 5.0))
        model.gathered.data.copy_(given["w"].gather(0, torch.tensor([[1, 2, 3, 0]])))

    make = holder(permuted=(8, 4), chosen=(8, 2), put=(4, 4), masked=(8, 4), gathered=(1, 4))
    check(make, load, sources)


def test_the_last_write_counts() -> None:
    sources: Sources = {
        "a": ("float32", (4, 6)),
        "b": ("float32", (4, 6)),
        "c": ("float32", (2, 2)),
    }

    def load(model: Any, weights: Pairs) -> None:
        given = dict(weights)
        model.w.data.copy_(given["a"])
        model.w.data[1:3, 2:] = given["b"][1:3, 2:]
        model.w.data.view(2, 2, 6)[1, :, 4:] = given["c"]
        model.w.data[3].zero_()

    traced = check(holder(w=(4, 6)), load, sources)
    assert {one.source for one in traced["w"].pieces} == {"a", "b", "c"}


def test_unfilled_elements_are_listed() -> None:
    def load(model: Any, weights: Pairs) -> None:
        for name, weight in weights:
            if name == "a":
                model.w.data[1:3, 1:3].copy_(weight)

    traced = check(
        holder(w=(4, 4), forgotten=(3,)), load, {"a": ("float32", (2, 2)), "b": ("float32", (1,))}
    )
    assert sum(box.elements for box in traced["w"].unfilled) == 12
    assert traced["forgotten"].unfilled == (Box((0,), (3,)),)
    assert traced.unread == ("b",)


def test_a_module_that_loads_a_state_dict_with_a_hook() -> None:
    class Fused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk = torch.nn.Linear(HIDDEN, 8)
            self.norm = torch.nn.BatchNorm1d(HIDDEN)
            self.register_load_state_dict_pre_hook(self.fuse)

        @staticmethod
        def fuse(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            for kind in ("weight", "bias"):
                parts = [state.pop(f"{prefix}{one}.{kind}") for one in ("q", "k")]
                state[f"{prefix}qk.{kind}"] = torch.cat(parts)

    sources: Sources = {
        f"{one}.{kind}": ("float32", (4, HIDDEN) if kind == "weight" else (4,))
        for one in ("q", "k")
        for kind in ("weight", "bias")
    }
    for name in ("weight", "bias", "running_mean", "running_var"):
        sources[f"norm.{name}"] = ("float32", (HIDDEN,))
    sources["norm.num_batches_tracked"] = ("int64", ())
    traced = check(Fused, lambda model, state: model.load_state_dict(state), sources, form="dict")
    assert [one.source for one in traced["qk.weight"].pieces] == ["q.weight", "k.weight"]
    assert traced["norm.running_mean"].is_copied


def test_replaced_parameters_are_traced() -> None:
    sources: Sources = {"weight": ("bfloat16", (4, 6)), "bias": ("bfloat16", (4,))}

    def make() -> torch.nn.Module:
        return torch.nn.Linear(6, 4)

    traced = check(
        make, lambda m, state: m.load_state_dict(state, assign=True), sources, form="dict"
    )
    assert traced["weight"].dtype.name == "bfloat16"
    assert traced["weight"].is_copied

    def load(model: Any, weights: Pairs) -> None:
        given = dict(weights)
        model.weight.data = given["weight"].t().contiguous()[1:]
        model.register_parameter("extra", torch.nn.Parameter(given["bias"][:2]))

    replaced = check(make, load, sources)
    assert replaced["weight"].shape == (5, 4)
    assert replaced["bias"].unfilled
    assert replaced["extra"].pieces[0].source == "bias"


def test_state_dicts_are_known_by_the_name_of_the_method() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(6, 4)
    traced = trace_loading(
        model.load_state_dict, {"weight": ("float32", (4, 6)), "bias": ("float32", (4,))}, model
    )
    assert traced["weight"].is_copied


def test_tied_parameters() -> None:
    def make() -> torch.nn.Module:
        module = torch.nn.Module()
        module.embed = torch.nn.Embedding(6, 4)
        module.head = torch.nn.Linear(4, 6, bias=False)
        module.head.weight = module.embed.weight
        return module

    def load(model: Any, weights: Pairs) -> None:
        for _, weight in weights:
            model.embed.weight.data.copy_(weight)

    traced = check(make, load, {"embed": ("float32", (6, 4))})
    assert traced.tied == (("embed.weight", "head.weight"),)
    assert traced["head.weight"].pieces == traced["embed.weight"].pieces
    assert traced.size_bytes == 6 * 4 * 4


def test_parameters_that_the_loader_ties() -> None:
    def make() -> torch.nn.Module:
        return torch.nn.ModuleDict(
            {name: torch.nn.Linear(4, 6, bias=False) for name in ("embed", "head")}
        )

    def load(model: Any, weights: Pairs) -> None:
        for _, weight in weights:
            model["embed"].weight.data.copy_(weight)
        model["head"].weight = model["embed"].weight

    traced = check(make, load, {"embed": ("float32", (6, 4))})
    assert traced.tied == (("embed.weight", "head.weight"),)


def test_a_dict_of_tensors_that_share_memory() -> None:
    flat = torch.empty(12, device="meta")
    targets = {"rows": flat[:8].view(2, 4).detach(), "all": flat.detach()}

    def load(weights: Pairs) -> None:
        for _, weight in weights:
            targets["rows"][1].copy_(weight)

    traced = trace_loading(load, {"w": ("float32", (4,))}, targets, values=False)
    assert traced["all"].pieces[0].box == Box((4,), (8,))
    assert traced["rows"].pieces[0].box == Box((1, 0), (2, 4))
    by_values = trace_loading(load, {"w": ("float32", (4,))}, targets, values=True)
    assert by_values.parameters == traced.parameters
    assert targets["rows"].device.type == "meta"
    views = {"rows": flat[:8], "all": flat}
    with pytest.raises(RunError, match="without other views"):
        trace_loading(lambda w: None, {"w": ("float32", (4,))}, views, values=True)


def test_bits_reinterpreted_as_another_type_are_copies() -> None:
    targets = {
        "scale": torch.empty(4, dtype=torch.float8_e4m3fn, device="meta"),
        "wide": torch.empty(2, dtype=torch.int16, device="meta"),
    }

    def load(weights: Pairs) -> None:
        given = dict(weights)
        targets["scale"].copy_(given["bytes"].view(torch.float8_e4m3fn))
        targets["wide"].copy_(given["bytes"].view(torch.int16))

    traced = trace_loading(load, {"bytes": ("uint8", (4,))}, targets, values=False)
    assert traced["scale"].pieces[0].steps == ("bits as float8_e4m3fn",)
    assert traced["wide"].computed[0].operations == ("bits as int16",)


@pytest.mark.parametrize("look", ["item", "tolist", "numpy", "bool", "nonzero"])
def test_a_loader_that_reads_values_is_traced_by_values(look: str) -> None:
    with torch.device("meta"):
        model = holder(w=(4, 4))()

    def load(weights: Pairs) -> None:
        given = dict(weights)
        first = given["w"][0]
        {
            "item": lambda: first[0].item(),
            "tolist": first.tolist,
            "numpy": first.numpy,
            "bool": lambda: bool((first == first).all()),
            "nonzero": lambda: first.nonzero(),
        }[look]()
        model.w.data.copy_(given["w"].t())

    sources = {"w": ("bfloat16", (4, 4))}
    traced = trace_loading(load, sources, model)
    assert traced.method == "values"
    assert any("by values" in note for note in traced.notes)
    (piece,) = traced["w"].pieces
    assert (piece.view.offset, piece.view.strides) == (0, (1, 4))
    with pytest.raises(RunError):
        trace_loading(load, sources, model, values=False)
    with pytest.raises(RunError, match="trace a smaller model"):
        trace_loading(load, sources, model, max_bytes=100)
    with pytest.warns(DeprecationWarning, match="max_bytes"), pytest.raises(RunError):
        trace_loading(load, sources, model, most_bytes=100)
    assert model.w.device.type == "meta"


def test_values_are_never_rounded() -> None:
    """More elements than bfloat16, or a single float32, can number."""
    size = 1 << 13
    with torch.device("meta"):
        model = holder(w=(size, 4))()

    def load(weights: Pairs) -> None:
        given = dict(weights)
        narrow = given["w"].to(torch.bfloat16).half()
        buffer = torch.zeros(size, 4, dtype=torch.bfloat16)
        buffer.copy_(narrow[:, 4:])
        model.w.data.copy_(buffer)

    traced = trace_loading(load, {"w": ("bfloat16", (size, 8))}, model, values=True)
    (piece,) = traced["w"].pieces
    assert (piece.view.offset, piece.view.strides) == (4, (8, 1))


def test_copies_that_bypass_the_dispatcher_are_found_by_values() -> None:
    with torch.device("meta"):
        model = holder(w=(4,), v=(4,))()

    def load(weights: Pairs) -> None:
        given = dict(weights)
        model.w.data.copy_(torch.from_numpy(np.roll(given["w"].numpy(), 1)))
        model.v.data.copy_(torch.from_numpy(given["w"].numpy() * 2))

    traced = trace_loading(load, {"w": ("float32", (4,))}, model)
    assert traced["w"].is_copied
    assert [one.view.offset for one in traced["w"].pieces] == [3, 0]
    assert traced["v"].computed[0].operations == ("a tensor of the loader",)


def test_devices_do_not_matter() -> None:
    sources: Sources = {"w": ("float32", (4, 4))}

    def load(model: Any, weights: Pairs) -> None:
        for _, weight in weights:
            model.w.data.copy_(weight.cpu().to("cpu", torch.float64)[:2])

    check(holder(w=(2, 4)), load, sources)
    # Targets that are in memory stay as they are.
    real = holder(w=(2, 4))()
    traced = trace_loading(lambda weights: load(real, weights), sources, real)
    assert traced["w"].pieces[0].source == "w"
    assert not real.w.any()


def test_errors_of_a_loader_are_reported() -> None:
    with torch.device("meta"):
        model = holder(w=(4,))()

    def load(weights: Pairs) -> None:
        model.w.data = dict(weights)["w"][:2]
        raise KeyError("model.layers.0.w")

    before = model.w
    with pytest.raises(RunError, match=r"load_weights raised KeyError: 'model.layers.0.w'"):
        trace_loading(load, {"w": ("float32", (4,))}, model)
    assert model.w is before and model.w.shape == (4,)


def test_writes_to_sources_are_noted() -> None:
    def load(model: Any, weights: Pairs) -> None:
        given = dict(weights)
        given["a"][0].copy_(given["b"])
        given["a"][1:].fill_(2.0)
        model.w.data.copy_(given["a"])

    sources: Sources = {"a": ("float32", (3, 4)), "b": ("float32", (4,))}
    traced = check(holder(w=(3, 4)), load, sources)
    assert [one.source for one in traced["w"].pieces] == ["b"]
    assert any("writes to its sources a" in note for note in traced.notes)


def test_wrong_shapes_are_the_loader_s_error() -> None:
    with torch.device("meta"):
        model = holder(w=(4,))()
    with pytest.raises(RunError, match=r"must match the size"):
        trace_loading(lambda w: model.w.data.copy_(dict(w)["w"]), {"w": ("float32", (3,))}, model)
    real = holder(w=(4,))()
    with pytest.raises(RunError, match=r"must match the size"):
        trace_loading(lambda w: real.w.data.copy_(dict(w)["w"]), {"w": ("float32", (3,))}, real)


def test_arguments_of_wrong_types_are_refused() -> None:
    model = holder(w=(4,))()
    sources = {"w": ("float32", (4,))}
    with pytest.raises(UsageError, match="give a function"):
        trace_loading(3, sources, model)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="give the module"):
        trace_loading(print, sources, 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="without a parameter"):
        trace_loading(print, sources, {})
    with pytest.raises(UsageError, match="give a dict of tensors"):
        trace_loading(print, [], model)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the source 'w'"):
        trace_loading(print, {"w": 3}, model)
    with pytest.raises(UsageError, match="form 'rows'"):
        trace_loading(print, sources, model, form="rows")


def test_a_large_model_takes_less_than_a_second_or_two() -> None:
    """Llama 3 70B, one rank of 16, on meta."""
    layers, hidden, inner, heads, keys, head, ranks, rank = 80, 8192, 28672, 64, 8, 128, 16, 5
    sources: Sources = {}
    for i in range(layers):
        for name, shape in {
            "q": (heads * head, hidden),
            "k": (keys * head, hidden),
            "v": (keys * head, hidden),
            "o": (hidden, heads * head),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
            "norm": (hidden,),
            "norm2": (hidden,),
        }.items():
            sources[f"layers.{i}.{name}"] = ("bfloat16", shape)
    rows = heads // ranks * head
    targets = {}
    for i in range(layers):
        shapes = {
            "qkv": (rows + 2 * head, hidden),
            "o": (hidden, rows),
            "norm": (hidden,),
            "gate_up": (2 * inner // ranks, hidden),
            "down": (hidden, inner // ranks),
            "norm2": (hidden,),
        }
        for name, shape in shapes.items():
            empty = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            targets[f"layers.{i}.{name}"] = empty

    def load(weights: Pairs) -> None:
        for name, weight in weights:
            prefix, which = name.rsplit(".", 1)
            if which in ("q", "k", "v"):
                target = targets[f"{prefix}.qkv"]
                size = rows if which == "q" else head
                part = rank if which == "q" else rank * keys // ranks
                start = {"q": 0, "k": rows, "v": rows + head}[which]
                target.narrow(0, start, size).copy_(weight.narrow(0, part * size, size))
            elif which in ("gate", "up"):
                size = inner // ranks
                target = targets[f"{prefix}.gate_up"].narrow(0, size * (which == "up"), size)
                target.copy_(weight.narrow(0, rank * size, size))
            elif which in ("o", "down"):
                size = weight.shape[1] // ranks
                targets[name].copy_(weight.narrow(1, rank * size, size))
            else:
                targets[name].copy_(weight)

    begun = time.perf_counter()
    traced = trace_loading(load, sources, targets, rank=rank)
    taken_s = time.perf_counter() - begun
    assert all(one.is_copied for one in traced.parameters.values())
    assert taken_s < 10, taken_s


# A step of a random loader: what it does, and numbers that it takes modulo what there is.
STEPS = (
    *("narrow", "select", "transpose", "reshape", "split", "every", "clone", "cat", "stack"),
    *("flip", "roll", "repeat", "expand", "pad", "index", "put", "copy_", "fill_", "cast"),
    *("compute_", "where", "overwrite"),
)
Step = tuple[str, int, int, int]


def apply_step(tensors: list[torch.Tensor], step: Step) -> None:
    """Do a step to the last tensor, and another one where it takes two."""
    what, a, b, c = step
    one, other = tensors[-1], tensors[a % len(tensors)]
    dim = a % max(one.dim(), 1)
    size = one.shape[dim] if one.dim() else 1
    made: torch.Tensor | None = None
    if what == "narrow" and one.dim():
        start = b % size
        made = one.narrow(dim, start, c % (size - start) + 1)
    elif what == "select" and one.dim() > 1:
        made = one.select(dim, b % size)
    elif what == "transpose" and one.dim() > 1:
        made = one.transpose(dim, b % one.dim())
    elif what == "reshape":
        made = one.reshape([(-1,), (2, -1), (-1, 3)][b % 3]) if one.numel() % 6 == 0 else None
    elif what == "split" and one.dim():
        made = one.chunk(2, dim)[-1]
    elif what == "every" and one.dim():
        made = one[(slice(None),) * dim + (slice(b % size, None, 2),)]
    elif what == "clone":
        made = one.clone() if b % 2 else one.contiguous()
    elif what == "cat" and one.dim() and one.shape == other.shape and one.numel() < 100:
        made = torch.cat([one, other], dim)
    elif what == "stack" and one.dim() < 3 and one.shape == other.shape:
        made = torch.stack([other, one], dim)
    elif what == "flip" and one.dim():
        made = one.flip(dim)
    elif what == "roll" and one.dim():
        made = one.roll(b % size, dim)
    elif what == "repeat" and one.dim() and one.numel() < 100:
        made = one.repeat([2 if d == dim else 1 for d in range(one.dim())])
    elif what == "expand" and one.dim() < 3 and one.numel() < 100:
        made = one.expand(2, *one.shape)
    elif what == "pad" and one.dim():
        made = torch.nn.functional.pad(one, (b % 3, c % 2), value=-2.0)
    elif what == "index" and one.dim():
        index = torch.tensor([b % size, c % size, a % size])
        made = one.index_select(dim, index) if c % 2 else one[(slice(None),) * dim + (index,)]
    elif what == "put" and one.dim():
        made = one.clone()
        made.index_copy_(dim, torch.tensor([b % size]), one.narrow(dim, c % size, 1).clone())
    elif what == "copy_" and one.dim():
        made = torch.zeros(one.shape)
        half = made.narrow(dim, b % size, 1)
        half.copy_(one.narrow(dim, c % size, 1))
    elif what == "fill_" and one.dim():
        made = one.clone()
        made.narrow(dim, b % size, 1).fill_(-4.0)
    elif what == "cast":
        made = one.to(torch.float64).to(torch.float32)
    elif what == "compute_" and one.dim():
        made = one.clone()
        made.narrow(dim, b % size, 1).mul_(2.0)
    elif what == "where" and one.dim():
        mask = torch.arange(one.shape[-1]) % 2 == b % 2
        made = torch.where(mask, one, -5.0)
    elif what == "overwrite" and one.dim() and one.shape == other.shape:
        made = one.clone()
        made.narrow(dim, b % size, 1).copy_(other.narrow(dim, c % size, 1))
    if made is not None and made.numel():
        tensors.append(made)


NUMBERS = st.integers(0, 11)


@given(st.lists(st.tuples(st.sampled_from(STEPS), NUMBERS, NUMBERS, NUMBERS), max_size=8))
def test_random_loaders(steps: list[Step]) -> None:
    sources: Sources = {"a": ("float32", (4, 6)), "b": ("float32", (4, 6)), "c": ("float32", (12,))}

    def load(targets: Any, weights: Pairs) -> None:
        tensors = [weight for _, weight in weights][::-1]
        for step in steps:
            apply_step(tensors, step)
        for number, tensor in enumerate(tensors[-2:]):
            target = targets[f"w{number}"]
            if target.shape == tensor.shape:
                target.copy_(tensor)
            else:
                # What has elements several times cannot be written to.
                target.data = tensor.clone() if number or 0 in tensor.stride() else tensor
            target[..., :1] = -6.0

    def make() -> dict[str, torch.Tensor]:
        return {"w0": torch.zeros(4, 6), "w1": torch.zeros(4, 6)}

    check(make, load, sources)
