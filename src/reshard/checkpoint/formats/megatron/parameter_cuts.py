"""How tensor parallelism cuts the parameters of Megatron's modules, by their names.

    column-parallel   linear_qkv, linear_fc1, linear_q_up_proj, linear_kv_up_proj, output_layer,
                      word_embeddings           rows, and a bias
    row-parallel      linear_proj, linear_fc2   columns; its bias is whole
    not               norms, routers, position_embeddings, linear_kv_down_proj

A gated `linear_fc1` has a share of both halves on each rank (a stride of 2). Experts are cut over
their own tensor parallelism. Sources: the `partition_dim` and `partition_stride` that Megatron-core
0.16 gives the parameters of its GPT models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_ROWS = re.compile(
    r"(?:word_embeddings\.weight|output_layer\.(?:weight|bias)|"
    r"linear_(?:qkv|fc1|q_proj|q_up_proj|kv_up_proj)\.(?:weight|bias)\d*)$"
)
_COLUMNS = re.compile(r"linear_(?:proj|fc2)\.weight\d*$")
_WHOLE = re.compile(
    r"(?:norm\w*\.(?:weight|bias)|layer_norm_(?:weight|bias)|linear_(?:proj|fc2)\.bias\d*|"
    r"router\.\w+|position_embeddings\.weight|tokentype_embeddings\.weight|"
    r"linear_kv_down_proj\.\w+|gate_weight|eh_proj\.weight)$"
)
_Q_DOWN = re.compile(r"linear_q_down_proj\.weight$")
_FIRST = re.compile(r"linear_fc1\.(weight|bias)(\d*)$")


class ParameterCut(NamedTuple):
    """The dimension that is cut, None for none, and the stretches of each part."""

    dimension: int | None
    stride: int = 1


def find_cut(
    name: str, shapes: Mapping[str, tuple[int, ...]], q_rank: int | None = None
) -> ParameterCut | None:
    """How a parameter is cut; None for one that is not known.

    Args:
        name: of the parameter, in the model or on its rank.
        shapes: of the parameters on one rank, by such names.
        q_rank: the rank of compressed queries, where there is one.

    >>> find_cut("mlp.linear_fc1.weight", {"mlp.linear_fc1.weight": (16, 8),
    ...                                    "mlp.linear_fc2.weight": (8, 8)})
    ParameterCut(dimension=0, stride=2)
    """
    first = _FIRST.search(name)
    if first is not None:
        behind = f"{name[: first.start()]}linear_fc2.weight{first[2]}"
        # A gated layer has two rows for each column of the next one.
        is_gated = behind in shapes and shapes[name][0] == 2 * shapes[behind][1]
        return ParameterCut(0, 2 if is_gated else 1)
    if _ROWS.search(name):
        return ParameterCut(0)
    if _COLUMNS.search(name):
        return ParameterCut(1)
    if _Q_DOWN.search(name) and q_rank is not None:
        return ParameterCut(None if shapes[name][0] == q_rank else 0)
    return ParameterCut(None) if _WHOLE.search(name) else None
