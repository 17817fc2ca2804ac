"""Pictures and reports of layouts and movements.

text_picture    `picture` and `change_picture`, in box-drawing characters; start here
device_picture  `mesh_picture`: the elements of each device, drawn as the devices are in the mesh
svg_picture     layouts in colour, for pages
charts          traffic and memory, for pages
html_report     pages of HTML, each a file without scripts

The pictures draw the result of `regions`: `sketch` lays it out in characters, `labels` writes the
holders, and `svg` makes elements and colours. Sizes and tables as text come from `reshard.text`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard._lazy import attach

if TYPE_CHECKING:
    from reshard.show.charts import memory_chart
    from reshard.show.device_picture import element_texts, mesh_picture
    from reshard.show.html_report import (
        DrawnChange,
        Figure,
        change_html,
        figures_html,
        page_html,
        rank_legend,
        rank_table_html,
    )
    from reshard.show.svg import element, escaped, rank_colours
    from reshard.show.text_picture import change_picture, picture
    from reshard.text import bytes_text, count_text, duration_text, rate_text, table

__all__ = [
    "DrawnChange",
    "Figure",
    "bytes_text",
    "change_html",
    "change_picture",
    "count_text",
    "duration_text",
    "element",
    "element_texts",
    "escaped",
    "figures_html",
    "memory_chart",
    "mesh_picture",
    "page_html",
    "picture",
    "rank_colours",
    "rank_legend",
    "rank_table_html",
    "rate_text",
    "table",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "reshard.show.charts": ["memory_chart"],
        "reshard.show.device_picture": ["element_texts", "mesh_picture"],
        "reshard.show.html_report": [
            "change_html",
            "DrawnChange",
            "Figure",
            "figures_html",
            "page_html",
            "rank_legend",
            "rank_table_html",
        ],
        "reshard.show.svg": ["element", "escaped", "rank_colours"],
        "reshard.show.text_picture": ["change_picture", "picture"],
        "reshard.text": ["bytes_text", "count_text", "duration_text", "rate_text", "table"],
    },
)
