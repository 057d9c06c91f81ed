"""Warnings of the ranks, handed to pytest's summary."""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Callable

import pytest

from jaxrun.protocol.pytest_messages import RecordedWarning


def warning_recorder(item: pytest.Item) -> Callable[[RecordedWarning], None]:
    """What hands a warning to pytest, as one of `item`."""

    def record(warned: RecordedWarning) -> None:
        kind = getattr(builtins, warned.category, None)
        text = warned.text
        if not (isinstance(kind, type) and issubclass(kind, Warning)):
            # Its class may not be importable here, nor where the summary is made.
            kind, text = UserWarning, f"{warned.category}: {text}"
        message = warnings.WarningMessage(kind(text), kind, warned.file, warned.line)
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": message,
                "when": warned.when,
                "nodeid": warned.test,
                "location": warned.location,
            }
        )

    return record
