"""Differences between the call groups of a divergence, the most telling first, as values for divergence_text.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import PurePath

from msgspec import Struct

from jaxrun.analysis.lockstep import hlo_diff
from jaxrun.analysis.lockstep.divergence import CallGroup
from jaxrun.protocol.flight import Arrays, strip_directory
from jaxrun.stack_frames import find_package, is_jax
from jaxrun.text import plural

_TYPE = re.compile(r"(?P<dtype>[^\[]*)\[(?P<shape>[^\]]*)\](?P<rest>.*)$")
_WEAK = ", weak"
_ELIDED = "__elided__"  # replaces a large constant
_MAIN, _SHARD_MAP = "func.func public @main(", "sdy.manual_computation"  # lines that show options begin with these
_LAMBDA, _CONSTANT = "<lambda> at ", "stablehlo.constant "
_MAX_LINES = 12  # of a diff of programs
_LONG_SHARDING = 28  # characters; a longer sharding that is the same for all is left out


class DifferenceKind(Enum):
    """What differs, the most telling first; TAIL is a shape of which only the leading axis differs."""

    ABSENT = auto()
    FUNCTION = auto()
    NAMESAKE = auto()
    MESH = auto()
    COUNT = auto()
    TAIL = auto()
    SHAPE = auto()
    DTYPE = auto()
    SHARDING = auto()
    WEAK = auto()
    RESULT = auto()
    OPTIONS = auto()
    LAMBDA = auto()
    CONSTANT = auto()
    CODE = auto()
    UNKNOWN = auto()


# What to do about each kind.
_SAME_CALLS = "every rank must make the same cross-process calls in the same order"
ADVICE = {
    DifferenceKind.ABSENT: f"{_SAME_CALLS}, and the same number of them: pad or drop the uneven tail of the data on "
    "every rank alike (jaxrun_runtime.batches does); make a conditional call on every rank, or on none.",
    DifferenceKind.FUNCTION: f"{_SAME_CALLS}: make a conditional call (if jax.process_index() == 0) on every rank, "
    "or on none.",
    DifferenceKind.NAMESAKE: f"{_SAME_CALLS}, of the same functions: broadcast rank 0's choice if the data decides "
    "(jax.experimental.multihost_utils.broadcast_one_to_all).",
    DifferenceKind.MESH: "make the mesh from the same devices in the same order on every rank (jax.make_mesh does).",
    DifferenceKind.COUNT: "call it with as many arrays, in the same structure, on every rank.",
    DifferenceKind.TAIL: 'this is the "last batch" pitfall: pad or drop the uneven tail on every rank alike '
    "(jaxrun_runtime.shard does).",
    DifferenceKind.SHAPE: "the global shapes must be the same on every rank: pad or cut uneven data alike "
    "(jaxrun_runtime.shard does), and sort what comes out of a set.",
    DifferenceKind.DTYPE: "convert it to the same dtype on every rank (x.astype).",
    DifferenceKind.SHARDING: "give it the same sharding on every rank (jax.device_put, in_shardings).",
    DifferenceKind.WEAK: "a Python number is weakly typed, an array is not: make it an array of one dtype on every "
    "rank (jnp.asarray(value, dtype)).",
    DifferenceKind.RESULT: "ask for the same results on every rank, with the same dtypes and out_shardings.",
    DifferenceKind.OPTIONS: "give jit and shard_map the same options (donate_argnums, in_specs) on every rank.",
    DifferenceKind.LAMBDA: f"{_SAME_CALLS}: if threads make calls, let one thread make them all; give each lambda "
    "of this line a name (def), so that reports can tell them apart.",
    DifferenceKind.CONSTANT: "pass the array as an argument instead, or broadcast rank 0's first "
    "(jax.experimental.multihost_utils.broadcast_one_to_all).",
    DifferenceKind.CODE: "pass the value as an argument instead, or broadcast rank 0's first "
    "(jax.experimental.multihost_utils.broadcast_one_to_all).",
    DifferenceKind.UNKNOWN: "the recorders do not show the difference; jaxrun --lockstep strict stops before the call.",
}
SAME_LINE_ADVICE = (
    "the same line made different calls: where a set, or a dict made from one, gives the order, sort it; where a value "
    "decides, let all decide by the same one (jax.experimental.multihost_utils.broadcast_one_to_all)."
)
REORDERED_ADVICE = (
    "the ranks make the same calls in another order: where a set, or a dict made from one, gives the order, sort it by "
    "something that is equal on all ranks, such as a name; where data decides, let all decide by the same data."
)
NAN_SEARCH_ADVICE = (
    "a rank has found a NaN, so that JAX runs the program again there, operation by operation, up to the rank's first "
    "NaN (jax_debug_nans): from here on the ranks' calls differ, and FloatingPointError must end the job."
)
CROSSED_ADVICE = "groups that share ranks must make their calls in one order on all of them."
EARLIER_ADVICE = "jaxrun --lockstep strict stops at the first call that differs."


class Difference(Struct, frozen=True):
    """One difference: a `subject` ("argument batch.x is") with its values, or a diff of programs in `lines`.

    values:   each value, with the ranks that have it
    sides:    the ranks of the diff's "-" and "+"
    omitted:  number of lines that were left out
    """

    kind: DifferenceKind
    subject: str = ""
    values: tuple[tuple[str, tuple[int, ...]], ...] = ()
    lines: tuple[str, ...] = ()
    sides: tuple[tuple[int, ...], ...] = ()
    omitted: int = 0


def find_differences(groups: Sequence[CallGroup]) -> tuple[Difference, ...]:
    """Compare call groups, the largest first; groups that made no call are ABSENT."""
    callers = [group for group in groups if group.absence is None]
    absent = [Difference(DifferenceKind.ABSENT)] if len(callers) < len(groups) else []
    if len(callers) < 2:
        return tuple(absent)
    return (*absent, *(_functions(callers) or _signatures(callers) or _codes(callers)))


def _functions(groups: Sequence[CallGroup]) -> list[Difference]:
    if len({group.name for group in groups}) > 1:
        return [
            Difference(
                DifferenceKind.FUNCTION,
                "different functions:",
                _values(groups, lambda group: group.name),
            )
        ]
    sources = {group.source for group in groups if group.source}
    if len(sources) > 1:
        told_apart = len({short_source(source) for source in sources}) > 1
        values = _values(groups, lambda group: short_source(group.source) if told_apart else group.source)
        return [Difference(DifferenceKind.NAMESAKE, "different functions of this name:", values)]
    return []


def _signatures(groups: Sequence[CallGroup]) -> list[Difference]:
    """Compare mesh, arguments and results, if all groups have them; weak types are part of the code."""
    described = [group for group in groups if group.is_described]
    keys = {group.key for group in groups if group.key}  # a program has a key once it is compiled
    if len(described) < 2:
        return [Difference(DifferenceKind.UNKNOWN)] if len(keys) > 1 else []
    found = []
    if len({group.mesh for group in described}) > 1:
        found.append(Difference(DifferenceKind.MESH, "the mesh is", _values(described, lambda group: group.mesh)))
    found += _arrays(described, lambda group: group.arguments, "argument")
    if any(difference.kind is not DifferenceKind.WEAK for difference in found):
        return found
    found += _arrays(described, lambda group: group.results, "result")
    if len(keys) > 1:
        return found or [Difference(DifferenceKind.UNKNOWN)]
    return [*found, *_codes(groups)]


def _arrays(groups: Sequence[CallGroup], of: Callable[[CallGroup], Arrays], what: str) -> list[Difference]:
    """Return one difference for each array that differs, or a single one if the numbers of arrays differ."""
    lengths = {len(of(group)) for group in groups}
    if len(lengths) > 1:
        kind = DifferenceKind.COUNT if what == "argument" else DifferenceKind.RESULT
        return [Difference(kind, "the call has", _values(groups, lambda group: plural(len(of(group)), what)))]
    found = []
    for number in range(lengths.pop()):
        rows = [of(group)[number] for group in groups]
        if len({row[1] for row in rows}) == 1 and len({row[2] for row in rows} - {""}) <= 1:
            continue  # XLA may choose any sharding here
        kind = _kind([row[1] for row in rows])
        name = rows[0][0] or (f"{number + 1} of {len(of(groups[0]))}" if len(of(groups[0])) > 1 else "")
        subject = f"{what} {name} is" if name else f"the {what} is"
        alike = len({row[2] for row in rows}) == 1

        def shown(group: CallGroup, number: int = number, alike: bool = alike) -> str:
            _, type_, sharding = of(group)[number]
            return _array(type_, "" if alike and len(sharding) > _LONG_SHARDING else sharding)

        found.append(Difference(kind if what == "argument" else DifferenceKind.RESULT, subject, _values(groups, shown)))
    return sorted(found, key=lambda difference: difference.kind.value)


def _kind(types: Sequence[str]) -> DifferenceKind:
    """Return the kind of difference between arrays of these types."""
    parts = [found.groups() if (found := _TYPE.match(type_)) else (type_, "", "") for type_ in types]
    dtypes, shapes, rests = ({part[place] for part in parts} for place in range(3))
    if len(shapes) > 1:
        inner = {shape.partition(",")[2] for shape in shapes}
        return DifferenceKind.TAIL if len(inner) == 1 and "" not in shapes else DifferenceKind.SHAPE
    if len(dtypes) > 1:
        return DifferenceKind.DTYPE
    return DifferenceKind.WEAK if len(rests) > 1 else DifferenceKind.SHARDING


def _codes(groups: Sequence[CallGroup]) -> list[Difference]:
    """Compare the lowered programs of the two largest groups."""
    pair = _pair(groups)
    if pair is None:
        return [Difference(DifferenceKind.UNKNOWN)]
    first, second = pair
    texts = hlo_diff.decompress(first.hlo), hlo_diff.decompress(second.hlo)
    if not all(texts):
        return [Difference(DifferenceKind.CODE)]
    if texts[0] == texts[1]:
        return [Difference(DifferenceKind.CONSTANT if _ELIDED in texts[0] else DifferenceKind.CODE)]
    lines = hlo_diff.diff(*texts)
    mains = {next((line for line in text.splitlines() if _MAIN in line), "") for text in texts}
    has_options = len(mains) > 1 or any(_SHARD_MAP in line for line in lines)
    kind = DifferenceKind.OPTIONS if has_options else _code_kind(first, lines)
    sides, omitted = (first.ranks, second.ranks), max(0, len(lines) - _MAX_LINES)
    return [Difference(kind, lines=tuple(lines[:_MAX_LINES]), sides=sides, omitted=omitted)]


def _code_kind(group: CallGroup, lines: Sequence[str]) -> DifferenceKind:
    """Return LAMBDA where lambdas of one line, which have one name, differ in more than the value of a constant."""
    has_other_operations = any(_CONSTANT not in line for line in lines)
    return DifferenceKind.LAMBDA if group.source.startswith(_LAMBDA) and has_other_operations else DifferenceKind.CODE


def _pair(groups: Sequence[CallGroup]) -> tuple[CallGroup, CallGroup] | None:
    """Return the largest group whose code is known, and the largest with another code."""
    first = next((group for group in groups if group.code), None)
    if first is None:
        return None
    second = next((group for group in groups if group.code not in ("", first.code)), None)
    return (first, second) if second else None


def _array(type_: str, sharding: str) -> str:
    """Write an array as `float32[32,128]@P('data')`, with a note if it is weakly typed (`float32[] (weakly typed)`)."""
    bare = type_.removesuffix(_WEAK)
    sharding = f"{sharding[:-2]})" if sharding.endswith(",)") else sharding
    return f"{bare}{f'@{sharding}' if sharding else ''}{' (weakly typed)' if bare != type_ else ''}"


def short_source(source: str) -> str:
    """Write `step at /home/me/model.py:40` as `step at model.py:40`, and a function of JAX as `_mean of JAX`.

    A library's wrapper stands for the function that it wraps: `step in equinox`.
    """
    function, at, place = source.rpartition(" at ")
    file = place.rpartition(":")[0]
    if is_jax(file):
        return f"{function} of JAX"
    if package := find_package(file):
        return f"{function} in {PurePath(package).stem}"
    return f"{function}{at}{strip_directory(place)}"


def _values(groups: Sequence[CallGroup], of: Callable[[CallGroup], str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return each value with the ranks that have it, in the order of the groups."""
    found: dict[str, list[int]] = {}
    for group in groups:
        found.setdefault(of(group) or "not known", []).extend(group.ranks)
    return tuple((value, tuple(sorted(ranks))) for value, ranks in found.items())
