"""Adapters: the two low-rank matrices of a weight (LoRA), sharded as the weight.

A checkpoint of PEFT has, for a weight of shape `(out, in)`, the matrices A and B of
`weight + scale * B @ A`::

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      (rank, in)
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight      (out, rank)

    weight    rows sharded (q_proj)           A whole,          B sharded as the weight's rows
              columns sharded (o_proj)        A sharded as the weight's columns,       B whole

So a rank computes its part of the change from its own shards: its rows of `B @ A`, or a term of the
sum over ranks, as its columns of the weight do.

1. The tensors of an adapter are replaced by the weight, under the base model's name and shape, for
   which a rule is found as usual.
2. Each tensor of the adapter is sharded as the weight is, in the dimension that they share.

Tensors that were trained whole (`modules_to_save`) only have the prefix of their names. Sources:
PEFT's `save_pretrained`; the S-LoRA paper (arXiv 2311.03285), section 6, shards them the same way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from reshard.errors import RecipeError
from reshard.recipes.rules import Rule

Shape = tuple[int, ...]
# The tensor that a tensor is sharded like, and the dimension there of each of its dimensions; None
# for a dimension that is not sharded.
Leader = tuple[str, tuple[int | None, ...]]

PREFIX = "base_model.model."
# Models whose linear layers are stored input by output (Conv1D), which PEFT finds by their class.
_INPUT_BY_OUTPUT = frozenset({"gpt2"})
_ADAPTER = re.compile(
    r"(?P<module>.+)\.(?:"
    r"lora_(?P<matrix>[AB])(?:\.(?!weight$|bias$)\w+)?\.(?P<kind>weight|bias)"
    r"|lora_embedding_(?P<embedding>[AB])(?:\.\w+)?"
    r"|lora_magnitude_vector(?:\.(?!weight$)\w+)?(?P<vector>\.weight)?)"
)


def is_of_adapter(name: str) -> bool:
    """Return whether a tensor belongs to an adapter.

    >>> is_of_adapter("layers.0.q_proj.lora_A.weight"), is_of_adapter("layers.0.q_proj.weight")
    (True, False)
    """
    return "lora_" in name and _ADAPTER.fullmatch(name) is not None


class LowRankAdapters:
    """The adapters of a checkpoint in place of their tensors.

    Args:
        shapes: of all tensors.
        config: the base model's config.json, with adapter_config.json under `adapter_config`.
        by_hand: rules by hand; tensors whose own names they match are left as they are.

    Raises:
        RecipeError: an A without its B, or of another rank.

    >>> shapes = {"base_model.model.up.lora_A.weight": (2, 4),
    ...           "base_model.model.up.lora_B.weight": (8, 2)}
    >>> LowRankAdapters(shapes).base_shapes
    {'up.weight': (8, 4)}
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        config: Mapping[str, object] | None = None,
        by_hand: Sequence[Rule] = (),
    ) -> None:
        self._is_swapped = _is_input_by_output(config)
        #: The tensors of the adapter of each weight, by what they are: A, B, bias, vector, or
        #: `embedding A` and `embedding B`.
        self.members: dict[str, dict[str, str]] = {}
        pairs: dict[str, dict[str, str]] = {}
        # The weight that each tensor of an adapter changes, and the weight's dimension for each of
        # its own: None for the adapter's rank, and for dimensions of a single element.
        self._parts: dict[str, Leader] = {}
        self._renamed: dict[str, str] = {}
        self._shapes = dict(shapes)
        for name in shapes:
            is_adapter = ".lora_" in name
            if not (is_adapter or name.startswith(PREFIX)):
                continue
            if any(rule.matches(name) for rule in by_hand):
                continue
            match = _ADAPTER.fullmatch(name) if is_adapter else None
            if match is not None:
                pairs.setdefault(match["module"], {})[_role(match)] = name
            elif name.startswith(PREFIX):
                # PEFT saves the embedding in addition to its change.
                self._renamed[name] = name.removeprefix(PREFIX).replace(".base_layer.", ".")
        self.base_shapes: dict[str, Shape] = {}
        for module, tensors in pairs.items():
            self._add(module, tensors)
        for name, shape in shapes.items():
            if name not in self._parts:
                self.base_shapes[self._renamed.get(name, name)] = shape

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._parts or self._renamed)

    def _add(self, module: str, tensors: Mapping[str, str]) -> None:
        """Add the tensors of a module by their roles."""
        both = {kind: {f"{kind}A", f"{kind}B"} for kind in ("", "embedding ")}
        kinds = [kind for kind, names in both.items() if names & {*tensors}]
        if len(kinds) != 1 or not both[kinds[0]] <= {*tensors}:
            raise RecipeError(
                f"the adapter of {module!r} has {', '.join(sorted(tensors.values()))}; an A and a "
                "B with the same name before them are expected"
            )
        (kind,) = kinds
        a, b = (self._shapes[tensors[f"{kind}{matrix}"]] for matrix in "AB")
        if min(len(a), len(b)) < 2 or a[0] != b[1]:
            raise RecipeError(
                f"the adapter of {module!r} has A of shape {list(a)} and B of shape {list(b)}; as "
                "many rows of A as columns of B are expected"
            )
        weight = f"{module.removeprefix(PREFIX)}.weight"
        self.members[weight] = dict(tensors)
        # Weights of Conv1D layers and of embeddings have their inputs in the first dimension.
        out, into = (1, 0) if self._is_swapped or kind else (0, 1)
        shape = [b[0], *a[1:]]
        self.base_shapes[weight] = (shape[1], shape[0]) if out else tuple(shape)
        dims: dict[str, tuple[int | None, ...]] = {
            f"{kind}A": (None, into, *range(2, len(a))),
            f"{kind}B": (out, None, *(None for _ in b[2:])),
            "bias": (out,),
            "vector": (out,),
        }
        for role, name in tensors.items():
            self._parts[name] = weight, dims[role][: len(self._shapes[name])]

    def base_name(self, name: str) -> str:
        """Return the base model's name of a tensor, or of the weight that it changes."""
        if name in self._parts:
            return self._parts[name][0]
        return self._renamed.get(name, name)

    def weigh_bases(self, itemsizes_bytes: Mapping[str, int] | None) -> dict[str, int] | None:
        """Return the bytes of adapters for an element of their weight, times 1024."""
        if itemsizes_bytes is None:
            return None
        total: dict[str, int] = {}
        for name, shape in self._shapes.items():
            base = self.base_name(name)
            total[base] = total.get(base, 0) + math.prod(shape) * itemsizes_bytes[name]
        return {
            base: max(1, 1024 * size // max(1, math.prod(self.base_shapes[base])))
            for base, size in total.items()
        }

    @property
    def leaders(self) -> dict[str, Leader]:
        """The tensor of the base that each tensor is sharded like; see `Assignment.follow`."""
        return {
            name: self._parts.get(name) or (self.base_name(name), tuple(range(len(shape))))
            for name, shape in self._shapes.items()
        }

    def name_rule(self, name: str, rule: Rule) -> Rule:
        """Return the rule that matched the base's tensor, with the pattern of the adapter's."""
        base = self.base_name(name)
        if base == name:
            return rule
        pattern, end = rule.pattern, ""
        if name in self._parts:
            pattern, base = pattern.removesuffix(".weight"), base.removesuffix(".weight")
            end = name[name.find(base) + len(base) :]
        named = rule.replace(pattern=f"{name[: name.find(base)]}{pattern}{end}")
        return named if named.matches(name) else rule


def _role(match: re.Match[str]) -> str:
    """Return the role of a tensor in its adapter."""
    if match["embedding"]:
        return f"embedding {match['embedding']}"
    if match["matrix"]:
        return match["matrix"] if match["kind"] == "weight" else "bias"
    return "vector"


def _is_input_by_output(config: Mapping[str, object] | None) -> bool:
    """Return whether the base's weights have their inputs in the first dimension."""
    adapter_config = (config or {}).get("adapter_config")
    if isinstance(adapter_config, Mapping) and isinstance(
        adapter_config.get("fan_in_fan_out"), bool
    ):
        return bool(adapter_config["fan_in_fan_out"])
    kind = (config or {}).get("model_type")
    return isinstance(kind, str) and kind in _INPUT_BY_OUTPUT
