"""The quantised weights of a checkpoint, found by names and shapes.

1. A name with the end by which a method is known (`reshard.recipes.quantization.methods`), and
   beside it all that the method needs, is a quantised weight.
2. The lengths of the logical weight are read off the stored shapes. Sizes of groups and blocks are
   those of `quantization_config` in config.json where they fit the shapes, else what fits.
3. What a method of `quantization_config` stores that is not known is refused, as are tensors beside
   a quantised weight of which nobody knows how they go with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.errors import UncomputableError
from reshard.recipes.quantization.group_cuts import StoredDimension
from reshard.recipes.quantization.methods import KNOWN_QUANT_METHODS, METHODS, Method

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
#: The end of a stored tensor's name, and that of the logical weight's in its place.
End = tuple[str, str]

_CONFIG_KEYS = ("quantization_config", "compression_config")
_BIT_KEYS = ("bits", "num_bits", "w_bit")
_GROUP_KEYS = ("group_size", "q_group_size")
_BLOCK_KEYS = ("weight_block_size", "block_structure")
# Where nothing says another: of a block of FP8, and of groups of packed weights.
_USUAL_GROUPS = (128, 64, 32, 16)
_BNB_NESTED = 256
_ACCEPTED = (
    "--allow uncomputable cuts each stored tensor by the rule for its own name, in Python "
    "allow=['uncomputable']"
)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight in several stored tensors.

    Attributes:
        name: of the logical weight.
        shape: of it.
        method: for people.
        members: for each stored tensor, what its dimensions are.
        groups: for each logical dimension how many elements must stay together.
        grouped_by: for each, the stored tensor that asks for most of them.
        uncut: the dimensions that cannot be cut at all, with the stored tensor that is why.
    """

    name: str
    shape: Shape
    method: str
    members: Mapping[str, tuple[StoredDimension, ...]]
    groups: tuple[int, ...]
    grouped_by: tuple[str, ...]
    uncut: Mapping[int, str]

    def renamed(self, names: Mapping[str, str]) -> QuantizedWeight:
        """The same of other names, by those that it has."""
        return QuantizedWeight(
            names[self.name],
            self.shape,
            self.method,
            {names[name]: dims for name, dims in self.members.items()},
            self.groups,
            tuple(map(names.__getitem__, self.grouped_by)),
            {d: names[name] for d, name in self.uncut.items()},
        )


def quantization_config(config: Mapping[str, object] | None) -> Mapping[str, Any]:
    """What a config.json, or the config of its language model, says of quantisation.

    >>> quantization_config({"text_config": {"quantization_config": {"quant_method": "fp8"}}})
    {'quant_method': 'fp8'}
    """
    inside: list[Mapping[str, Any]] = [config or {}]
    for one in inside:
        for key in _CONFIG_KEYS:
            found = one.get(key)
            if isinstance(found, Mapping):
                return found
        inside += [value for value in one.values() if isinstance(value, Mapping)]
    return {}


def find_quantized(
    shapes: Shapes,
    config: Mapping[str, object] | None = None,
    itemsizes_bytes: Mapping[str, int] | None = None,
    logical_shapes: Shapes | None = None,
    *,
    is_lenient: bool = False,
) -> dict[str, QuantizedWeight]:
    """The quantised weights among stored tensors, by logical name.

    Args:
        shapes: of all stored tensors.
        config: the model's config.json.
        itemsizes_bytes: of one stored element, by tensor; one byte when None.
        logical_shapes: of weights whose stored tensors do not tell (bitsandbytes 4-bit).
        is_lenient: leave out what is not known, instead of refusing it.

    Raises:
        UncomputableError: a method, a form of one, or a tensor beside a quantised weight that is
            not known; shapes that do not fit together.

    >>> found = find_quantized({"up.weight": (300, 256), "up.weight_scale_inv": (3, 2)})
    >>> found["up.weight"].method, found["up.weight"].groups
    ('FP8 in blocks', (128, 128))
    """
    given = quantization_config(config)
    if not is_lenient:
        _expect_known_method(given)
    finder = _Finder(shapes, given, itemsizes_bytes or {}, logical_shapes or {})
    found: dict[str, QuantizedWeight] = {}
    failed: dict[str, str] = {}
    anchors = tuple(method.forms[0].suffix for method in METHODS)
    anchored = [name for name in shapes if name.endswith(anchors)]
    for method in METHODS:
        anchor = method.forms[0]
        needed = _find_ends(method, method.needs)
        lacking = _find_ends(method, method.lacks)
        for name in anchored:
            if not name.endswith(anchor.suffix):
                continue
            logical = name.removesuffix(anchor.suffix) + anchor.logical
            if logical in found or not finder.is_of(logical, needed, lacking):
                continue
            weight = finder.resolve(method, logical)
            if isinstance(weight, QuantizedWeight):
                found[logical] = weight
            else:
                failed.setdefault(logical, f"{name!r}, of {method.name}: {weight}")
    if is_lenient:
        return found
    for logical, reason in failed.items():
        if logical not in found:
            raise UncomputableError(
                f"the quantised weight of {reason}. What is known: {known_methods()}. {_ACCEPTED}"
            )
    _expect_no_strangers(shapes, found)
    return found


