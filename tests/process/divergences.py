"""The report expected for each kind of diverge.py: the call, the ranks, the lines and the words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_SOURCES = Path(__file__).parent / "diverging"


@dataclass(frozen=True)
class Case:
    """A kind in which calls differ.

    number:   of the call, among those of all ranks
    calls:    its function on the others and on the rank that differs; empty on those that are at their end
    words:    of the report
    ends:     how the job ends where nothing holds it up: 0, or 124 (it hangs), or 134 (Gloo aborts it)
    unsaid:   the others stand in a call of a known program: of that nothing is recorded before it ends, so that the
              call is not known where none is held up
    by_first: it is rank 0 that differs, not the last one
    """

    kind: str
    number: int
    calls: tuple[str, str]
    words: tuple[str, ...]
    ends: int = 0
    unsaid: bool = False
    by_first: bool = False

    def groups(self, size: int) -> tuple[str, str]:
        """The others and the one that differs: "0-2" and "3"."""
        odd = 0 if self.by_first else size - 1
        rest = [rank for rank in range(size) if rank != odd]
        return (f"{rest[0]}-{rest[-1]}" if len(rest) > 1 else f"{rest[0]}", f"{odd}")

    def call_groups(self, size: int) -> dict[str, tuple[str, str]]:
        """By group, the call's name and place."""
        rows = zip(self.groups(size), self.calls, ("the others", ""), strict=True)
        return {who: (f"jit({name})", place(self.kind, role)) for who, name, role in rows if name}

    def words_for(self, size: int, calls_before: int) -> tuple[str, ...]:
        others, odd = (f"rank{'s' if '-' in ranks else ''} {ranks}" for ranks in self.groups(size))
        made = calls_before + self.number - 1
        values = {"others": others, "odd": odd, "n": size, "3n": 3 * size, "4n": 4 * size, "made": made}
        return tuple(words.format(**values) for words in self.words)


def place(kind: str, who: str = "") -> str:
    """`order.py:66`: the line whose comment names this kind, and `who` if any line of it does."""
    for comment in (f"  # {kind}: {who}", f"  # {kind}"):
        for path in sorted(_SOURCES.glob("*.py")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if line.endswith(comment):
                    return f"{path.name}:{number}"
    raise LookupError(f"no line is marked with {kind}")


def call_groups(report: str) -> dict[str, tuple[str, str]]:
    """The rows of a report, as Case.call_groups has them."""
    rows = re.findall(r"^  ranks? ([\d, -]+): +(jit\(.+?\)) .*called at (\S+)$", report, re.MULTILINE)
    return {ranks: (name, where) for ranks, name, where in rows}


def check_report(case: Case, size: int, report: str, *, calls_before: int = 0) -> None:
    """Call, groups of ranks, places, difference; and no line that is much too long."""
    number = calls_before + case.number
    assert report.startswith(f"the processes disagree at cross-process call #{number}\n"), report
    assert call_groups(report) == case.call_groups(size), report
    for words in case.words_for(size, calls_before):
        assert words in report, report
    assert max(map(len, report.splitlines())) <= 110, report


# What the ranks call one function with: JAX's own objects say how it differs.
OF_ARGUMENTS = (
    Case(
        "shape-local-batch",
        4,
        ("step", "step"),
        ("argument batch['x'] is float32[{4n},8]@P('data') on {others} and float32[{3n},8]@P('data') on {odd}", "pad"),
    ),
    Case("shape-explicit", 4, ("columns", "columns"), ("argument x is float32[{n},16]",), ends=134, unsaid=True),
    Case("dtype", 4, ("brightness", "brightness"), ("image is float32[{n},8]@P('data') on {others} and int32[{n},8]",)),
    Case("weak-type", 4, ("scaled", "scaled"), ("factor is float32[]@P() (weakly typed) on {others} and float32[]",)),
    Case("argument-count", 4, ("masked", "masked"), ("2 arguments on {others} and 1 argument on {odd}",)),
    Case("donated", 4, ("update", "update"), ("what it donates, its specs or its options differ", "donor")),
    Case(
        "static-argument",
        4,
        ("powered", "powered"),
        (
            "a Python value that is baked in differs",
            "- %cst = stablehlo.constant dense<2.0",
            "+ %cst = stablehlo.constant dense<7.0",
        ),
    ),
    Case("constant", 4, ("<lambda>", "<lambda>"), ("a large array that is baked in differs",)),
    Case("names-alike", 4, ("loss", "loss"), ("different functions of this name", "loss at inputs.py:")),
    Case("mesh-order", 4, ("total", "total"), ("the mesh is data={n}: 0,",), ends=124, unsaid=True),
    Case("shard-map-specs", 4, ("local", "local"), ("sdy.manual_computation",), ends=124),
    Case("out-shardings", 1, ("normalized", "normalized"), ("the result is", "P('data') on {odd}"), ends=124),
)
CASES = (
    *OF_ARGUMENTS,
    # Which function they call.
    Case("branch", 13, ("step", "evaluate"), ("jit(step) on {others} and jit(evaluate) on {odd}",)),
    Case("rank-0-only", 4, ("step", "_mean"), ("every rank",), ends=124, by_first=True),
    Case("rank-0-only-end", 4, ("", "_mean"), ("only rank 0 made this",), ends=124, by_first=True),
    Case("threads", 1, ("step", "evaluate"), ("jit(step) on {others} and jit(evaluate) on {odd}",)),
    Case("barrier-one-rank", 4, ("evaluate", "_identity_fn"), ("every rank",), ends=124, by_first=True),
    Case("gather-shapes", 1, ("_identity_fn", "_identity_fn"), ("float32[{n},2]", "float32[{n},3]"), ends=134),
    # Whether they make the call at all; the last one is the last of a job that tries many.
    Case("last-batch-end", 4, ("step", ""), ("has made only {made} calls and is finished",), ends=124, unsaid=True),
)
