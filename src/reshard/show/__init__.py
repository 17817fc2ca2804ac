"""Layouts, and what moves between them, for people to look at.

pictures/  drawings of text and SVG: `picture`, `change_picture`, `mesh_picture`; start here
pages/     HTML reports, each one file without scripts

Sizes and tables as text come from `reshard.text`.
"""

from reshard.show.pictures.mesh_picture import element_texts, mesh_picture
from reshard.show.pictures.text_picture import change_picture, picture
from reshard.text import bytes_text, count_text, duration_text, rate_text, table

__all__ = [
    "bytes_text",
    "change_picture",
    "count_text",
    "duration_text",
    "element_texts",
    "mesh_picture",
    "picture",
    "rate_text",
    "table",
]