def known_methods() -> str:
    """The methods of quantisation that are known, as text."""
    return ", ".join(dict.fromkeys(method.name for method in METHODS))


def _expect_known_method(given: Mapping[str, Any]) -> None:
    if not given:
        return
    name = given.get("quant_method")
    key, others = KNOWN_QUANT_METHODS.get(str(name), ("", frozenset()))
    if name is not None and str(name) not in KNOWN_QUANT_METHODS:
        raise UncomputableError(
            f"`quantization_config` of config.json has quant_method {name!r}, of which it is not "
            f"known how its tensors go together; known are {', '.join(KNOWN_QUANT_METHODS)}. "
            f"{_ACCEPTED}"
        )
    if given.get(key) in others:
        raise UncomputableError(
            f"`quantization_config` of config.json has {key} {given[key]!r} of {name}, whose "
            f"elements are permuted so that no cut is known; what is known: {known_methods()}. "
            f"{_ACCEPTED}"
        )


def _expect_no_strangers(shapes: Shapes, found: Mapping[str, QuantizedWeight]) -> None:
    """Refuse tensors beside a quantised weight that no row of the table has."""
    members = {name for weight in found.values() for name in weight.members}
    modules = {name.removesuffix(".weight") for name in found if name.endswith(".weight")}
    for name in shapes:
        module, _, leaf = name.rpartition(".")
        if module in modules and name not in members and leaf not in ("weight", "bias"):
            weight = found[f"{module}.weight"]
            raise UncomputableError(
                f"the tensor {name!r} lies beside the quantised weight {weight.name!r} "
                f"({weight.method}), and it is not known how it goes with it; known there are "
                f"{', '.join(one.rpartition('.')[2] for one in weight.members)} and bias. "
                f"{_ACCEPTED}"
            )


class _Unresolved(Exception):
    """Shapes that a method cannot have, with the reason."""


