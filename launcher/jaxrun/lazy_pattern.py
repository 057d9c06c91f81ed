"""Regular expressions that are compiled at their first use.

A start imports many patterns that only a job that fails or hangs ever needs; compiling them would add to its cost.
"""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast


def lazy_pattern(pattern: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Return what `re.compile` returns, except that an invalid pattern raises re.error only at its first use."""
    return cast("re.Pattern[AnyStr]", _LazyPattern(pattern, flags))


class _LazyPattern:
    def __init__(self, pattern: Any, flags: int) -> None:
        self._arguments = pattern, flags

    def __getattr__(self, name: str) -> Any:
        """Return a method or property of the compiled pattern, and keep it."""
        value = getattr(re.compile(*self._arguments), name)  # the module keeps the patterns compiled last
        setattr(self, name, value)
        return value
