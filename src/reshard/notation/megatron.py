"""Shardings in Megatron's terms, as a line of text.

The sizes and order of the ranks precede a bar, and the attributes of a parameter follow it::

    tp=2 dp=4 order=tp-cp-ep-dp-pp | partition_dim=0 partition_stride=2
    tp=4 pp=2 | partition_dim=0 partition_sizes=16,8,4 stages=1
    etp=1 ep=4 edp=2 | expert expert_ranks=3 partition_dim=0

=============================  ==================================================================
before the bar
`tp cp dp pp`                  sizes of the grid of everything but experts; 1 if omitted
`etp ep edp pp`                sizes of the experts' grid
`order`                        words from fastest to slowest; tp-cp-ep-dp-pp if omitted
`offset`                       the first rank
after the bar
`partition_dim`                the dimension sharded over `tp` or `etp`; none if omitted
`partition_stride`             equal blocks, each sharded over all ranks
`partition_sizes`              blocks on a rank; lists for each rank, separated by `;`
`local_lengths`                lengths of the sharded dimension on each rank, if uneven
`heads`                        heads that ranks may share
`pad`                          local lengths are a multiple of this
`expert`                       over the experts' grid
`stages`, `expert_ranks`       its positions along `pp` and `ep`
`ndim`                         dimensions of the tensor, if no shape is given
=============================  ==================================================================

`MegatronParameter` in `reshard.megatron.parameters` describes the same for a parameter whose
local shape is known, and more; programs use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reshard.cut_rules import Blocks, Ceil, CutRule, Heads, Padded, Pieces, Sizes, Strided
from reshard.errors import NotationError
from reshard.megatron.parameters import blocks_rule, tensor_parallel_spec
from reshard.megatron.ranks import DEFAULT_ORDER, DENSE_AXES, EXPERT_AXES, MegatronRanks, rank_grid
from reshard.mesh import Axis, DeviceMesh
from reshard.notation.parsing import Vocabulary
from reshard.sharding import ShardingSpec

# Rules that the attributes do not give are refused one by one, by `_write_cut`.
_VOCABULARY = Vocabulary("Megatron", rules=(CutRule,), has_restrictions=True)

_RANK_WORDS = ("tp", "cp", "dp", "pp", "etp", "ep", "edp", "order", "offset")
_CUT_WORDS = (
    "partition_dim",
    "partition_stride",
    "partition_sizes",
    "local_lengths",
    "heads",
    "pad",
    "expert",
    "stages",
    "expert_ranks",
    "ndim",
)


def parse_megatron(
    text: str, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> ShardingSpec:
    """Return the sharding that `text` describes in Megatron's words.

    Args:
        text: ranks, a bar, and the parameter; without a bar only the parameter.
        mesh: the grid of ranks for a text without ranks, with an axis `tp` or `etp`.
        shape: of the whole tensor, for its number of dimensions.

    Raises:
        NotationError: words that are unknown, repeated or do not fit each other.
        MeshError, SpecError, RuleError: impossible ranks or cut rules.

    >>> spec = parse_megatron("tp=2 dp=2 | partition_dim=0 partition_stride=2", shape=(8, 4))
    >>> spec
    ShardingSpec(DeviceMesh(pp=1,dp=2,cp=1,tp=2), 'tp@stride2, -')
    >>> megatron_text(spec)
    'tp=2 dp=2 | partition_dim=0 partition_stride=2 ndim=2'
    """
    ranks, bar, cut = text.rpartition("|")
    words = _read_words(cut, _CUT_WORDS, text)
    of_ranks = _read_words(ranks, _RANK_WORDS, text)
    is_expert = "expert" in words
    if bar:
        mesh = _build_grid(of_ranks, is_expert, text)
    elif mesh is None:
        raise NotationError(
            f"no ranks in {text!r}; write them before a bar, such as `tp=2 dp=4 | "
            "partition_dim=0`, or give a mesh"
        )
    axis = "etp" if is_expert else "tp"
    if axis not in mesh.axis_names:
        raise NotationError(
            f"{text!r} is sharded over {axis}, but the mesh has {', '.join(mesh.axis_names)}; "
            f"write the ranks before a bar, or name an axis {axis}"
        )
    ndim = _find_ndim(words, shape, text)
    rule = _build_rule(words, mesh.axis_size(axis), text)
    # Without `partition_dim` nothing is sharded, and the dimension has no effect.
    dim = _read_number(words, "partition_dim", text) or 0
    if rule is not None and dim >= ndim:
        raise NotationError(f"partition_dim={dim} of a tensor of {ndim} dimensions in {text!r}")
    stages, expert_ranks = (
        _read_numbers(words, "stages", text),
        _read_numbers(words, "expert_ranks", text),
    )
    if expert_ranks is not None and not is_expert:
        raise NotationError(f"expert_ranks without `expert` in {text!r}; add `expert`")
    return tensor_parallel_spec(mesh, axis, ndim, dim, rule, {"pp": stages, "ep": expert_ranks})


def _read_words(text: str, allowed: Sequence[str], whole: str) -> dict[str, str]:
    words: dict[str, str] = {}
    for item in text.split():
        word, equals, value = item.partition("=")
        # `expert` is the only word without a value.
        if word not in allowed or word in words or bool(equals and value) == (word == "expert"):
            raise NotationError(
                f"cannot read {item!r} in {whole!r}; write each of {', '.join(allowed)} at most "
                "once, with its value, such as tp=2 dp=4 | partition_dim=0 partition_stride=2"
            )
        words[word] = value
    return words


def _read_numbers(words: dict[str, str], word: str, text: str) -> tuple[int, ...] | None:
    if word not in words:
        return None
    items = words[word].split(",")
    if not all(item.isdecimal() for item in items):
        raise NotationError(
            f"cannot read {word}={words[word]} in {text!r}; write whole numbers and commas"
        )
    return tuple(int(item) for item in items)


def _read_number(words: dict[str, str], word: str, text: str) -> int | None:
    numbers = _read_numbers(words, word, text)
    if numbers is None:
        return None
    if len(numbers) != 1:
        raise NotationError(f"cannot read {word}={words[word]} in {text!r}; write a single number")
    return numbers[0]


def _build_grid(words: dict[str, str], is_expert: bool, text: str) -> DeviceMesh:
    """Return the grid of ranks that the words before the bar describe."""
    sizes = {word: _read_number(words, word, text) or 0 for word in words if word != "order"}
    offset = sizes.pop("offset", 0)
    order = words.get("order", DEFAULT_ORDER)
    # Without edp the words are Megatron's own sizes, from which both grids follow.
    if "edp" not in sizes:
        ranks = MegatronRanks(order=order, offset=offset, **sizes)
        return ranks.expert if is_expert else ranks.dense
    if not is_expert or set(sizes) - set(EXPERT_AXES):
        raise NotationError(
            f"edp={sizes['edp']} in {text!r}; it belongs to an expert's grid: write etp, ep, edp "
            "and pp before the bar and `expert` after it, or tp, cp, dp, pp with ep and etp"
        )
    return rank_grid({axis: sizes.get(axis, 1) for axis in EXPERT_AXES}, order, offset)


def _find_ndim(words: dict[str, str], shape: Sequence[int] | None, text: str) -> int:
    stated = _read_number(words, "ndim", text)
    if stated is None and shape is None:
        raise NotationError(
            f"{text!r} lacks the number of dimensions of the tensor; add ndim=2, or give a shape"
        )
    if stated is not None and shape is not None and stated != len(shape):
        raise NotationError(f"ndim={stated} in {text!r} of a tensor of shape {list(shape)}")
    return len(shape) if shape is not None else (stated or 0)


def _build_rule(words: dict[str, str], parts: int, text: str) -> CutRule | None:
    """Return the rule of the sharded dimension, or None if no dimension is sharded."""
    ways = ("partition_stride", "partition_sizes", "heads", "pad")
    # A stride of 1 has no effect.
    chosen = [word for word in ways if word in words and (word, words[word]) != (ways[0], "1")]
    lengths = _read_numbers(words, "local_lengths", text)
    if "partition_dim" not in words and (chosen or lengths):
        raise NotationError(f"{(chosen or ['local_lengths'])[0]} without partition_dim in {text!r}")
    if len(chosen) > 1 or (lengths is not None and chosen not in ([], ["partition_stride"])):
        raise NotationError(
            f"{' and '.join(chosen)}{' and local_lengths' if lengths else ''} in {text!r}; give "
            "only one of them"
        )
    if "partition_dim" not in words:
        return None
    if not chosen:
        return Ceil() if lengths is None else Sizes(lengths)
    number = None if chosen == ["partition_sizes"] else _read_number(words, chosen[0], text)
    if chosen == ["partition_stride"]:
        return Strided(number or 0, lengths)
    if chosen == ["heads"]:
        return Heads(number or 0)
    if chosen == ["pad"]:
        return Padded(number or 0)
    rows = [
        _read_numbers({"partition_sizes": row}, "partition_sizes", text) or ()
        for row in words["partition_sizes"].split(";")
    ]
    if len(rows) == 1:
        return blocks_rule(rows * parts)
    if len(rows) != parts or len({len(row) for row in rows}) != 1:
        raise NotationError(
            f"partition_sizes of {len(rows)} ranks in {text!r}; write a single list, or lists of "
            f"equal length for each of {parts} tensor-parallel ranks"
        )
    return Pieces.from_splits(rows)


def megatron_text(spec: ShardingSpec) -> str:
    """Return the text that `parse_megatron` reads back to the same sharding.

    Raises:
        NotationError: a part of the sharding that Megatron cannot express.

    >>> from reshard.sharding import spec
    >>> grid = MegatronRanks(dp=4, ep=2).expert
    >>> megatron_text(spec(grid, "etp, - | only(ep=1)"))
    'ep=2 edp=2 | expert partition_dim=0 expert_ranks=1 ndim=2'
    >>> megatron_text(spec(DeviceMesh.of(x=2), "x"))
    Traceback (most recent call last):
        ...
    reshard.errors.NotationError: Megatron cannot express the mesh x=2: its axes are named tp, cp,
    dp, pp, or etp, ep, edp, pp
    """
    words, is_expert = _write_ranks(spec.mesh)
    _VOCABULARY.check(spec)
    cut = ["expert"] if is_expert else []
    cut += _write_cut(spec, "etp" if is_expert else "tp")
    for axis, at in spec.only:
        if axis not in ("pp", "ep"):
            why = "tensors are restricted along pp and ep only"
            raise _VOCABULARY.refusal(spec, f"only({axis}={_join_numbers(at)})", why)
        cut.append(f"{'stages' if axis == 'pp' else 'expert_ranks'}={_join_numbers(at)}")
    return " ".join([*words, "|", *cut, f"ndim={spec.ndim}"])


def _join_numbers(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _write_ranks(mesh: DeviceMesh) -> tuple[list[str], bool]:
    """Return the words before the bar, and whether the grid is that of the experts."""
    grids = (DENSE_AXES, EXPERT_AXES)
    axes = next((axes for axes in grids if set(mesh.axis_names) == set(axes)), None)
    if axes is None:
        raise NotationError(
            f"Megatron cannot express the mesh {mesh.text}: its axes are named "
            f"{', '.join(DENSE_AXES)}, or {', '.join(EXPERT_AXES)}"
        )
    offset = min(mesh.devices)
    if mesh.devices != tuple(range(offset, offset + mesh.size)):
        raise NotationError(
            f"Megatron cannot express the devices {list(mesh.devices)}: its ranks are consecutive "
            "and in the order of the grid"
        )
    is_expert = axes is EXPERT_AXES
    sizes = {axis: mesh.axis_size(axis) for axis in axes}
    # `edp` marks the experts' grid, so it is written even if it is 1.
    words = [f"{axis}={n}" for axis, n in sizes.items() if n > 1 or axis == "edp"]
    # An order has the fastest axis first, a mesh the slowest; tp and dp name etp and edp, too.
    order = "-".join(reversed(mesh.axis_names)).replace("etp", "tp").replace("edp", "dp")
    if rank_grid(sizes, DEFAULT_ORDER, offset).axis_names != mesh.axis_names:
        words.append(f"order={order}")
    return words + ([f"offset={offset}"] if offset else []), is_expert


def _write_cut(spec: ShardingSpec, axis: str) -> list[str]:
    cut = [(dim, level) for dim, item in enumerate(spec.dim_specs) for level in item.levels]
    if not cut:
        return []
    (dim, level), *more = cut
    if more or level.axes != (Axis(axis),):
        why = f"a single dimension is sharded, over the axis {axis}"
        raise _VOCABULARY.refusal(spec, str(spec), why)
    words = [f"partition_dim={dim}", *_write_rule(level.rule, spec.mesh.axis_size(axis))]
    parsed = dict(word.split("=") for word in words)
    # The words are read back: rules that they cannot express come back as another rule.
    if any(not value for value in parsed.values()) or (
        _build_rule(parsed, spec.mesh.axis_size(axis), " ".join(words)) != level.rule
    ):
        why = (
            "it has equal parts, strides, blocks of which every rank has an equal or a given "
            "piece, local lengths, shared heads and padding"
        )
        raise _VOCABULARY.refusal(spec, str(level), why)
    return words


def _write_rule(rule: CutRule, parts: int) -> list[str]:
    """Return the words of a rule. The caller refuses those that read back as another rule."""
    if isinstance(rule, Strided):
        lengths = (
            []
            if rule.local_lengths is None
            else [f"local_lengths={_join_numbers(rule.local_lengths)}"]
        )
        return [f"partition_stride={rule.stride}", *lengths]
    if isinstance(rule, Blocks):
        # Sizes that do not divide read back as another rule, so the caller refuses them.
        return [f"partition_sizes={_join_numbers(size // parts for size in rule.sizes)}"]
    if isinstance(rule, Pieces):
        rows = zip(*rule.pieces, strict=True)
        return [f"partition_sizes={';'.join(map(_join_numbers, rows))}"]
    if isinstance(rule, Sizes):
        return [f"local_lengths={_join_numbers(rule.sizes)}"]
    if isinstance(rule, Heads):
        return [f"heads={rule.count}"]
    return [f"pad={rule.multiple}"] if isinstance(rule, Padded) else []
