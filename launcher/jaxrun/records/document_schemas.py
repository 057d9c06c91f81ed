"""`python -m jaxrun.records.document_schemas DIRECTORY`: writes the schemas of all documents, from their classes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from jaxrun.records import document_types, job_file
from jaxrun.records.document_base import Document

_MODULES = (document_types, job_file)  # which have the classes of all documents
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def make_schemas() -> dict[str, str]:
    """Return the text of each schema by the name of its file, "cleaned-copies.json"."""
    return {f"{_kind(document).replace(' ', '-')}.json": _format(document) for document in _documents(Document)}


def _documents(base: type[Document]) -> Iterator[type[Document]]:
    """Yield those below `base` that are printed: the classes without subclasses."""
    below = base.__subclasses__()
    for document in below:
        yield from _documents(document)
    if not below:
        yield base


def _kind(document: type[Document]) -> str:
    return str(document.__struct_config__.tag)


def _format(document: type[Document]) -> str:
    schema = msgspec.json.schema(document)
    definitions: dict[str, Any] = schema["$defs"]
    top = definitions.pop(document.__name__)
    top["title"] = _kind(document)
    top["required"] = list(top["properties"])  # "format" has a default, and is always there
    whole = {"$schema": _DIALECT, **top, **({"$defs": definitions} if definitions else {})}
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def main(directory: Path) -> None:
    for name, text in make_schemas().items():
        (directory / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
