"""Expressions: arithmetic over the numbers of a model's config.json.

::

    num_attention_heads                                 a key
    vision_config.num_heads                             a key of a nested config
    intermediate_size[layer]                            the entry of a list for this layer
    per_layer_config[layer].head_dim                    a key of the config for this layer
    layer_types[]                                       the length of a list
    head_dim * num_attention_heads                      + - * // and parentheses
    head_dim | hidden_size // num_attention_heads       the first alternative that is defined

1. An alternative is defined if the config has all of its keys; null counts as absent. Keys
   that are missing in the config are looked up in its `text_config`, if it has one. A literal
   number is always defined; it is a default for configs that omit the key.
2. A list is indexed by `{layer}` or another number of a tensor's name, or by a literal. If the
   config has a single number instead of the list, it applies to every entry.
3. Numbers are integers; `//` rounds down.

Conditions: when a rule counts, by a model's config.json.

::

    tie_word_embeddings                     true, a number but 0, a text or list that is not empty
    !attention_bias                         false, 0, empty, null or absent
    text_config.is_tied|is_tied             of the first key that is there
    model_type=gemma3_text                  a text, a number, `true` or `false`
    layer_types[layer]!=linear_attention    the entry of a list for this layer
    num_experts & !is_dense                 all of several

A key that is absent equals no value, so `key!=value` holds for it.

Variables: the numbers of a model's config that replace braces in a rule's spec.

A cut rule often depends on a number of the model, such as that of its key/value heads. A spec
refers to it by its name in the model's config.json, in an expression::

    tp@heads{num_key_value_heads|num_attention_heads}, -
            1. evaluate the expression (`reshard.recipes.expressions`)
            2. replace the braces by its value
    tp@heads8, -

A recipe may also define cut rules by name, `tp@{vocabulary}` or `tp@{heads.query}`, whose text
replaces the braces first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from reshard.errors import RecipeError

Config = Mapping[str, object]
Numbers = Mapping[str, int]

NO_NUMBERS: Numbers = {}
REMEDY = "put the model's config.json beside the checkpoint, or write the number in the rule"
_WORD = r"[A-Za-z_]\w*"
_PATH = rf"{_WORD}(?:\.{_WORD})*"
_KEY = re.compile(rf"({_PATH})(?:\[\s*({_WORD}|\d+|)\s*\](?:\.({_PATH}))?)?")
_TOKEN = re.compile(rf"\s*(?:(?P<key>{_KEY.pattern})|(?P<number>\d+)|(?P<sign>//|[-+*|()]))\s*")


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a config, with the keys of the configs around it, and the index of an entry.

    The index is the name of a number in tensors' names, or a number, or None; an empty one asks how
    many entries there are. `rest` are the keys inside of the entry.
    """

    path: tuple[str, ...]
    index: str | int | None = None
    rest: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Key | None:
        """The key that a text is, or None.

        >>> Key.parse("text_config.layer_types[layer]")
        Key(path=('text_config', 'layer_types'), index='layer', rest=())
        """
        match = _KEY.fullmatch(text.strip())
        if match is None:
            return None
        index = int(match[2]) if match[2] and match[2].isdigit() else match[2]
        return cls(
            tuple(match[1].split(".")), index, tuple(match[3].split(".")) if match[3] else ()
        )

    def find(self, config: Config | None, numbers: Numbers = NO_NUMBERS) -> object:
        """What a config has under the key; None where it has nothing, or null.

        A config with several models inside has the language model's keys in `text_config`, where
        they are looked for if it has not got them itself.

        >>> Key.parse("num_layers").find({"text_config": {"num_layers": 4}})
        4
        """
        value = _follow(config, self.path)
        if value is None:
            value = _follow(config, ("text_config", *self.path))
        if self.index == "":
            return len(value) if isinstance(value, list | tuple | str) else None
        if self.index is None or not isinstance(value, list | tuple | str | Mapping):
            return _follow(value, self.rest)
        if isinstance(self.index, str) and self.index not in numbers:
            raise RecipeError(
                f"`{self}` asks for the entry of {{{self.index}}}, and no such number is in the "
                "name; write the number into the rule's pattern"
            )
        at = numbers[self.index] if isinstance(self.index, str) else self.index
        if isinstance(value, Mapping):
            # The keys of JSON are texts.
            return _follow(value.get(str(at)), self.rest)
        return _follow(value[at], self.rest) if at < len(value) else None

    def __str__(self) -> str:
        index = "" if self.index is None else f"[{self.index}]"
        return ".".join(self.path) + index + "".join(f".{word}" for word in self.rest)


def _follow(value: object, path: tuple[str, ...]) -> object:
    for word in path:
        value = value.get(word) if isinstance(value, Mapping) else None
    return value


@dataclass(frozen=True, slots=True)
class _Operation:
    sign: str
    left: _Node
    right: _Node


@dataclass(frozen=True, slots=True)
class _Choice:
    """Alternatives, each with its text."""

    alternatives: tuple[tuple[str, _Node], ...]


