"""Completes what is typed in a notebook: options after %gang, and in a %%gang cell names that live on the ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxrun.errors import JaxrunError
from jaxrun.frontends.gang.gang import Gang, is_ready
from jaxrun.protocol.names import RUNTIME
from jaxrun.protocol.payload import FunctionReference
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.option_declaration import options_of

_ACTIONS = ("restart", "stop")
_OWN_OPTIONS = ("--env", "--env-file", "--help")
_OF_CELLS = ("--rank", "--timeout")
_NOT_OF_GANGS = {"-m", "--timeout"}  # --timeout is a cell's here
_NAME = re.compile(r"""(?<![\w.'"%!])[^\W\d]\w*(?:\.\w*)*$""")  # not in a text that begins, nor of a magic or command
_ASK_TIMEOUT_S = 0.5
_IDENTIFIER = "jaxrun.gang"


def complete_line(text: str) -> list[str]:
    """Return what the last word of a line may become; `text` is the line up to the cursor, from %gang or %%gang on."""
    magic, *words = text.split(" ")
    *earlier, word = words or [""]
    if choices := _choices(earlier, word):
        return choices
    own = (*_OWN_OPTIONS, *(_OF_CELLS if magic.startswith("%%") else ()))
    flags = (flag for _, declared in options_of(Job) for flag in declared.flags if flag not in _NOT_OF_GANGS)
    names = [*own, *flags] if word.startswith("-") else _ACTIONS if not any(earlier) and magic == "%gang" else ()
    return sorted(name for name in set(names) if name.startswith(word))


def _choices(earlier: Sequence[str], word: str) -> list[str]:
    """Return the values that the option before the last word has, and for `--option=val` those of the option in it."""
    flag, equals, value = word.partition("=")
    if not equals:
        flag, value = next((each for each in reversed(earlier) if each), ""), word
    declared = next((declared for _, declared in options_of(Job) if flag in declared.flags), None)
    return declared.kind.complete(value) if declared is not None else []


def find_name(text: str) -> str:
    """Return the name at the end of a line of Python, perhaps with dots; empty if there is none."""
    found = _NAME.search(text)
    return found[0] if found is not None else ""


def complete_name(gang: Gang, name: str) -> list[str]:
    """Return what a name may become, by the variables of the ranks; empty if they cannot be asked at once."""
    if not name or not is_ready(gang):
        return []
    complete = FunctionReference(f"{RUNTIME}.gang.notebook_cells", "complete_name")
    try:
        # Without a `with`: after a timeout that would interrupt the ranks, and they could lose their variables.
        return sorted(set().union(*gang.start_call(complete, name).results(_ASK_TIMEOUT_S)))
    except JaxrunError:
        return []


def complete(text: str, cell: str, gang: Gang | None) -> tuple[str, list[str]]:
    """Return the end of `text` that is replaced, and by what; `text` is the line of `cell` up to the cursor."""
    line = text.lstrip()
    if re.match(r"%%?gang(\s|$)", line):
        # IPython replaces what follows a `=`.
        return re.split(r"[ =]", line)[-1], complete_line(line)
    if gang is None or not re.match(r"\s*%%gang(\s|$)", cell):
        return "", []
    name = find_name(text)
    return name, complete_name(gang, name)


def add_matcher(shell: Any, find_gang: Callable[[], Gang | None]) -> None:
    """Let IPython's completer ask; one before IPython 8.6 cannot."""
    matchers = getattr(getattr(shell, "Completer", None), "custom_matchers", None)
    if matchers is None:
        return

    def match_gang(context: Any) -> dict[str, Any]:
        from IPython.core.completer import SimpleCompletion

        replaced, found = complete(context.text_until_cursor, context.full_text, find_gang())
        completions = [SimpleCompletion(text, type="jaxrun") for text in found]
        return {"completions": completions, "matched_fragment": replaced, "suppress": bool(found)}

    of_ipython: Any = match_gang
    of_ipython.matcher_identifier, of_ipython.matcher_api_version, of_ipython.matcher_priority = _IDENTIFIER, 2, 1
    remove_matcher(shell)
    matchers.append(match_gang)


def remove_matcher(shell: Any) -> None:
    matchers = getattr(getattr(shell, "Completer", None), "custom_matchers", [])
    matchers[:] = [each for each in matchers if getattr(each, "matcher_identifier", "") != _IDENTIFIER]
