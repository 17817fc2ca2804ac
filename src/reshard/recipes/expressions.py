"""Expressions and conditions over a model's config.json, and the braces of rules that hold them.

Expressions are integer arithmetic::

    num_attention_heads                                 a key
    vision_config.num_heads                             a key of a nested config
    intermediate_size[layer]                            the entry of a list for this layer
    per_layer_config[layer].head_dim                    a key of the config for this layer
    layer_types[]                                       the length of a list
    [layer]                                             the number of this layer
    head_dim * num_attention_heads                      + - * // % and parentheses
    head_dim | hidden_size // num_attention_heads       the first alternative that is defined

1. An alternative is defined if the config has all of its keys; null counts as absent. Keys
   that are missing in the config are looked up in its `text_config`, if it has one. A literal
   number is always defined; it is a default for configs that omit the key.
2. A list is indexed by `{layer}` or another number of a tensor's name, or by a literal. If the
   config has a single number instead of the list, it applies to every entry.

Conditions select rules::

    tie_word_embeddings                     true, a nonzero number, a nonempty text or list
    !attention_bias                         false, 0, empty, null or absent
    text_config.is_tied|is_tied             of the first key that is present
    model_type=gemma3_text                  a text, a number, `true` or `false`
    layer_types[layer]!=linear_attention    the entry of a list for this layer
    [layer]>=first_k_dense_replace          two expressions, compared by == <> < <= > >=
    [layer] in mlp_only_layers              whether a list has a number; `not in` negates
    num_experts & !is_dense                 all of several

An absent key equals no value, so `key!=value` holds for it. Expressions that lack a key equal each
other, and are neither smaller nor larger than any number. An absent list has no number.

A rule's spec has expressions in braces, which are replaced by their values::

    tp@heads{num_key_value_heads|num_attention_heads}, -    ->    tp@heads8, -

A recipe may also define cut rules by name, `tp@{vocabulary}` or `tp@{heads.query}`, whose text
replaces the braces first.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from reshard.errors import RecipeError

Config = Mapping[str, object]
Numbers = Mapping[str, int]

NO_NUMBERS: Numbers = {}
BRACES = re.compile(r"\{([^{}]*)\}")
_REMEDY = "put the model's config.json next to the checkpoint, or write the number in the rule"
_WORD = r"[A-Za-z_]\w*"
_PATH = rf"{_WORD}(?:\.{_WORD})*"
# Texts, which `re` compiles when a rule has an expression, and caches.
_KEY = rf"({_PATH})(?:\[\s*({_WORD}|\d+|)\s*\](?:\.({_PATH}))?)?"
_NUMBER = rf"\[\s*({_WORD})\s*\]"
_TERM = r"(!?)([^=!]+?)\s*(?:(!?=)\s*([^=]+))?"
_COMPARISON = r"([^=!<>]+?)\s*(==|<>|<=?|>=?|\bnot in\b|\bin\b)\s*([^=!<>]+)"
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


class Key(NamedTuple):
    """A key of a config: the path to it, an entry of its list, and the path in that.

    The entry is the name of a number in tensors' names, a literal, or None; an empty text asks for
    the number of entries. Without a path, the key is that number itself.
    """

    path: tuple[str, ...]
    entry: str | int | None = None
    rest: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Key | None:
        """Return the key that `text` writes, or None if it is not a key.

        >>> Key.parse("text_config.layer_types[layer]")
        Key(path=('text_config', 'layer_types'), entry='layer', rest=())
        """
        number = re.fullmatch(_NUMBER, text.strip())
        if number is not None:
            return cls((), number[1])
        match = re.fullmatch(_KEY, text.strip())
        if match is None:
            return None
        index = int(match[2]) if match[2] and match[2].isdigit() else match[2]
        return cls(
            tuple(match[1].split(".")), index, tuple(match[3].split(".")) if match[3] else ()
        )

    def find(self, config: Config | None, numbers: Numbers = NO_NUMBERS) -> object:
        """Return the value of the key in a config, or None if it is absent or null.

        In a config of several models, `text_config` has the keys of the language model.

        >>> Key.parse("num_layers").find({"text_config": {"num_layers": 4}})
        4
        """
        if not self.path:
            return self._find_index(numbers)
        value = _follow(config, self.path)
        if value is None:
            value = _follow(config, ("text_config", *self.path))
        if self.entry == "":
            return len(value) if isinstance(value, list | tuple | str) else None
        # A number instead of a list applies to every entry.
        if self.entry is None or not isinstance(value, list | tuple | str | Mapping):
            return _follow(value, self.rest)
        at = self._find_index(numbers)
        if isinstance(value, Mapping):
            # JSON keys are strings.
            return _follow(value.get(str(at)), self.rest)
        return _follow(value[at], self.rest) if at < len(value) else None

    def _find_index(self, numbers: Numbers) -> int:
        if isinstance(self.entry, int):
            return self.entry
        if self.entry is None or self.entry not in numbers:
            raise RecipeError(
                f"`{self}` is the entry for {{{self.entry}}}, and the name has no such number; "
                "write the number into the rule's pattern"
            )
        return numbers[self.entry]

    def __str__(self) -> str:
        index = "" if self.entry is None else f"[{self.entry}]"
        return ".".join(self.path) + index + "".join(f".{word}" for word in self.rest)


def _follow(value: object, path: tuple[str, ...]) -> object:
    for word in path:
        value = value.get(word) if isinstance(value, Mapping) else None
    return value


def _find_index_names(keys: Iterator[Key]) -> frozenset[str]:
    return frozenset(key.entry for key in keys if key.entry and isinstance(key.entry, str))


class Expression(NamedTuple):
    """A parsed expression; see `parse_expression`.

    Attributes:
        text: as written.
        alternatives: the parsed alternatives: a number, a key, an expression in parentheses, or a
            tuple of an operator and its two operands.
        texts: of the alternatives.
    """

    text: str
    alternatives: tuple[Any, ...]
    texts: tuple[str, ...]

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys of all alternatives, in order."""
        return tuple(_find_keys(self))

    @property
    def index_names(self) -> frozenset[str]:
        """The numbers of names that index its lists."""
        return _find_index_names(_find_keys(self))

    def value(self, config: Config | None, numbers: Numbers = NO_NUMBERS) -> int:
        """Return the value for a config and the numbers of a name.

        Raises:
            RecipeError: no alternative has all of its keys, a value that is not an integer, a
                division by 0, or a result below 0.

        >>> parse_expression("head_dim | hidden // heads").value({"hidden": 64, "heads": 4})
        16
        """
        alternatives = " or ".join(f"`{text}`" for text in self.texts)
        if config is None and self.keys:
            raise RecipeError(
                f"{alternatives} of the model's config is needed and there is none; {_REMEDY}"
            )
        result = _evaluate(self, config, numbers)
        if result is None:
            raise RecipeError(f"{alternatives} is not in the model's config; {_REMEDY}")
        if result < 0:
            raise _describe_not_a_count(self.text, result)
        return result

    def __str__(self) -> str:
        return self.text


