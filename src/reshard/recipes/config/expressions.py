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
