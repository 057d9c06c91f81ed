"""Compares two lowered programs (StableHLO text) of the same name and shapes, and shows the difference in few lines.

An example of a line: `%cst_0 = stablehlo.constant dense<2.000000e+00> : tensor<f32>`.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest

_MAX_TEXT_BYTES = 8 * 2**20  # of a program; more is not decompressed
_MAX_COMPARED_LINES = 400  # between the equal lines at both ends
_LINE_CHARS = 92  # shown of each line
_CONTEXT_CHARS = 30  # kept before the first difference of a long line
# Names of values; their numbers shift after each line that only one program has.
_NUMBERED = re.compile(r"%(?:cst|c)?(?:_?\d+)?(?![\w.])")


def decompress(text: str) -> str:
    """Decompress a program's text from base64 and zlib; empty if the text is neither, cut if it is very long."""
    try:
        return zlib.decompressobj().decompress(base64.b64decode(text), _MAX_TEXT_BYTES).decode("utf-8", "replace")
    except (ValueError, zlib.error):
        return ""


def diff(first: str, second: str) -> list[str]:
    """Return the lines that differ, with "- " for the first and "+ " for the second program."""
    return list(_difference(first.splitlines(), second.splitlines()))


def _difference(first: Sequence[str], second: Sequence[str]) -> Iterator[str]:
    """Yield the lines that differ, ignoring the numbers of values unless nothing else differs."""
    normal_one, normal_two = ([_NUMBERED.sub("%", line.strip()) for line in lines] for lines in (first, second))
    if normal_one == normal_two:
        normal_one, normal_two = list(first), list(second)
    start = _shared(normal_one, normal_two)
    end = _shared(normal_one[start:][::-1], normal_two[start:][::-1])
    one, two = (range(start, min(len(lines) - end, start + _MAX_COMPARED_LINES)) for lines in (first, second))
    from difflib import SequenceMatcher  # takes 3 ms

    matcher = SequenceMatcher(None, [normal_one[n] for n in one], [normal_two[n] for n in two], autojunk=False)
    for what, a, b, c, d in matcher.get_opcodes():
        if what == "equal":
            continue
        gone, come = ([lines[n].strip() for n in span] for lines, span in ((first, one[a:b]), (second, two[c:d])))
        cuts = [_cut(*pair) for pair in zip_longest(gone, come, fillvalue="")]
        yield from (f"- {_crop(line, cut)}" for line, cut in zip(gone, cuts, strict=False))
        yield from (f"+ {_crop(line, cut)}" for line, cut in zip(come, cuts, strict=False))


def _shared(first: Sequence[str], second: Sequence[str]) -> int:
    """Count the items that are equal at the start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, two) in pairs if one != two), min(len(first), len(second)))


def _cut(first: str, second: str) -> int:
    """Return the position from which to show two lines, so that their first difference is visible."""
    same = _shared(first, second)
    wanted = same - _CONTEXT_CHARS if same > _LINE_CHARS - _CONTEXT_CHARS else 0
    return max(0, min(wanted, max(len(first), len(second)) - _LINE_CHARS))


def _crop(line: str, start: int) -> str:
    shown = line[start : start + _LINE_CHARS]
    return ("…" if start else "") + shown + ("…" if start + _LINE_CHARS < len(line) else "")
