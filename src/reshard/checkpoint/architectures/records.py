"""Records of the tensors of public model classes, and comparisons with them.

`tests/engines/architectures` writes a file for each model type from transformers:

    {"transformers": version, "prefix": of the base model, "defaults": {key: value},
     "types": {key of a nested config: its model type},
     "rows": [[pattern, counts, shape, when], ...],
     "classes": {name: {"forms": [[row, ...], ...], "ties": [[name, name], ...],
                        "ignored": [expression, ...]}}}

A row is a pattern of names: `*` is a number, from 0 up to a count, and `when` is a list of terms
that all hold if there are such tensors;
`{"unless": [...]}` are terms that do not all hold. `?` is an open length, or a tensor that is
optional; a form with such rows is not exact. A class has a form for the names in the files that it
saves, and another form for the names in its module if they differ.

Counts, lengths and terms are expressions and conditions of `reshard.recipes.expressions`; the first
number of a name is `[n]`, as in `[n]>=first_k_dense_replace` or `layer_types[n]=full_attention`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

from reshard._records import Record
from reshard.errors import RecipeError
from reshard.recipes.expressions import parse_condition, parse_expression

OPEN = "?"
_WORD = re.compile(r"[\w-]+")
# A size missing from config.json leaves a length open: transformers itself refuses a wrong length.
_SIZES = re.compile(r"(^|[_.])(size|dim|d_ff|d_model|n_embd|ffn_dim)$")
# The classes that load files of a model type if config.json does not name a class.
_USUAL = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "Model")


def find_recorded_differences(
    config: Mapping[str, Any], shapes: Mapping[str, Shape], *, any_class: bool = False
) -> tuple[TensorDifferences, bool] | None:
    """Compare tensors with the tensors recorded for the class of a config.json.

    Args:
        config: the content of config.json.
        shapes: the shapes of the tensors, by their names in the files.
        any_class: whether to compare with the class of the model type that fits best.

    Returns:
        The differences, and whether the record is exact, without open rows; None if there is no
        record of the class.
    """
    record = _read_record(config.get("model_type"))
    if record is None:
        return None
    full = _with_defaults(config, record)
    chosen = _choose_class(config, record)
    if chosen is None or any(_find(full, key) != kind for key, kind in record["types"].items()):
        return None
    prefix = f"{record['prefix']}."
    names = [chosen]
    if any_class:
        names += [name for name in record["classes"] if name != chosen]
    # Compare with the form that has the fewest differences.
    name, best = min(
        (
            (name, _expect(record, form, full, prefix, shapes))
            for name in names
            for form in record["classes"][name]["forms"]
        ),
        key=lambda pair: (
            len(pair[1].missing)
            + len(pair[1].unknown)
            + any_class * pair[1].count_misshapen(shapes)
        ),
    )
    return _compare(record, name, best, prefix, shapes), best.is_exact


@lru_cache(maxsize=8)
def _read_record(model_type: object) -> Mapping[str, Any] | None:
    # The type becomes a part of a path, so it must not contain other characters.
    if not isinstance(model_type, str) or not _WORD.fullmatch(model_type):
        return None
    file = files("reshard.checkpoint.architectures") / "recorded" / f"{model_type}.json"
    try:
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return result


def _choose_class(config: Mapping[str, Any], record: Mapping[str, Any]) -> str | None:
    """Return the recorded class that a config names, or None if it names others."""
    named = config.get("architectures")
    if isinstance(named, list) and named:
        return next((name for name in named if name in record["classes"]), None)
    classes = record["classes"]
    return next((name for end in _USUAL for name in classes if name.endswith(end)), None)


def _with_defaults(config: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the class's defaults for missing keys."""
    full: dict[str, Any] = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()
    }
    labels = config.get("id2label")
    if isinstance(labels, Mapping):
        full["num_labels"] = len(labels)
    for path, value in record["defaults"].items():
        if _SIZES.search(path):
            continue
        *parents, key = path.split(".")
        part = full
        for parent in parents:
            inner = part.get(parent)
            if not isinstance(inner, dict):
                inner = part[parent] = {}
            part = inner
        part.setdefault(key, value)
    return full


def _find(config: Mapping[str, Any], path: str) -> object:
    result: Any = config
    for key in path.split("."):
        result = result.get(key) if isinstance(result, Mapping) else None
    return result


