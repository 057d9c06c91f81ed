"""What the ranks of a gang return for a notebook's cell."""

from __future__ import annotations

from typing import NamedTuple


class CellOutput(NamedTuple):
    """Displays, each with its content by MIME type; what is no text is in base64.

    result:    of the cell's last expression; empty if there is none, or it is None
    displays:  what the cell has shown besides, such as figures, in order
    """

    result: dict[str, str] = {}  # noqa: RUF012
    displays: tuple[dict[str, str], ...] = ()
