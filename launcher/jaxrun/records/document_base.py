"""The base of all documents that commands print with --json, and of job.json."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

FORMAT = 1  # changes when a field of any document loses its meaning; fields may be added at any time


class Document(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What all documents have."""

    format: Literal[1] = 1