class _Expected(NamedTuple):
    """The tensors of a form for a config, and the given tensors by the form's names.

    Attributes:
        tensors: the shape of each tensor by name, with None for an open length.
        optional: patterns of the names of optional tensors.
        rows: the numbers of the form's rows.
        given: the name of each tensor in the files, by its name in the form.
        is_exact: whether no row is open.
    """

    tensors: Mapping[str, tuple[int | None, ...]]
    optional: tuple[re.Pattern[str], ...]
    rows: frozenset[int]
    given: Mapping[str, str]
    is_exact: bool

    @property
    def missing(self) -> list[str]:
        return [tensor for tensor in self.tensors if tensor not in self.given]

    @property
    def unknown(self) -> list[str]:
        left = [value for value in self.given if value not in self.tensors]
        return [item for item in left if not any(p.fullmatch(item) for p in self.optional)]

    def count_misshapen(self, shapes: Mapping[str, Shape]) -> int:
        """Count the tensors that are there in another shape."""
        expected = (
            (self.tensors.get(value), shapes[called]) for value, called in self.given.items()
        )
        return sum(
            recorded is not None and not _fits(actual, recorded) for recorded, actual in expected
        )


def _expect(
    record: Mapping[str, Any],
    form: Iterable[int],
    config: Mapping[str, Any],
    prefix: str,
    shapes: Mapping[str, Shape],
) -> _Expected:
    """Return the tensors of a form for a config."""
    tensors: dict[str, tuple[int | None, ...]] = {}
    optional = []
    rows = frozenset(form)
    for row in (record["rows"][number] for number in sorted(rows)):
        row_tensors = list_row(row, config)
        if row_tensors is None:
            optional.append(_compile(row[0]))
        else:
            tensors.update(row_tensors)
    stored = {called: called for called in shapes if called in tensors}
    for called in shapes:
        if called not in stored:
            name = _with_prefix(called, prefix, tensors)
            # If two names stand for the same tensor, the second is reported as unknown.
            stored[called if name in stored else name] = called
    is_exact = all(is_closed(record["rows"][number]) for number in rows)
    return _Expected(tensors, tuple(optional), rows, stored, is_exact)


def _compare(
    record: Mapping[str, Any],
    name: str,
    expected: _Expected,
    prefix: str,
    shapes: Mapping[str, Shape],
) -> TensorDifferences:
    """Compare tensors with the tensors of a form of a class."""
    own = record["classes"][name]
    tensors, stored = expected.tensors, expected.given
    missing, unknown = expected.missing, expected.unknown
    if missing or unknown:
        ties = [tuple(map(_compile, pair)) for pair in own["ties"]]
        # If the form has the first tensor of a pair, the config does not tie it: it must be stored.
        tied = [pair for pair in ties if not any(map(pair[0].fullmatch, tensors))]
        missing = [name for name in missing if not _is_tied(name, stored, tied)]
        patterns = [*itertools.chain.from_iterable(ties)]
        unknown = [name for name in unknown if not any(p.fullmatch(name) for p in patterns)]
    others = _list_other_patterns(record, expected.rows, prefix) if unknown else []
    ignores = [re.compile(expression) for expression in own["ignored"]]

    def is_ignored(name: str) -> bool:
        """Return whether the class ignores a tensor, or another class of the model type has it."""
        if any(expression.search(name) for expression in ignores):
            return True
        names = {name, stored[name], prefix + name, name.removeprefix(prefix)}
        return any(pattern.fullmatch(called) for pattern in others for called in names)

    ignored = {name for name in unknown if is_ignored(name)}
    return TensorDifferences(
        f"the record of {name} of transformers {record['transformers']}",
        tuple(sorted((name, _closed(tensors[name])) for name in missing)),
        tuple(sorted(stored[name] for name in unknown if name not in ignored)),
        tuple(
            sorted(
                (called, tuple(shapes[called]), tuple(n or 0 for n in tensors[value]))
                for value, called in stored.items()
                if value in tensors and not _fits(shapes[called], tensors[value])
            )
        ),
        tuple(sorted(stored[item] for item in ignored)),
    )


