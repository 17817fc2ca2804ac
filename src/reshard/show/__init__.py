"""Looking at layouts, plans and sizes as text."""

from reshard.show.pictures.text_picture import change_picture, picture
from reshard.text.quantities import bytes_text, count_text, duration_text, rate_text, table

__all__ = [
    "bytes_text",
    "change_picture",
    "count_text",
    "duration_text",
    "picture",
    "rate_text",
    "table",
]