_Node = int | Key | _Operation | _Choice


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression that was read; `parse_expression` makes it.

    `index_names` are the numbers of names that its lists are asked by.
    """

    text: str
    root: _Node

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys of all alternatives, in order."""
        return tuple(_find_keys(self.root))

    @property
    def index_names(self) -> frozenset[str]:
        """The numbers of names by which lists are asked."""
        return frozenset(key.index for key in self.keys if key.index and isinstance(key.index, str))

    def value(self, config: Config | None, numbers: Numbers = NO_NUMBERS) -> int:
        """The number that it is for a config and the numbers of a name.

        Raises:
            RecipeError: no alternative whose keys are all there, what is no whole number, a
                division by 0, or a result below 0.

        >>> parse_expression("head_dim | hidden // heads").value({"hidden": 64, "heads": 4})
        16
        """
        wanted = " or ".join(f"`{text}`" for text, _ in _list_alternatives(self))
        if config is None and self.keys:
            raise RecipeError(
                f"{wanted} of the model's config is needed and there is none; {REMEDY}"
            )
        if not _can_say(self.root, config, numbers):
            raise RecipeError(f"{wanted} is not in the model's config; {REMEDY}")
        found = _evaluate(self.root, config, numbers)
        if found < 0:
            raise RecipeError(
                f"`{self.text}` of the model's config is {found}, a whole number of at least 0 was "
                f"expected; {REMEDY}"
            )
        return found

    def __str__(self) -> str:
        return self.text


@lru_cache(maxsize=4096)
def parse_expression(text: str) -> Expression:
    """The expression that a text writes.

    Raises:
        RecipeError: text that cannot be read.

    >>> [str(key) for key in parse_expression("(heads + 2 * groups) * head_dim").keys]
    ['heads', 'groups', 'head_dim']
    """
    root = _ExpressionReader(text).read()
    return Expression(text.strip(), root)


class _ExpressionReader:
    """Reads one expression, from the loosest sign to the tightest."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, int]] = []
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self.make_error()
            self.tokens.append((match[0].strip(), match.start()))
            at = match.end()
        # The end is a token too: empty.
        self.tokens.append(("", len(text)))
        self.at = 0

    def make_error(self) -> RecipeError:
        return RecipeError(
            f"cannot read the expression {self.text!r}; write keys of the model's config.json and "
            "whole numbers with + - * // and parentheses, `|` between alternatives"
        )

    @property
    def next(self) -> str:
        return self.tokens[self.at][0]

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1][0]

    def read(self) -> _Node:
        root = self.read_choice()
        if self.next:
            raise self.make_error()
        return root

    def read_choice(self) -> _Node:
        alternatives = [self.read_alternative()]
        while self.next == "|":
            self.take()
            alternatives.append(self.read_alternative())
        return alternatives[0][1] if len(alternatives) == 1 else _Choice(tuple(alternatives))

    def read_alternative(self) -> tuple[str, _Node]:
        begin = self.tokens[self.at][1]
        node = self.read_sum()
        return self.text[begin : self.tokens[self.at][1]].strip(), node

    def read_sum(self) -> _Node:
        node = self.read_product()
        while self.next in ("+", "-"):
            node = _Operation(self.take(), node, self.read_product())
        return node

    def read_product(self) -> _Node:
        node = self.read_atom()
        while self.next in ("*", "//"):
            node = _Operation(self.take(), node, self.read_atom())
        return node

    def read_atom(self) -> _Node:
        token = self.take()
        if token == "(":
            node = self.read_choice()
            if self.take() != ")":
                raise self.make_error()
            return node
        if token.isdigit():
            return int(token)
        key = Key.parse(token)
        if key is None:
            raise self.make_error()
        return key


def _list_alternatives(expression: Expression) -> tuple[tuple[str, _Node], ...]:
    root = expression.root
    return root.alternatives if isinstance(root, _Choice) else ((expression.text, root),)


def _find_keys(node: _Node) -> Iterator[Key]:
    if isinstance(node, Key):
        yield node
    elif isinstance(node, _Operation):
        yield from _find_keys(node.left)
        yield from _find_keys(node.right)
    elif isinstance(node, _Choice):
        for _, alternative in node.alternatives:
            yield from _find_keys(alternative)


def _can_say(node: _Node, config: Config | None, numbers: Numbers) -> bool:
    """Whether the config has what is needed."""
    if isinstance(node, Key):
        return node.find(config, numbers) is not None
    if isinstance(node, _Operation):
        return all(_can_say(side, config, numbers) for side in (node.left, node.right))
    if isinstance(node, _Choice):
        return any(_can_say(alternative, config, numbers) for _, alternative in node.alternatives)
    return True


def _evaluate(node: _Node, config: Config | None, numbers: Numbers) -> int:
    """The number of what can be said."""
    if isinstance(node, int):
        return node
    if isinstance(node, Key):
        value = node.find(config, numbers)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise RecipeError(
                f"`{node}` of the model's config is {value!r}, a whole number of at least 0 was "
                f"expected; {REMEDY}"
            )
        return value
    if isinstance(node, _Choice):
        chosen = next(one for _, one in node.alternatives if _can_say(one, config, numbers))
        return _evaluate(chosen, config, numbers)
    left, right = (_evaluate(side, config, numbers) for side in (node.left, node.right))
    if node.sign == "//" and right == 0:
        raise RecipeError(
            f"an expression divides {left} by 0 in the model's config; correct config.json"
        )
    if node.sign == "+":
        return left + right
    if node.sign == "-":
        return left - right
    return left * right if node.sign == "*" else left // right


_TERM = re.compile(r"(!?)([^=!]+?)\s*(?:(!?=)\s*([^=]+))?")


@dataclass(frozen=True, slots=True)
class _Term:
    """One condition: a key, and the value that it is compared with, if any."""

    keys: tuple[Key, ...]
    is_negated: bool
    value: str | None

    def holds(self, config: Config | None, numbers: Numbers) -> bool:
        values = (key.find(config, numbers) for key in self.keys)
        found = next((value for value in values if value is not None), None)
        is_so = bool(found) if self.value is None else _text_of(found) == self.value
        return is_so is not self.is_negated


def _text_of(value: object) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that was read; `parse_condition` makes it."""

    text: str
    terms: tuple[_Term, ...]

    @property
    def index_names(self) -> frozenset[str]:
        """The numbers of names by which lists are asked."""
        keys = [key for term in self.terms for key in term.keys]
        return frozenset(key.index for key in keys if key.index and isinstance(key.index, str))

    def holds(self, config: Config | None, numbers: Numbers = NO_NUMBERS) -> bool:
        """Whether it holds for a config and the numbers of a name.

        >>> full = parse_condition("layer_types[layer]=full & !is_dense")
        >>> [full.holds({"layer_types": ["full", "linear"]}, {"layer": i}) for i in (0, 1)]
        [True, False]
        """
        return all(term.holds(config, numbers) for term in self.terms)


