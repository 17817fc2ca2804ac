"""Tensors of codes: elements of quantised weights, which are numbers by their scales only.

A code without its scale has no value. Such tensors are known by their element types and names::

    float8 matrices               X.weight beside X.weight_scale_inv or X.weight_scale
    integers                      X.weight (int8, uint8) in a checkpoint that is quantised
    packed integers               X.qweight, X.weight_packed, X_blocks

FP8 files without any scale exist: their elements are the values themselves. Nothing in a file
tells them apart from weights that lost their scales, so that the user has to.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from reshard.text.quantities import count_text

_SCALE = re.compile(r"(?:^|[._])(?:scales?|scale_inv|scale_\d|scale_\w+|\w*scale)$")
_INTEGERS = frozenset({"int8", "uint8"})
# Ends of names of codes, with those of their scales in that place.
_PACKED = {
    ".qweight": ".scales",
    "_packed": "_scale",
    "_blocks": "_scales",
    "_qdata": "_scale",
    "._data": "._scale",
}
_PACKED_ENDS = tuple(_PACKED)
# Scales of a plain name, after it and in the place of `.weight`.
_AFTER = ("_scale_inv", "_scale", "_scales", ".absmax")
_IN_PLACE = (".SCB", ".scale", ".scales", ".scale_weight", ".weight_scale", ".weight_scale_inv")


def list_codes(
    types: Mapping[str, str], dims: Mapping[str, int], *, is_quantized: bool
) -> list[str]:
    """Return the names of tensors of codes.

    Args:
        types: of elements, by tensor.
        dims: the number of dimensions of each tensor.
        is_quantized: whether the checkpoint has quantised weights, so that integers are codes.

    >>> list_codes({"up.weight": "float8_e4m3fn"}, {"up.weight": 2}, is_quantized=False)
    ['up.weight']
    """
    found = []
    for name, element in types.items():
        if element.startswith("float8"):
            is_code = dims[name] > 1 and element != "float8_e8m0fnu" and not _SCALE.search(name)
        elif name.endswith(_PACKED_ENDS):
            is_code = element in ("int32", *_INTEGERS)
        else:
            is_code = is_quantized and element in _INTEGERS and name.endswith(".weight")
            is_code = is_code and dims[name] > 1
        if is_code:
            found.append(name)
    return found


def find_lacking(names: Collection[str], types: Mapping[str, str]) -> dict[str, str]:
    """Return what is missing for each of some tensors of codes that lacks a scale.

    Args:
        names: of tensors of codes.
        types: of the elements of all tensors.

    >>> types = dict.fromkeys(["up.weight", "q.weight"], "float8_e4m3fn")
    >>> find_lacking([*types], {**types, "q.weight_scale": "float32"})
    {'up.weight': 'up.weight_scale'}
    """
    found: dict[str, str] = {}
    for name in names:
        if name + _AFTER[0] in types:
            continue
        end = None
        if name.endswith(_PACKED_ENDS):
            end = next(one for one in _PACKED if name.endswith(one))
        if end is not None:
            scales = [name.removesuffix(end) + _PACKED[end]]
        else:
            bare = name.removesuffix(".weight")
            scales = [name + one for one in _AFTER]
            scales += [bare + one for one in _IN_PLACE] if bare != name else []
        scale = next((one for one in scales if one in types), None)
        if scale is None:
            # The name of the scale that is missing is as those of other weights are.
            usual = 0 if types[name].startswith("float8") or end is not None else 1
            used = (
                number
                for number, one in enumerate(_AFTER if end is None and not found else ())
                if any(other.endswith(one) for other in types)
            )
            found[name] = scales[next(used, usual)]
            continue
        # Four-bit elements have scales of eight bits, and a scale of these.
        second = {"": "_scale_2", "_packed": "_global_scale"}.get(end or "")
        is_half = types[name] == "uint8" and types[scale].startswith("float8_e4m3")
        if second is not None and is_half and name.removesuffix(end or "") + second not in types:
            found[name] = name.removesuffix(end or "") + second
    return found


def describe_lacking(lacking: Mapping[str, Any], folder: object) -> str:
    """Describe codes without scales.

    >>> describe_lacking({"up.weight": "up.weight_scale_inv"}, "model")
    "1 quantised weight in model lacks its scale: 'up.weight' has no 'up.weight_scale_inv'"
    """
    name, scale = next(iter(lacking.items()))
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    lacks = "lacks its scale" if len(lacking) == 1 else "lack their scales"
    known = repr(scale) if scale else "scale of a name that is known"
    return (
        f"{count_text(len(lacking), 'quantised weight')} in {folder} {lacks}: {name!r} has no "
        f"{known}{more}"
    )
