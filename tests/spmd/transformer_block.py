"""A transformer block with experts, in arrays in shards and in PyTorch, and shardings for it.

Embedding cut by vocabulary, RMS norms, rotary positions, attention with fewer heads of keys than of
queries, a router with two experts for each token, each with SwiGLU, and cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import reshard.spmd as sp
from reshard import DeviceMesh, ShardingSpec, spec


@dataclass(frozen=True)
class Sizes:
    """Of the block and its batch."""

    batch: int = 4
    length: int = 8
    model: int = 16
    heads: int = 8
    groups: int = 4
    hidden: int = 24
    experts: int = 4
    vocabulary: int = 32

    @property
    def head(self) -> int:
        return self.model // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        d, kv = self.model, self.groups * self.head
        return {
            "table": (self.vocabulary, d),
            "norm1": (d,),
            "wq": (d, d),
            "wk": (d, kv),
            "wv": (d, kv),
            "wo": (d, d),
            "norm2": (d,),
            "router": (d, self.experts),
            "gate": (self.experts, d, self.hidden),
            "up": (self.experts, d, self.hidden),
            "down": (self.experts, self.hidden, d),
            "norm3": (d,),
            "unembed": (d, self.vocabulary),
        }


# By hand, as Megatron and FSDP have them: tensor parallel, data parallel, and both.
_TENSOR = {
    "table": "tp, -",
    "norm1": "-",
    "wq": "-, tp",
    "wk": "-, tp",
    "wv": "-, tp",
    "wo": "tp, -",
    "norm2": "-",
    "router": "-, -",
    "gate": "-, -, tp",
    "up": "-, -, tp",
    "down": "-, tp, -",
    "norm3": "-",
    "unembed": "-, tp",
}


def shardings(mesh: DeviceMesh, fsdp: bool = False) -> dict[str, ShardingSpec]:
    """Of the parameters over `dp`, `tp` or both: replicas over `dp`, or cut over it."""
    found = {}
    for name, text in _TENSOR.items():
        dims = [part if part in mesh.axis_names else "-" for part in text.split(", ")]
        if fsdp and "dp" in mesh.axis_names:
            free = [place for place, dim in enumerate(dims) if dim == "-"]
            if free:
                dims[free[0]] = "dp"
        found[name] = spec(mesh, ", ".join(dims))
    return found


def batch_sharding(mesh: DeviceMesh) -> ShardingSpec:
    return spec(mesh, "dp, -" if "dp" in mesh.axis_names else "-, -")


def make_parameters(sizes: Sizes, dtype: str = "float64") -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        name: (
            (1 + 0.1 * random.normal(size=shape))
            if name.startswith("norm")
            else random.normal(size=shape) / math.sqrt(shape[-2])
        ).astype(dtype)
        for name, shape in sizes.shapes().items()
    }


def make_batch(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    tokens = random.integers(0, sizes.vocabulary, size=(sizes.batch, sizes.length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _angles(sizes: Sizes, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    half = sizes.head // 2
    rates = 10000.0 ** (-np.arange(half) / half)
    found = np.arange(sizes.length)[:, None] * rates
    return np.cos(found).astype(dtype), np.sin(found).astype(dtype)


def _stay(name: str, x: Any) -> Any:
    return x


def all_experts(n: Any, which: Any, best: Any, gate: Any, up: Any, down: Any) -> Any:
    """Every expert of every token `[batch, length]`, by shares that are mostly zero."""
    chosen = sp.one_hot(which, gate.shape[0], dtype=best.dtype)
    shares = sp.sum(chosen * sp.expand_dims(best, axis=-1), axis=-2)
    inner = sp.silu(sp.einsum("btd,edf->btef", n, gate)) * sp.einsum("btd,edf->btef", n, up)
    return sp.einsum("btef,efd->btd", inner * sp.expand_dims(shares, axis=-1), down)


def experts_of_rows(axes: Sequence[str]) -> Callable[..., Any]:
    """The chosen experts of each token, a row of `[tokens, model]`; experts are cut over `axes`."""

    @sp.eagerly
    def of_rows(x: Any, which: Any, best: Any, gate: Any, up: Any, down: Any) -> Any:
        routing = sp.expert_routing(which, gate.shape[0], axes=axes)
        rows = routing.send(x)
        inner = sp.silu(routing.multiply(rows, gate)) * routing.multiply(rows, up)
        return routing.back(routing.multiply(inner, down), best)

    return of_rows


def chosen_experts(axes: Sequence[str]) -> Callable[..., Any]:
    """The same of tokens `[batch, length, model]`."""
    of_rows = experts_of_rows(axes)

    def found(n: Any, which: Any, best: Any, *weights: Any) -> Any:
        flat = (sp.reshape(one, (-1, one.shape[-1])) for one in (n, which, best))
        return sp.reshape(of_rows(*flat, *weights), n.shape)

    return found


def loss(
    p: dict[str, Any],
    tokens: Any,
    targets: Any,
    sizes: Sizes,
    place: Callable[[str, Any], Any] = _stay,
    experts: Callable[..., Any] = all_experts,
) -> Any:
    """The mean loss of a batch, in arrays in shards.

    `place` may give "embedded", "to_attention", "to_experts" and "to_logits" another sharding;
    `experts` is `all_experts`, or what `chosen_experts` makes.
    """
    b, t, d, h = tokens.shape[0], sizes.length, sizes.model, sizes.head
    dtype = p["wq"].dtype
    cos, sin = _angles(sizes, dtype.name)

    def rotate(x: Any) -> Any:
        first, second = x[..., : h // 2], x[..., h // 2 :]
        return sp.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def apart(x: Any, count: int) -> Any:
        return sp.permute_dims(sp.reshape(x, (b, t, count, h)), (0, 2, 1, 3))

    x = place("embedded", sp.embedding(tokens, p["table"]))
    n = place("to_attention", sp.rms_norm(x, p["norm1"]))
    q = rotate(apart(n @ p["wq"], sizes.heads))
    k = rotate(apart(n @ p["wk"], sizes.groups))
    v = apart(n @ p["wv"], sizes.groups)
    seen = sp.attention(q, k, v, is_causal=True)
    x = x + sp.reshape(sp.permute_dims(seen, (0, 2, 1, 3)), (b, t, d)) @ p["wo"]
    n = place("to_experts", sp.rms_norm(x, p["norm2"]))
    best, which = sp.top_k(sp.softmax(n @ p["router"]), 2)
    best = best / sp.sum(best, axis=-1, keepdims=True)
    x = x + experts(n, which, best, p["gate"], p["up"], p["down"])
    logits = place("to_logits", sp.rms_norm(x, p["norm3"])) @ p["unembed"]
    return sp.mean(sp.cross_entropy(logits, targets))


def loss_in_torch(p: dict[str, Any], tokens: Any, targets: Any, sizes: Sizes) -> Any:
    """The same in PyTorch, by its own functions."""
    import torch

    functional = torch.nn.functional
    b, t, d, h = tokens.shape[0], sizes.length, sizes.model, sizes.head
    cos, sin = map(torch.as_tensor, _angles(sizes, str(p["wq"].dtype).removeprefix("torch.")))

    def norm(x: Any, weight: Any) -> Any:
        return functional.rms_norm(x, (d,), weight, 1e-5)

    def rotate(x: Any) -> Any:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    x = p["table"][tokens]
    n = norm(x, p["norm1"])
    q = rotate((n @ p["wq"]).view(b, t, sizes.heads, h).transpose(1, 2))
    k = rotate((n @ p["wk"]).view(b, t, sizes.groups, h).transpose(1, 2))
    v = (n @ p["wv"]).view(b, t, sizes.groups, h).transpose(1, 2)
    k, v = (one.repeat_interleave(sizes.heads // sizes.groups, 1) for one in (k, v))
    seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + seen.transpose(1, 2).reshape(b, t, d) @ p["wo"]
    n = norm(x, p["norm2"])
    best, which = (n @ p["router"]).softmax(-1).topk(2)
    best = best / best.sum(-1, keepdim=True)
    found = torch.zeros_like(x)
    for expert in range(sizes.experts):
        share = (best * (which == expert)).sum(-1, keepdim=True)
        inner = functional.silu(n @ p["gate"][expert]) * (n @ p["up"][expert])
        found = found + share * (inner @ p["down"][expert])
    logits = norm(x + found, p["norm3"]) @ p["unembed"]
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