class _Finder:
    """Finds what the dimensions of stored tensors are."""

    def __init__(
        self,
        shapes: Shapes,
        given: Mapping[str, Any],
        itemsizes_bytes: Mapping[str, int],
        logical_shapes: Shapes,
    ) -> None:
        self.shapes = shapes
        self.itemsizes_bytes = itemsizes_bytes
        self.logical_shapes = logical_shapes
        self.bits = [bits for bits in _collect(given, _BIT_KEYS) if isinstance(bits, int)]
        groups = [size for size in _collect(given, _GROUP_KEYS) if isinstance(size, int)]
        self.groups = [*(size for size in groups if size > 0), *_USUAL_GROUPS]
        blocks = [pair for pair in _collect(given, _BLOCK_KEYS) if isinstance(pair, list | tuple)]
        self.blocks: list[tuple[int, ...]] = [tuple(pair) for pair in blocks if len(pair) == 2]
        self.blocks.append((128, 128))
        self.keeps_order = given.get("desc_act") is False
        # Of each method and list of shapes the first weight, with the names of its tensors.
        self._known: dict[tuple[Any, ...], tuple[QuantizedWeight, tuple[str, ...]]] = {}

    def is_of(self, logical: str, needed: Collection[End], lacking: Collection[End]) -> bool:
        """Whether all that a method needs is there, and nothing that it lacks."""
        return all(_make_stored_name(logical, *end) in self.shapes for end in needed) and not any(
            _make_stored_name(logical, *end) in self.shapes for end in lacking
        )

    def resolve(self, method: Method, logical: str) -> QuantizedWeight | str:
        """The weight, or why its stored tensors do not fit together."""
        # Layers repeat: weights whose stored tensors have equal shapes differ in names only.
        ends = [(form.suffix, form.logical) for form in method.forms]
        ends += _find_ends(method, [end for end, _ in method.uncut])
        names = (logical, *(_make_stored_name(logical, *end) or "" for end in ends))
        key = (
            method.name,
            tuple(map(self.shapes.get, names)),
            tuple(map(self.itemsizes_bytes.get, names)),
            self.logical_shapes.get(logical),
        )
        known = self._known.get(key)
        if known is not None:
            weight, others = known
            return weight.renamed(dict(zip(others, names, strict=True)))
        try:
            weight = self._resolve(method, logical)
        except _Unresolved as error:
            return str(error)
        self._known[key] = weight, names
        return weight

    def _resolve(self, method: Method, logical: str) -> QuantizedWeight:
        # 1. Which stored tensors there are, and which of the alternatives each is.
        stored = {}
        for form in method.forms:
            name = _make_stored_name(logical, form.suffix, form.logical)
            if name is not None and name in self.shapes:
                stored[name] = form.dimensions
        leading = self._count_leading(stored)
        items = {
            name: _choose_alternative(name, self.shapes[name], texts, leading)
            for name, texts in stored.items()
        }
        # 2. The lengths of the logical weight.
        if any(item.startswith("flat") for texts in items.values() for item in texts):
            lengths = self._flat_lengths(logical)
        else:
            lengths = {word: self._find_length(word, items) for word in method.order}
        lead = next(
            (self.shapes[n][:leading] for n, texts in items.items() if texts and texts != ["*"]), ()
        )
        shape = (*lead, *(lengths[word] for word in method.order))
        # 3. What each stored dimension is.
        members: dict[str, tuple[StoredDimension, ...]] = {}
        for name, texts in items.items():
            own = self.shapes[name]
            found = [StoredDimension(d) for d in range(len(own) - len(texts))]
            for item, length in zip(texts, own[len(found) :], strict=True):
                found.append(self._read(name, item, length, lengths, method, leading))
            members[name] = tuple(found)
            for d in range(len(own) - len(texts)):
                if own[d] != shape[d]:
                    raise _Unresolved(f"{name!r} of shape {list(own)} for {list(shape)}")
        # 4. The groups that must stay together.
        groups, by = [1] * len(shape), [logical] * len(shape)
        for name, dims in members.items():
            for one in dims:
                if one.dimension is not None and one.elements > 1:
                    if groups[one.dimension] % one.elements:
                        by[one.dimension] = name
                    groups[one.dimension] = math.lcm(groups[one.dimension], one.elements)
        uncut: dict[int, str] = {}
        for (_, word), end in zip(
            method.uncut, _find_ends(method, [end for end, _ in method.uncut]), strict=True
        ):
            table = _make_stored_name(logical, *end)
            if table is not None and table in self.shapes and not self.keeps_order:
                uncut[leading + method.order.index(word)] = table
        if any(item.startswith("flat") for texts in items.values() for item in texts):
            # Rows lie behind one another in one dimension: columns cannot be cut.
            uncut[len(shape) - 1] = logical
        return QuantizedWeight(
            logical, shape, method.name, members, tuple(groups), tuple(by), uncut
        )

    def _count_leading(self, stored: Mapping[str, tuple[str, ...]]) -> int:
        """Leading dimensions, which stacked experts have; by the first tensor of one form."""
        for name, texts in stored.items():
            if len(texts) == 1 and texts[0] and texts[0] != "*":
                leading = len(self.shapes[name]) - len(_split(texts[0]))
                if leading < 0:
                    raise _Unresolved(
                        f"{name!r} has shape {list(self.shapes[name])}, expected `{texts[0]}`"
                    )
                return leading
        return 0

    def _flat_lengths(self, logical: str) -> dict[str, int]:
        if logical not in self.logical_shapes or len(self.logical_shapes[logical]) != 2:
            raise _Unresolved(
                f"the shape of {logical!r} stands in its quant_state, which was not given"
            )
        out, inner = self.logical_shapes[logical]
        return {"out": out, "in": inner}

    def _list_items(self, items: Mapping[str, list[str]]) -> Iterator[tuple[str, str, int]]:
        """The text of each stored dimension behind the leading ones, its tensor and length."""
        for name, texts in items.items():
            own = self.shapes[name]
            for item, size in zip(texts, own[len(own) - len(texts) :], strict=True):
                yield item, name, size

    def _find_length(self, word: str, items: Mapping[str, list[str]]) -> int:
        """The logical length that a stored dimension has exactly, or in the smallest groups."""
        packed: list[tuple[int, int]] = []
        for item, _, size in self._list_items(items):
            if item == word:
                return size
            if item.startswith(f"{word}/") and item[len(word) + 1 :].isdigit():
                packed.append((int(item[len(word) + 1 :]), size))
        if packed:
            elements, size = min(packed)
            return elements * size
        return self._find_packed_length(word, items)

    def _find_packed_length(self, word: str, items: Mapping[str, list[str]]) -> int:
        """The length that the bits of config.json give a packed dimension."""
        listed = list(self._list_items(items))
        sizes = [(name, size) for item, name, size in listed if item == f"{word}/pack"]
        scales = [size for item, _, size in listed if item == f"{word}~"]
        for name, size in sizes:
            for bits in self.bits:
                length = size * 32 // bits
                # Several methods of one config: the one whose groups fit too.
                if all(s == 1 or any(-(-length // g) == s for g in self.groups) for s in scales):
                    return length
            raise _Unresolved(
                f"{name!r} of shape {list(self.shapes[name])} is packed, and "
                "`quantization_config` of config.json has no number of bits that fits"
            )
        raise _Unresolved(f"no stored tensor has its dimension {word!r}")

    def _read(
        self,
        name: str,
        item: str,
        size: int,
        lengths: Mapping[str, int],
        method: Method,
        leading: int,
    ) -> StoredDimension:
        """What a stored dimension of length `size` is, by its text."""
        if item in ("*", ""):
            return StoredDimension(None)
        word, _, per = item.rstrip("~").partition("/")
        if word == "flat":
            return self._read_flat(name, per, size, lengths)
        at, length = leading + method.order.index(word), lengths[word]
        if item.endswith("~"):
            if size == 1:
                return StoredDimension(None)
            group = 1 if size == length else self._find_group(size, length, self._block(word))
            found = StoredDimension(at, group)
        elif per in ("group", "rows", "columns"):
            found = StoredDimension(at, self._find_group(size, length, self._block(word)))
        elif per == "pack":
            found = self._find_pack(at, size, length)
        else:
            found = StoredDimension(at, int(per or 1))
        if found.length_of(length) != size:
            raise _Unresolved(
                f"{name!r} has {size} indices for {length} of {word!r}, expected "
                f"{found.length_of(length)}"
            )
        return found

    def _block(self, word: str) -> list[int]:
        """Sizes of blocks that config.json gives, then those of groups."""
        return [*(pair[word == "in"] for pair in self.blocks), *self.groups]

    def _find_group(self, size: int, length: int, known: Iterable[int]) -> int:
        for group in known:
            if -(-length // group) == size:
                return group
        if size and length % size == 0:
            return length // size
        raise _Unresolved(f"{size} groups of {length} elements; they are not equally long")

    def _find_pack(self, at: int, size: int, length: int) -> StoredDimension:
        for bits in self.bits:
            shared = math.gcd(bits, 32)
            found = StoredDimension(at, 32 // shared, bits // shared)
            if found.length_of(length) == size:
                return found
        shared = math.gcd(length, size)
        if not size or length <= size or length // shared > 32:
            raise _Unresolved(f"{size} packed indices for {length} elements")
        return StoredDimension(at, length // shared, size // shared)

    def _read_flat(
        self, name: str, per: str, size: int, lengths: Mapping[str, int]
    ) -> StoredDimension:
        """A dimension over all elements: rows of the weight that are whole indices of it."""
        out, inner = lengths["out"], lengths["in"]
        total = out * inner
        if per == "pack":
            elements = 2 * self.itemsizes_bytes.get(name, 1)
        else:
            # Blocks are powers of two; nested ones are of so many blocks.
            elements = next((1 << n for n in range(32) if -(-total // (1 << n)) == size), 0)
            if per == "nested" and elements and elements < _BNB_NESTED:
                elements = 0
        if not elements or -(-total // elements) != size:
            raise _Unresolved(f"{name!r} has {size} indices for {total} elements")
        shared = math.gcd(inner, elements)
        return StoredDimension(0, elements // shared, inner // shared)


def _collect(given: object, keys: Collection[str]) -> list[Any]:
    """The values of keys anywhere in a config, outer ones first."""
    found: list[Any] = []
    if isinstance(given, Mapping):
        found += [value for key, value in given.items() if key in keys]
        for value in given.values():
            found += _collect(value, keys)
    return found


def _make_stored_name(logical: str, suffix: str, replaced: str) -> str | None:
    """A stored tensor's name; None where the logical one does not end as it should."""
    return logical.removesuffix(replaced) + suffix if logical.endswith(replaced) else None


def _find_ends(method: Method, suffixes: Iterable[str]) -> list[End]:
    """The ends of the stored tensors of a method that end so, with what they stand in place of."""
    replaced = {form.suffix: form.logical for form in reversed(method.forms)}
    return [(end, replaced.get(end, ".weight" if end[:1] == "." else "")) for end in suffixes]


def _split(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")] if text else []


def _choose_alternative(name: str, shape: Shape, texts: tuple[str, ...], leading: int) -> list[str]:
    """What the dimensions are behind the leading ones, of the alternative of as many."""
    for text in texts:
        items = _split(text)
        if len(items) + leading == len(shape):
            return items
    if all(size == 1 for size in shape) and "" in texts:
        # A scalar, whatever its rank.
        return ["*"] * len(shape)
    for text in texts:
        # A scalar for all experts, or a table.
        if len(_split(text)) == len(shape) and set(_split(text)) <= {"*"}:
            return _split(text)
    raise _Unresolved(
        f"{name!r} has shape {list(shape)}, expected `{'` or `'.join(texts)}`"
        + (f" behind {leading} dimensions of experts" if leading else "")
    )