@lru_cache(maxsize=4096)
def parse_expression(text: str) -> Expression:
    """Parse an expression.

    Raises:
        RecipeError: text that cannot be read.

    >>> [str(key) for key in parse_expression("(heads + 2 * groups) * head_dim").keys]
    ['heads', 'groups', 'head_dim']
    """
    # The syntax is Python's, but for the empty index.
    source = " ".join(text.replace("[]", "[...]").split())
    try:
        # As bytes: the column offsets of `ast` count bytes of UTF-8.
        node = _convert(ast.parse(source, mode="eval").body, source.encode())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise RecipeError(
            f"cannot read the expression {text!r}; write keys of the model's config.json and "
            "whole numbers with + - * // % and parentheses, `|` between alternatives"
        ) from None
    if isinstance(node, Expression):
        return node._replace(text=text.strip())
    return Expression(text.strip(), (node,), (text.strip(),))


def _convert(node: ast.expr, source: bytes) -> Any:
    """Return a Python expression as an alternative. Raises ValueError for other syntax."""
    written = source[node.col_offset : node.end_col_offset].decode().replace("[...]", "[]")
    if isinstance(node, ast.BinOp):
        left, right = _convert(node.left, source), _convert(node.right, source)
        if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)], left, right
        if isinstance(node.op, ast.BitOr):
            text = source[node.right.col_offset : node.right.end_col_offset].decode()
            # `a | b | c` is parsed from the left: the alternatives so far are on the left.
            if isinstance(left, Expression):
                return Expression(written, (*left.alternatives, right), (*left.texts, text))
            first = source[node.left.col_offset : node.left.end_col_offset].decode()
            return Expression(written, (left, right), (first, text))
    elif isinstance(node, ast.Constant) and written.isdigit():
        return int(written)
    elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.List):
        key = Key.parse(written)
        if key is not None:
            return key
    raise ValueError(written)


