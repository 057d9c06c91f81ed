"""A rank's share of a map of plain Python: calls the function for one item after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxrun.protocol.map_messages import Part
from jaxrun_runtime.gang import calls


def serve(function: Callable[..., Any], static: Mapping[str, Any], unpack_items: bool) -> None:
    """Map the parts that the parent sends until None; called on every rank by the gang. Raises what an item raises."""
    call = calls.current_call()
    while (part := call.receive()) is not None:
        results = []
        for number, item in enumerate(part.content, part.start):
            try:
                results.append(function(*item, **static) if unpack_items else function(item, **static))
            except Exception as error:
                error.add_note(f"raised for item {number}")
                raise
        try:
            call.send(Part(part.start, results))
        except calls.CallEnded:
            raise
        except Exception as error:
            error.add_note(f"this is about what the function has returned for an item of {part.start} to {number}")
            raise
