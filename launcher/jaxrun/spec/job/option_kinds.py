"""The kinds of values that options have: how people write a value, and how a value is written for them.

A kind is a cheap value that a declaration names (options.py). The command line, defaults from files and variables,
completion, job.json, batch scripts and manifests read and write values through it. Whether a value makes sense for its
option is the declaration's `check`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from jaxrun.errors import UsageError
from jaxrun.text import format_ranges, parse_ranks, parse_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from jaxrun.spec.job.fault_spec import FaultSpec
    from jaxrun.text import Ranks

AUTO_S = -1.0  # the value of a time that is given as "auto", where an option allows that
_TIME_WORDS = {"never": 0.0, "auto": AUTO_S}


def _text(text: str, option: str) -> str:
    return text


def _texts(value: Any) -> tuple[str, ...]:
    return (str(value),)


def _itself(value: Any) -> Any:
    return value


class Kind(Struct, frozen=True, kw_only=True):
    """How people write the values of an option.

    parse:    returns the value of a text that follows an option: of one that repeats, a tuple. Raises UsageError that
              names the option
    format:   returns the texts from which `parse` makes the value, one for each time that the option is given
    show:     returns the value as documents of JSON have it, without secrets
    empty:    the default of an option whose declaration has no other
    metavar:  stands for the value on pages of help
    choices:  all texts that people may give, if there are few
    words:    texts that people may give instead of a number
    path:     "file" or "dir" if the value is the path of one, for completion
    repeats:  the option may be given several times
    listed:   a file or a variable may hold several values in one text, separated as in a shell
    on:       the value of a flag that is given; None for a kind whose options take a value
    """

    parse: Callable[[str, str], Any] = _text
    format: Callable[[Any], tuple[str, ...]] = _texts
    show: Callable[[Any], Any] = _itself
    empty: Any = None
    metavar: str = "TEXT"
    choices: Collection[str] = ()
    words: tuple[str, ...] = ()
    path: str = ""
    repeats: bool = False
    listed: bool = False
    on: Any = None

    @property
    def is_flag(self) -> bool:
        return self.on is not None

    def complete(self, beginning: str) -> list[str]:
        """Return the texts that begin so; empty if people may give any text."""
        return [text for text in (*self.choices, *self.words) if text.startswith(beginning)]


def flag(on: str) -> Kind:
    """Return the kind of a flag whose value says why it is set; `on` is the value if it is given."""
    return Kind(on=on, empty="")


def one_of(choices: Collection[str]) -> Kind:
    return Kind(parse=partial(_parse_choice, choices), choices=choices, metavar="")


def count_or(*words: str, has_ranges: bool = False) -> Kind:
    """Return the kind of a number, or one of a few words, which stay words; with `has_ranges` MIN:MAX stays a text."""
    return Kind(parse=partial(_parse_count_or, words, has_ranges), words=words, metavar="N")


def split_words(text: str, option: str) -> list[str]:
    """Split `text` as a shell does. Raises UsageError that names `option`."""
    import shlex

    try:
        return shlex.split(text)
    except ValueError as error:
        from jaxrun.spec.job.env_options import shown_assignment

        raise UsageError(
            f"{option} {shown_assignment(text)!r} cannot be split into words: {str(error).lower()}"
        ) from None


def _parse_choice(choices: Collection[str], text: str, option: str) -> str:
    if text not in choices:
        raise UsageError(f"{option}: {text!r} is not one of {', '.join(map(repr, choices))}")
    return text


def _parse_count(text: str, option: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{option}: {text!r} is not a valid integer") from None


def _parse_count_or(words: tuple[str, ...], has_ranges: bool, text: str, option: str) -> int | str:
    if text in words or (has_ranges and re.fullmatch("[0-9]+:[0-9]+", text)):
        return text
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{option}: {text!r} is neither a number nor {' or '.join(words)}") from None


def _parse_time(text: str, option: str) -> float:
    seconds = _TIME_WORDS[text] if text in _TIME_WORDS else parse_seconds(text)
    if seconds is None:
        raise UsageError(f"{option}: {text!r} is not a time; write seconds, or 90s, 5m, 1h30m")
    return seconds


def _format_time(seconds: float) -> tuple[str, ...]:
    short = f"{seconds:g}"
    return ("auto" if seconds == AUTO_S else short if float(short) == seconds else repr(seconds),)


def _parse_path(text: str, option: str) -> Path:
    from pathlib import Path

    return Path(text)


def _show_path(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _parse_paths(text: str, option: str) -> tuple[Path, ...]:
    return (_parse_path(text, option),)


def _each(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value))


def _parse_ranks(text: str, option: str) -> Ranks:
    return parse_ranks(text, option)


def _format_ranks(ranks: Ranks) -> tuple[str, ...]:
    return (format_ranges([rank for span in ranks for rank in span], ","),)


def _show_ranks(ranks: Ranks) -> str:
    return _format_ranks(ranks)[0]


def _parse_words(text: str, option: str) -> tuple[str, ...]:
    return tuple(split_words(text, option))


def _format_words(words: tuple[str, ...]) -> tuple[str, ...]:
    import shlex

    return (shlex.join(words),)


def _parse_faults(text: str, option: str) -> tuple[FaultSpec, ...]:
    from jaxrun.spec.job.fault_spec import parse_faults

    return parse_faults(text)


def _parse_one(text: str, option: str) -> tuple[str, ...]:
    return (text,)


def _show_assignments(texts: tuple[str, ...]) -> tuple[str, ...]:
    from jaxrun.spec.job.env_options import mask_assignment

    return tuple(map(mask_assignment, texts))


FLAG = Kind(on=True, empty=False)
TEXT = Kind(empty="")
COUNT = Kind(parse=_parse_count, metavar="N")
TIME = Kind(parse=_parse_time, format=_format_time, metavar="TIME")  # in seconds
FILE = Kind(parse=_parse_path, show=_show_path, metavar="FILE", path="file")
DIRECTORY = Kind(parse=_parse_path, show=_show_path, metavar="DIR", path="dir")
FILES = Kind(
    parse=_parse_paths, format=_each, show=_each, empty=(), metavar="FILE", path="file", repeats=True, listed=True
)
DIRECTORIES = Kind(
    parse=_parse_paths, format=_each, show=_each, empty=(), metavar="DIR", path="dir", repeats=True, listed=True
)
COMMAND = Kind(empty="", metavar="PATH", path="file")  # a program, by its path or name
RANKS = Kind(parse=_parse_ranks, format=_format_ranks, show=_show_ranks, empty=(), metavar="RANKS")
WORDS = Kind(parse=_parse_words, format=_format_words, empty=(), metavar="WORDS", repeats=True)
FAULTS = Kind(parse=_parse_faults, format=_each, show=_each, empty=(), metavar="FAULTS", repeats=True)
ASSIGNMENTS = Kind(
    parse=_parse_one, format=_each, show=_show_assignments, empty=(), metavar="NAME[=VALUE]", repeats=True, listed=True
)