def list_row(
    row: tuple[str, list[str], Any, Any], config: Mapping[str, Any]
) -> dict[str, tuple[int | None, ...]] | None:
    """Return the tensors of a row for a config, by name; None if the row leaves them open."""
    pattern, counts, shape, when = row
    sizes = [find_number(count, config) if count != OPEN else None for count in counts]
    if when == OPEN or shape == OPEN or None in sizes:
        return None
    lengths = tuple(None if length == OPEN else find_number(length, config) for length in shape)
    terms, is_negated = (when["unless"], True) if isinstance(when, Mapping) else (when, False)
    is_numbered = any(parse_condition(term).index_names for term in terms)
    tensors, parts = {}, pattern.split("*")
    # Terms depend on the first number of a name only, so they are evaluated once for each.
    there: dict[tuple[int, ...], bool] = {}
    for numbers in itertools.product(*(range(size or 0) for size in sizes)):
        first = numbers[:1] if is_numbered else ()
        if first not in there:
            there[first] = all(holds(term, config, first) for term in terms) is not is_negated
        if there[first]:
            name = parts[0]
            for number, rest in zip(numbers, parts[1:], strict=True):
                name += f"{number}{rest}"
            tensors[name] = lengths
    return tensors


def is_closed(row: tuple[str, list[str], Any, Any]) -> bool:
    """Return whether a row has neither open lengths nor optional tensors."""
    _, counts, shape, when = row
    return OPEN not in (*counts, *shape) and when != OPEN


@lru_cache(maxsize=4096)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(r"\d+".join(map(re.escape, pattern.split("*"))))


def _with_prefix(name: str, prefix: str, expected: Mapping[str, Any]) -> str:
    """Return a name as expected, with the base model's prefix added or taken off where needed."""
    if name in expected or prefix == ".":
        return name
    if prefix + name in expected:
        return prefix + name
    bare = name.removeprefix(prefix)
    return bare if bare in expected else name


def _is_tied(
    name: str, stored: Mapping[str, str], ties: Iterable[tuple[re.Pattern[str], ...]]
) -> bool:
    """Return whether a tensor is stored under another name, to which it is tied."""
    for pair in ties:
        if any(value.fullmatch(name) for value in pair):
            return any(value.fullmatch(other) for value in pair for other in stored)
    return False


def _list_other_patterns(
    record: Mapping[str, Any], ours: frozenset[int], prefix: str
) -> list[re.Pattern[str]]:
    """Return the patterns of tensors that another class has and this class does not."""
    bare = {record["rows"][number][0].removeprefix(prefix) for number in ours}
    patterns = {
        row[0]
        for number, row in enumerate(record["rows"])
        if number not in ours and row[0].removeprefix(prefix) not in bare
    }
    return [_compile(pattern) for pattern in sorted(patterns)]


def _fits(shape: Shape, expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(
        expected_length is None or length == expected_length
        for length, expected_length in zip(shape, expected, strict=True)
    )


def _closed(shape: tuple[int | None, ...]) -> Shape | None:
    return None if None in shape else tuple(length or 0 for length in shape)


Config = Mapping[str, Any]


def find_number(text: str, config: Config) -> int | None:
    """Return the value of an expression; None if the config does not have its keys.

    >>> find_number("head_dim|hidden_size//heads", {"hidden_size": 64, "heads": 4})
    16
    """
    try:
        return parse_expression(text).value(config)
    except RecipeError:
        return None


def holds(term: str, config: Config, numbers: Sequence[int] = ()) -> bool:
    """Return whether a term holds for a config and the numbers of a name.

    A term that cannot be evaluated, such as a remainder by 0, does not hold.

    >>> config = {"layer_types": ["full", "linear"], "first": 1}
    >>> [holds("layer_types[n]=full", config, (n,)) for n in (0, 1)]
    [True, False]
    >>> [holds("[n]>=first", config, (n,)) for n in (0, 1)]
    [False, True]
    """
    try:
        return parse_condition(term).holds(config, {"n": numbers[0]} if numbers else {})
    except RecipeError:
        return False


Shape = tuple[int, ...]


class TensorDifferences(Record):
    """The differences between the tensors of a checkpoint and those loaded by a model class.

    Attributes:
        judge: the class and the program, such as `LlamaForCausalLM of transformers 5.24.0`.
        missing: tensors that the class has and the checkpoint lacks, with their shapes; None for a
            shape that depends on others.
        unknown: tensors of the checkpoint that the class does not load.
        misshapen: tensors of another shape: the name, the shape, and the shape of the class.
        ignored: tensors that the class leaves out by its own lists, or that another class of the
            same model type has.
    """

    judge: str
    missing: tuple[tuple[str, Shape | None], ...] = ()
    unknown: tuple[str, ...] = ()
    misshapen: tuple[tuple[str, Shape, Shape], ...] = ()
    ignored: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.unknown or self.misshapen)
