"""How two lowered programs (StableHLO text) of the same name and shapes differ, in few lines.

Examples of lines that are parsed:
    func.func public @main(%arg0: tensor<8xf32> {jax.buffer_donor = true, sdy.sharding = #sdy.sharding<@mesh, []>}, …
    %cst_0 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest

_MAX_TEXT_BYTES = 8 * 2**20  # of a program that are decompressed
_MAX_COMPARED_LINES = 400  # between the lines that are equal at both ends
_LINE_CHARS = 92  # that are shown of a line
_CONTEXT_CHARS = 30  # kept before the first difference of a long line
_ELIDED = "__elided__"
# Names of values, whose numbers shift after each line that one program has more.
_NUMBERED = re.compile(r"%(?:cst|c)?(?:_?\d+)?(?![\w.])")
_ARGUMENT = re.compile(r"%arg(\d+): ")
_MAIN = re.compile(r"func\.func public @main\((?P<arguments>.*)\) -> (?P<results>.*)$", re.DOTALL)
_DONORS = {"tf.aliasing_output", "jax.buffer_donor"}
_OPEN, _CLOSE = "{[(<", "}])>"


@dataclass(frozen=True, slots=True)
class HloDiff:
    """How two lowered programs differ.

    donated:     where only arguments' attributes differ: number, whether the first donates it, whether the second does
    attributes:  in the same case, other attributes that differ, as (number of the argument, name)
    constants:   the texts are alike, but large constants are left out of them
    lines:       otherwise, the lines that differ, "- " of the first and "+ " of the second
    omitted:     how many such lines were left out
    """

    donated: tuple[tuple[int, bool, bool], ...] = ()
    attributes: tuple[tuple[int, str], ...] = ()
    constants: bool = False
    lines: tuple[str, ...] = ()
    omitted: int = 0


def decompress(text: str) -> str:
    """Decompress a program's text from base64 and zlib; empty if it is neither, cut if it is very long."""
    try:
        return zlib.decompressobj().decompress(base64.b64decode(text), _MAX_TEXT_BYTES).decode("utf-8", "replace")
    except (ValueError, zlib.error):
        return ""


def diff(first: str, second: str, limit: int = 12) -> HloDiff:
    """Compare two programs; at most `limit` lines are returned."""
    if first == second:
        return HloDiff(constants=_ELIDED in first)
    one, two = first.splitlines(), second.splitlines()
    if len(one) == len(two):
        pairs = [(a, b) for a, b in zip(one, two, strict=True) if a != b]
        if len(pairs) == 1 and all(_MAIN.search(line) for line in pairs[0]):
            change = _signatures(*pairs[0])
            if change:
                return change
    lines = list(_difference(one, two))
    return HloDiff(lines=tuple(lines[:limit]), omitted=max(0, len(lines) - limit))


def argument_count(text: str) -> int:
    """Count the arguments of the main function; 0 if there is none."""
    found = _MAIN.search(text.partition("\n    ")[0])
    return len(_ARGUMENT.findall(found["arguments"])) if found else 0


def _signatures(first: str, second: str) -> HloDiff | None:
    """Compare the attributes of the arguments; None if anything else differs."""
    one, two = _MAIN.search(first), _MAIN.search(second)
    if one is None or two is None or one["results"] != two["results"]:
        return None
    donated: list[tuple[int, bool, bool]] = []
    attributes: list[tuple[int, str]] = []
    left, right = _arguments(one["arguments"]), _arguments(two["arguments"])
    if len(left) != len(right):
        return None
    for number, ((kind, a), (other, b)) in enumerate(zip(left, right, strict=True)):
        if kind != other:
            return None
        names = {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
        if names & _DONORS:
            donated.append((number, bool(a.keys() & _DONORS), bool(b.keys() & _DONORS)))
        attributes += [(number, name) for name in sorted(names - _DONORS)]
    return HloDiff(tuple(donated), tuple(attributes)) if donated or attributes else None


def _arguments(text: str) -> list[tuple[str, dict[str, str]]]:
    """Return type and attributes of each argument."""
    parts = _ARGUMENT.split(text)[2::2]
    found = []
    for part in parts:
        kind, _, rest = part.rstrip(", ").partition(" {")
        pairs = (item.partition(" = ") for item in _items(rest.removesuffix("}")))
        found.append((kind, {name.strip(): value for name, _, value in pairs}))
    return found


def _items(text: str) -> Iterator[str]:
    """Split at the outermost commas."""
    depth, quoted, start = 0, False, 0
    for place, letter in enumerate(text):
        if letter == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif letter == "," and depth == 0:
            yield text[start:place]
            start = place + 1
        else:
            depth += (letter in _OPEN) - (letter in _CLOSE)
    if text[start:].strip():
        yield text[start:]


def _difference(first: Sequence[str], second: Sequence[str]) -> Iterator[str]:
    """Yield the lines that differ, numbers of values aside unless nothing else differs."""
    normal_one, normal_two = ([_NUMBERED.sub("%", line.strip()) for line in lines] for lines in (first, second))
    if normal_one == normal_two:
        normal_one, normal_two = list(first), list(second)
    start = _shared(normal_one, normal_two)
    end = _shared(normal_one[start:][::-1], normal_two[start:][::-1])
    one, two = (range(start, min(len(lines) - end, start + _MAX_COMPARED_LINES)) for lines in (first, second))
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
    """Return from where to show two lines, so that their first difference is visible."""
    same = _shared(first, second)
    wanted = same - _CONTEXT_CHARS if same > _LINE_CHARS - _CONTEXT_CHARS else 0
    return max(0, min(wanted, max(len(first), len(second)) - _LINE_CHARS))


def _crop(line: str, start: int) -> str:
    shown = line[start : start + _LINE_CHARS]
    return ("…" if start else "") + shown + ("…" if start + _LINE_CHARS < len(line) else "")
