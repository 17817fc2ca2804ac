"""Quantities and sets of ranks as text, for everybody who writes messages, tables or pages.

quantities    sizes, rates, counts, durations, and tables of them; start here
short_tables  ranks and files as tables that fit on a screen, however many they are
rank_sets     sets of ranks: `0-3,8`
width         columns that a text takes on a terminal
markup        elements of HTML and SVG, and text that is safe in them
"""

from reshard.text.quantities import bytes_text, count_text, duration_text, rate_text, table
from reshard.text.rank_sets import rank_text

__all__ = [
    "bytes_text",
    "count_text",
    "duration_text",
    "rank_text",
    "rate_text",
    "table",
]
