"""Several models in a checkpoint, and the prefixes that programs put before names.

Only this module interprets prefixes: the wrappers of modules, the words that trainers use for a
model, and the sets of tensors that would have the same names without their prefixes::

    state_dict.module.layers.0.w    state_dict        weights
    ema_state_dict.module.layers.0.w    ema_state_dict    their average
    ema.shadow_params.0             ema.shadow_params their average, by number

Two such sets are two models. The user has to choose between them, since the names do not show which
model is meant.

Names that end alike are not sufficient evidence of two models: the names of encoders and decoders
end alike, and so do the names of layers. In addition, a set must be named by a word that programs
use for another model (`ema`, `teacher`, `critic`), or both sets must be models of the recipe's kind
under words that the recipe does not have.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from reshard.errors import RecipeError
from reshard.text import count_text

_WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
_WRAPPER = re.compile(rf"(?:^|\.)(?:{'|'.join(sorted(_WRAPPERS))})\.")
#: Prefixes of models, among other entries of a saved state.
MODEL_PREFIXES = (
    *("model.", "params.", "state_dict.", "model_state_dict.", "module.", "network.", "net."),
)
#: Words that trainers use for the model in their state.
TRAINER_WORDS = frozenset(
    {
        *("model", "module", "state_dict", "model_state_dict", "network", "net", "policy"),
        *("actor", "student", "wrapped", "app"),
    }
)
# Entries that programs save on the top level of a state, next to the model.
_ELSEWHERE = re.compile(
    r"(?:rng|cuda_rng|random|numpy_rng|torch_rng)(?:_\w+)?|\w*scheduler\w*|lr_schedulers?|"
    r"data_?loader\w*|train_state|\w*scaler|loops|callbacks|\w*rng_state\w*|rank_\d+"
)
# The number of states in an average of `torch.optim.swa_utils`.
_COUNTER = "n_averaged"
# Parts of words that name another model of the same kind.
_OTHER_MODELS = frozenset(
    {
        *("ema", "emas", "average", "averaged", "avg", "swa", "polyak", "lookahead"),
        *("shadow", "momentum", "slow"),
        *("teacher", "student", "actor", "critic", "policy", "ref", "reference"),
        *("reward", "target", "online", "frozen", "old", "best", "draft"),
        *("generator", "discriminator", "gen", "disc", "netg", "netd"),
    }
)
# Lists of models.
_LISTS = frozenset({"models", "ensemble", "members", "critics", "actors", "agents", "policies"})
# Letters that distinguish two models after the same word: net_g and net_d.
_LETTER_PAIRS = (frozenset({"g", "d"}), frozenset({"a", "b"}))
_WORD_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
# A number in the first words may be the number of a model; later numbers are of layers and experts.
_DISTINCT_WORDS = 3
_MAX_PREFIX_WORDS = 5
_MAX_COMMON_WORDS = 6
# The maximum number of models in a checkpoint: smaller parts are layers.
_MAX_MODELS = 12
_MAX_LISTED = 4


def bare_name(name: str) -> str:
    """Return a parameter's name without the wrappers that programs put around modules.

    >>> bare_name("module.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    if _WRAPPER.search(name) is None:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_wrapper(word: str) -> bool:
    """Return whether a word of a name is a wrapper around a module."""
    return word in _WRAPPERS


def is_trainer_prefix(prefix: str) -> bool:
    """Return whether trainers put a prefix before all names of a model.

    >>> is_trainer_prefix("model."), is_trainer_prefix("app.model."), is_trainer_prefix("layers.0.")
    (True, True, False)
    """
    words = prefix.removesuffix(".").split(".")
    return all(f"{word}." in MODEL_PREFIXES or word in TRAINER_WORDS | _WRAPPERS for word in words)


def is_auxiliary(name: str) -> bool:
    """Return whether a name belongs to state that is saved with a model, such as random states.

    >>> is_auxiliary("rng_state"), is_auxiliary("model.norm.weight")
    (True, False)
    """
    is_counter = name.endswith(_COUNTER) and name.rpartition(".")[2] == _COUNTER
    return is_counter or _ELSEWHERE.fullmatch(name.partition(".")[0]) is not None


def find_model_sets(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    is_of_model: Callable[[str], bool] | None = None,
    own_words: frozenset[str] = frozenset(),
) -> dict[str, int]:
    """Return the number of tensors of each model, by prefix; empty for fewer than two models.

    Args:
        shapes: the shapes of tensors by name, without optimizer state.
        is_of_model: whether a name belongs to the model's architecture, if that is known.
        own_words: words that the architecture has in its own names.

    >>> find_model_sets({"net.up": (4,), "net.b": (4,), "net_ema.up": (4,), "net_ema.b": (4,)})
    {'net': 2, 'net_ema': 2}
    >>> find_model_sets({"encoder.0.w": (4,), "decoder.0.w": (4,)})
    {}
    """
    kinds: dict[str, list[str]] = {}
    for name in shapes:
        if not is_auxiliary(name):
            kinds.setdefault(_kind_of(name), []).append(name)
    ends = _group_by_end(kinds)
    prefixes = _find_twins(kinds, ends, is_of_model, own_words)
    sets = {
        prefix: [name for kind in kinds if kind.startswith(prefix) for name in kinds[kind]]
        for prefix in sorted(prefixes, key=lambda item: (len(item), item))
        if not any(other and prefix != other and prefix.startswith(other) for other in prefixes)
    }
    if "" in sets:
        others = {name for prefix, names in sets.items() if prefix for name in names}
        sets[""] = [name for name in sets[""] if name not in others]
    sets |= _find_unnamed_copies(shapes, kinds, sets)
    if len(sets) < 2:
        return {}
    order = {name: number for number, name in enumerate(shapes)}
    first = sorted(sets, key=lambda prefix: order[sets[prefix][0]])
    return {_option_text(prefix): len(sets[prefix]) for prefix in first}


def find_prefixes(names: Collection[str], stored: Iterable[str]) -> dict[str, int]:
    """Return the prefixes under which most of a model's names are stored, with the number of names.

    Args:
        names: the names of the model's tensors.
        stored: the names of a checkpoint's weights, without optimizer state.

    >>> find_prefixes(["up", "down"], ["model.up", "model.down", "ema.up", "ema.down", "norm.up"])
    {'model.': 2, 'ema.': 2}
    >>> find_prefixes(["up", "down"], ["up", "layers.down"])
    {}
    """
    counts: dict[str, int] = {}
    for name in stored:
        words = name.split(".")
        for at in range(min(_MAX_PREFIX_WORDS, len(words) - 1) + 1):
            if ".".join(words[at:]) in names:
                prefix = ".".join(words[:at]) + "." * bool(at)
                counts[prefix] = counts.get(prefix, 0) + 1
    return {prefix: count for prefix, count in counts.items() if 2 * count > len(names)}


def find_common_prefixes(names: Mapping[str, int], share: int) -> list[str]:
    """Return the prefixes, up to a dot, of at least 1 in `share` names, by descending frequency.

    Args:
        names: the number of occurrences of each name.
        share: 2 for half of the names.

    >>> find_common_prefixes({"model.up": 1, "model.net.down": 2, "norm": 1}, 2)
    ['model.', 'model.net.']
    """
    counts: Counter[str] = Counter()
    for name, count in names.items():
        words = name.split(".")
        for length in range(1, min(_MAX_COMMON_WORDS + 1, len(words))):
            counts[".".join(words[:length]) + "."] += count
    total = sum(names.values())
    common = [prefix for prefix, count in counts.items() if share * count >= total]
    return sorted(common, key=lambda prefix: (-counts[prefix], len(prefix)))


def expect_one_model(folder: Path, sets: Mapping[str, int]) -> None:
    """Raise RecipeError for a checkpoint with several models.

    Args:
        folder: the folder of the checkpoint.
        sets: the result of `find_model_sets`.
    """
    if sets:
        raise RecipeError(f"{folder} has {describe_model_sets(sets)}")


def describe_model_sets(sets: Mapping[str, int]) -> str:
    """Return a list of models, with the options that choose between them.

    >>> print(describe_model_sets({"net": 2, "net_ema": 2}))
    2 models whose tensors would take the same names: net (2 tensors), net_ema (2 tensors). \
Choose one with --select net or --select net_ema, or keep net with --exclude 'net_ema.*'
    """
    listed = ", ".join(
        f"{prefix or 'names without a prefix'} ({count_text(count, 'tensor')})"
        for prefix, count in sets.items()
    )
    named = [prefix for prefix in sets if prefix]
    choice = " or ".join(f"--select {prefix}" for prefix in named[:_MAX_LISTED])
    chosen = "" if "" in sets else named[0]
    others = " ".join(f"--exclude '{prefix}.*'" for prefix in named if prefix != chosen)
    return (
        f"{len(sets)} models whose tensors would take the same names: {listed}. Choose one with "
        f"{choice}, or keep {chosen or 'names without a prefix'} with {others}"
    )


def _kind_of(name: str) -> str:
    """Return a name with the numbers of layers and experts replaced by 0."""
    words = name.split(".", _DISTINCT_WORDS)
    if len(words) > _DISTINCT_WORDS:
        words[-1] = _NUMBER.sub("0", words[-1])
    return ".".join(words)


def _group_by_end(kinds: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return, for each end of names, the prefixes before it and the name with each prefix."""
    ends: dict[str, dict[str, str]] = {}
    for kind in kinds:
        words = kind.split(".")
        for at in range(min(_MAX_PREFIX_WORDS, len(words) - 1) + 1):
            if words[at] in _WRAPPERS:
                continue
            prefix = ".".join(words[:at]) + "." * bool(at)
            ends.setdefault(bare_name(".".join(words[at:])), {})[prefix] = kind
    return ends


def _find_twins(
    kinds: Mapping[str, object],
    ends: Mapping[str, Mapping[str, str]],
    is_of_model: Callable[[str], bool] | None,
    own_words: frozenset[str],
) -> set[str]:
    """Return the prefixes of models whose names have the same ends."""
    # For each name, consider only the longest end that it shares with another name.
    longest: dict[str, int] = {}
    for end, prefixes in ends.items():
        if len(prefixes) > 1:
            for kind in prefixes.values():
                longest[kind] = max(longest.get(kind, 0), len(end))
    shared: dict[tuple[str, str], list[str]] = {}
    for end, prefixes in ends.items():
        named = [prefix for prefix, kind in prefixes.items() if longest.get(kind) == len(end)]
        # Layers, not models, if there are more prefixes than there can be models.
        if 1 < len(named) <= _MAX_MODELS:
            for number, first in enumerate(named):
                for second in named[number + 1 :]:
                    shared.setdefault((first, second), []).append(end)
    counts = {
        prefix: sum(kind.startswith(prefix) for kind in kinds)
        for prefix in {prefix for pair in shared for prefix in pair}
    }
    twins = set[str]()
    for pair, common in shared.items():
        totals = [counts[prefix] for prefix in pair]
        if "" in pair:
            # A copy next to names without a prefix must be a copy of all of these, not of a layer.
            totals = [max(totals) - min(totals)]
        is_much = 2 * len(common) >= min(totals) and _MAX_MODELS * min(totals) >= len(kinds)
        if is_much and _has_evidence(pair, common, is_of_model, own_words):
            # Names in single layers end alike too, such as `weight`.
            is_layer = not any("." in end for end in common)
            if not is_layer or 10 * sum(kind.startswith(pair) for kind in kinds) >= 9 * len(kinds):
                twins.update(pair)
    # Models make up most of a checkpoint. If only a few names end alike, they are in modules.
    covered = sum(any(kind.startswith(prefix) for prefix in twins) for kind in kinds)
    return twins if 2 * covered > len(kinds) else set()


def _has_evidence(
    pair: tuple[str, str],
    common: list[str],
    is_of_model: Callable[[str], bool] | None,
    own_words: frozenset[str],
) -> bool:
    """Return whether two prefixes, before names that end alike, are prefixes of two models."""
    words = [_last_word(prefix) for prefix in pair]
    if words[0] == words[1]:
        # The prefixes differ in a number, as in a list of models, or in wrappers.
        if all(prefix[:-1].rpartition(".")[2].isdigit() for prefix in pair):
            return words[0] in _LISTS
        return not words[0]
    parts = [{part.lower() for part in _WORD_PART.findall(word)} for word in words]
    if any(
        word not in own_words and of_word & _OTHER_MODELS
        for word, of_word in zip(words, parts, strict=True)
    ):
        return True
    if parts[0] & parts[1] and parts[0] ^ parts[1] in _LETTER_PAIRS:
        # Parts of a layer can have such words too: lora_A and lora_B.
        return any("." in end for end in common)
    if is_of_model is None or any(word in own_words for word in words):
        return False
    return 2 * sum(map(is_of_model, common)) > len(common)


def _last_word(prefix: str) -> str:
    """Return the last word of a prefix that is neither a wrapper nor a number."""
    words = [word for word in prefix.split(".") if word and word not in _WRAPPERS]
    return next((word for word in reversed(words) if not word.isdigit()), "")


def _option_text(prefix: str) -> str:
    """Return a prefix without wrappers at its end, as `--select` takes it."""
    words = prefix.split(".")[:-1]
    while len(words) > 1 and words[-1] in _WRAPPERS:
        words.pop()
    return ".".join(words)


def _find_unnamed_copies(
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, list[str]],
    sets: Mapping[str, list[str]],
) -> dict[str, list[str]]:
    """Return copies of a model whose names are numbers, or names without their dots."""
    groups: dict[str, list[str]] = {}
    for kind, names in kinds.items():
        front, _, last = kind.rpartition(".")
        parts = {part.lower() for part in _WORD_PART.findall(front)}
        if parts & _OTHER_MODELS and (last.isdigit() or front.count(".") == 0):
            groups.setdefault(f"{front}.", []).extend(names)
    result: dict[str, list[str]] = {}
    for prefix, names in groups.items():
        if any(prefix.startswith(group) for group in sets if group):
            continue
        others = [
            name
            for name in shapes
            if not name.startswith(f"{prefix.partition('.')[0]}.") and not is_auxiliary(name)
        ]
        if all(name.rpartition(".")[2].isdigit() for name in names):
            is_copy = _are_in_order([shapes[name] for name in names], [shapes[o] for o in others])
        else:
            joined = {
                "".join(other.split(".")[at:])
                for other in others
                for at in range(min(_MAX_PREFIX_WORDS, other.count(".")))
            }
            ends = [name[len(prefix) :] for name in names]
            is_copy = 2 * sum(end in joined for end in ends) > len(ends)
        if is_copy and others:
            result[prefix] = names
    if result and not sets:
        taken = {name for names in result.values() for name in names}
        rest = [name for name in shapes if name not in taken and not is_auxiliary(name)]
        # There is no second set to compare with, so `model.` may be the architecture's own prefix.
        fronts = {name.partition(".")[0] for name in rest}
        is_container = len(fronts) == 1 and (
            "model" not in fronts or any(name.startswith("model.model.") for name in rest)
        )
        result[f"{fronts.pop()}." if is_container else ""] = rest
    return result


def _are_in_order(shapes: list[tuple[int, ...]], others: list[tuple[int, ...]]) -> bool:
    """Return whether two or more shapes are a subsequence of others."""
    rest = iter(others)
    return len(shapes) > 1 and all(shape in rest for shape in shapes)