def _find_keys(node: Any) -> Iterator[Key]:
    if isinstance(node, Key):
        yield node
    elif isinstance(node, tuple):
        for part in node.alternatives if isinstance(node, Expression) else node[1:]:
            yield from _find_keys(part)


def _evaluate(node: Any, config: Config | None, numbers: Numbers) -> int | None:
    """Return the value of a node, or None if the config lacks a key of it."""
    if isinstance(node, int):
        return node
    if isinstance(node, Expression):
        values = (_evaluate(alternative, config, numbers) for alternative in node.alternatives)
        return next((value for value in values if value is not None), None)
    if isinstance(node, Key):
        value = node.find(config, numbers)
        if value is None:
            return None
        # True and False are integers to Python, but not counts.
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _describe_not_a_count(str(node), value)
        return value
    combine, *sides = node
    left, right = (_evaluate(side, config, numbers) for side in sides)
    if left is None or right is None:
        return None
    if combine in (operator.floordiv, operator.mod) and right == 0:
        raise RecipeError(
            f"an expression divides {left} by 0 in the model's config; correct config.json"
        )
    return int(combine(left, right))


def _describe_not_a_count(text: str, value: object) -> RecipeError:
    return RecipeError(
        f"`{text}` of the model's config is {value!r}, a whole number of at least 0 was "
        f"expected; {_REMEDY}"
    )


class Condition(NamedTuple):
    """A parsed condition; see `parse_condition`.

    A term is an operator and its operands: keys, `=` or `!=`, and a text, or None for the truth of
    the value; two expressions that are compared; or an expression, `in` or `not in`, and the keys
    of a list.
    """

    text: str
    terms: tuple[tuple[Expression, str, Expression | str | None], ...]

    @property
    def index_names(self) -> frozenset[str]:
        """The numbers of names that it depends on."""
        sides = (side for left, _, right in self.terms for side in (left, right))
        return _find_index_names(key for side in sides for key in _find_keys(side))

    def holds(self, config: Config | None, numbers: Numbers = NO_NUMBERS) -> bool:
        """Return whether it holds for a config and the numbers of a name.

        >>> full = parse_condition("layer_types[layer]=full & !is_dense")
        >>> [full.holds({"layer_types": ["full", "linear"]}, {"layer": i}) for i in (0, 1)]
        [True, False]
        """
        return all(_holds(*term, config, numbers) for term in self.terms)


def _holds(
    left: Expression,
    sign: str,
    right: Expression | str | None,
    config: Config | None,
    numbers: Numbers,
) -> bool:
    if sign in ("=", "!="):
        value = _find_first(left, config, numbers)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        is_met = bool(value) if right is None else value is not None and text == right
        return is_met is (sign == "=")
    number = _evaluate(left, config, numbers)
    if isinstance(right, Expression) and sign in ("in", "not in"):
        entries = _find_first(right, config, numbers)
        is_in = isinstance(entries, list | tuple) and number in entries
        return is_in is (sign == "in")
    other = _evaluate(right, config, numbers)
    if sign in ("==", "<>"):
        return (number == other) is (sign == "==")
    return number is not None and other is not None and _ORDERS[sign](number, other)


