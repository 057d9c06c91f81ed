"""Error texts of JAX, hosts and launchers, each with its cause and what to do. One table, split by theme."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownError:
    """A text that is known, its cause, and what to do.

    pattern:        a regular expression; every repetition has a bound and none is nested, so that a search is linear
    means, advice:  one sentence each, the cause and what to type; groups of the pattern may stand in them: "{size}"
    link:           documentation or an issue; may be empty
    is_root:        whether the text names a cause although it comes with a broken connection between hosts

    Texts that explain themselves need no entry, nor do those that jaxrun writes, nor errors that any user of
    one process meets: JAX's own text is enough there.
    """

    key: str
    pattern: str
    means: str
    advice: str
    link: str = ""
    is_root: bool = False

    def search(self, text: str) -> re.Match[str] | None:
        return re.search(self.pattern, text)
