"""Lines and text on a grid of characters.

Lines are kept as strokes from the middle of a character to its four sides, so that crossings
and corners come out right however the lines meet.
"""

from __future__ import annotations

from reshard.text import display_width

# A character's strokes are the sum of these; the sum is its place in the alphabets below.
_UP, _DOWN, _LEFT, _RIGHT = 1, 2, 4, 8
_UNICODE = " ╵╷│╴┘┐┤╶└┌├─┴┬┼"
_ASCII = " ||||+++-+++-+++"


class Canvas:
    """A drawing of `width` x `height` characters; whatever is drawn must lie inside.

    >>> canvas = Canvas(7, 3)
    >>> for y in (0, 2):
    ...     canvas.horizontal(y, 0, 6)
    >>> for x in (0, 3, 6):
    ...     canvas.vertical(x, 0, 2)
    >>> canvas.write(1, 1, "a")
    >>> print("\\n".join(canvas.lines(ascii=True)))
    +--+--+
    |a |  |
    +--+--+
    """

    def __init__(self, width: int, height: int) -> None:
        self._strokes = [[0] * width for _ in range(height)]
        # A wide character takes two places, the second of which is empty.
        self._text = [[" "] * width for _ in range(height)]

    def horizontal(self, y: int, left: int, right: int) -> None:
        """A line from `left` to `right`, both included."""
        for x in range(left, right + 1):
            self._strokes[y][x] |= (_LEFT if x > left else 0) | (_RIGHT if x < right else 0)

    def vertical(self, x: int, top: int, bottom: int) -> None:
        """A line from `top` to `bottom`, both included."""
        for y in range(top, bottom + 1):
            self._strokes[y][x] |= (_UP if y > top else 0) | (_DOWN if y < bottom else 0)

    def write(self, y: int, x: int, text: str) -> None:
        """Text on one line, from column `x` on."""
        for character in text:
            columns = display_width(character)
            # A combining mark belongs to the character before it.
            if columns == 0:
                self._text[y][x - 1] += character
                continue
            self._text[y][x] = character
            for blank in range(x + 1, x + columns):
                self._text[y][blank] = ""
            x += columns

    def lines(self, ascii: bool = False) -> list[str]:
        """The drawing, top to bottom, every line of the same display width."""
        alphabet = _ASCII if ascii else _UNICODE
        return [
            "".join(alphabet[s] if s else t for s, t in zip(strokes, text, strict=True))
            for strokes, text in zip(self._strokes, self._text, strict=True)
        ]