def _find_first(keys: Expression, config: Config | None, numbers: Numbers) -> object:
    """Return the value of the first key that a config has, or None if it has none."""
    values = (key.find(config, numbers) for key in keys.alternatives)
    return next((value for value in values if value is not None), None)


@lru_cache(maxsize=1024)
def parse_condition(text: str) -> Condition:
    """Parse a condition.

    Raises:
        RecipeError: text that cannot be read.
    """
    try:
        return Condition(text, tuple(_parse_term(word.strip()) for word in text.split("&")))
    except (RecipeError, ValueError):
        raise RecipeError(
            f"cannot read the condition {text!r}; write `key` of the model's config.json, `!key`, "
            "`key=value`, `key!=value`, or two expressions with == <> < <= > >= or `in` between "
            "them, several joined by ` & `"
        ) from None


def _parse_term(text: str) -> tuple[Expression, str, Expression | str | None]:
    """Parse a term of a condition. Raises ValueError or RecipeError for text that is none."""
    match = re.fullmatch(_COMPARISON, text)
    if match is not None:
        parse = _parse_keys if match[2].endswith("in") else parse_expression
        return parse_expression(match[1]), match[2], parse(match[3])
    match = re.fullmatch(_TERM, text)
    if match is None or (match[1] and match[3]):
        raise ValueError(text)
    value = match[4].strip() if match[4] else None
    return _parse_keys(match[2]), "!=" if match[1] else match[3] or "=", value


def _parse_keys(text: str) -> Expression:
    """Parse alternatives that are all keys, whose values may be of any type."""
    texts = tuple(text.split("|"))
    keys = tuple(key for part in texts if (key := Key.parse(part)) is not None)
    if len(keys) < len(texts):
        raise ValueError(text)
    return Expression(text, keys, texts)


def find_expressions(spec: str) -> tuple[Expression, ...]:
    """Return the expressions in the braces of a spec, in order.

    Raises:
        RecipeError: braces that do not pair, or do not hold an expression.

    >>> [str(found) for found in find_expressions("tp@heads{key_value_heads|attention_heads}, -")]
    ['key_value_heads|attention_heads']
    """
    expressions = []
    for braces in BRACES.finditer(spec):
        try:
            expressions.append(parse_expression(braces[1]))
        except RecipeError as error:
            raise _describe_unreadable_braces(spec, braces[0]) from error
    unpaired = re.search(r"[{}]", BRACES.sub("", spec))
    if unpaired:
        raise _describe_unreadable_braces(spec, unpaired[0])
    return tuple(expressions)


def _describe_unreadable_braces(spec: str, braces: str) -> RecipeError:
    return RecipeError(
        f"cannot read {braces!r} in the spec `{spec}`; write a key of the model's config.json in "
        "braces, such as {num_attention_heads}, or numbers and keys with + - * // and parentheses, "
        "with `|` between alternatives"
    )


def fill_in(spec: str, config: Config | None, numbers: Numbers = NO_NUMBERS) -> str:
    """Replace the expressions of a spec by their values.

    Args:
        spec: with braces.
        config: of the model.
        numbers: of a tensor's name, for lists with an entry per layer.

    Raises:
        RecipeError: an expression that the config does not define, or that is not an integer.

    >>> fill_in("tp@heads{num_key_value_heads|num_attention_heads}", {"num_attention_heads": 12})
    'tp@heads12'
    """
    texts = iter([str(expression.value(config, numbers)) for expression in find_expressions(spec)])
    return BRACES.sub(lambda braces: next(texts), spec)


def expand(spec: str, words: Mapping[str, str]) -> str:
    """Replace braces that hold just a name by the text of that name, which may have braces too.

    >>> expand("tp@{vocabulary}, x@{heads.query}", {"heads.query": "heads{heads}"})
    'tp@{vocabulary}, x@heads{heads}'
    """
    return BRACES.sub(lambda braces: words.get(braces[1].strip(), braces[0]), spec)