@lru_cache(maxsize=1024)
def parse_condition(text: str) -> Condition:
    """The condition that a text writes.

    Raises:
        RecipeError: text that cannot be read.
    """
    terms = []
    for word in text.split("&"):
        match = _TERM.fullmatch(word.strip())
        keys = [Key.parse(one) for one in match[2].split("|")] if match else [None]
        known = tuple(key for key in keys if key is not None)
        if match is None or len(known) < len(keys) or (match[1] and match[3]):
            raise RecipeError(
                f"cannot read the condition {text!r}; write `key` of the model's config.json, "
                "`!key`, `key=value` or `key!=value`, several joined by ` & `"
            )
        value = match[4].strip() if match[4] else None
        terms.append(_Term(known, bool(match[1]) or match[3] == "!=", value))
    return Condition(text, tuple(terms))


_BRACES = re.compile(r"\{([^{}]*)\}")


def variables(spec: str) -> tuple[Expression, ...]:
    """The expressions of a spec's text, in order.

    Raises:
        RecipeError: braces that do not pair, or do not hold an expression.

    >>> [str(one) for one in variables("tp@heads{num_key_value_heads|num_attention_heads}, -")]
    ['num_key_value_heads|num_attention_heads']
    """
    found = []
    for braces in _BRACES.finditer(spec):
        try:
            found.append(parse_expression(braces[1]))
        except RecipeError as error:
            raise RecipeError(_describe_unreadable(spec, braces[0])) from error
    lone = re.search(r"[{}]", _BRACES.sub("", spec))
    if lone:
        raise RecipeError(_describe_unreadable(spec, lone[0]))
    return tuple(found)


def _describe_unreadable(spec: str, braces: str) -> str:
    return (
        f"cannot read {braces!r} in the spec `{spec}`; write a key of the model's config.json in "
        "braces, such as {num_attention_heads}, or numbers and keys with + - * // and parentheses, "
        "with `|` between alternatives"
    )


def fill_in(spec: str, config: Config | None, numbers: Numbers = NO_NUMBERS) -> str:
    """The spec's text with the numbers of `config` in place of its variables.

    Args:
        spec: with braces.
        config: of the model.
        numbers: of a tensor's name, for lists with an entry a layer.

    Raises:
        RecipeError: a variable that the config has not, or that is not a whole number.

    >>> fill_in("tp@heads{num_key_value_heads|num_attention_heads}", {"num_attention_heads": 12})
    'tp@heads12'
    """
    texts = iter([str(one.value(config, numbers)) for one in variables(spec)])
    return _BRACES.sub(lambda braces: next(texts), spec)


def expand(spec: str, words: Mapping[str, str]) -> str:
    """The spec's text with words in place of the braces that hold nothing but their names.

    The words may have braces of their own.

    >>> expand("tp@{vocabulary}, x@{heads.query}", {"heads.query": "heads{heads}"})
    'tp@{vocabulary}, x@heads{heads}'
    """
    return _BRACES.sub(lambda braces: words.get(braces[1].strip(), braces[0]), spec)
