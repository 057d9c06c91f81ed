"""Ranks that diverge, in all the ways of diverge.py: the report, the end of the job, and that nothing is left."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

import pytest
from divergences import CASES, OF_ARGUMENTS, STUCK, Case, check_report, place
from harness import HERE, Result, jaxrun

DIVERGE = str(HERE / "diverge.py")
STALL = ("--stall-timeout", "2")
OWN_ERRORS = {
    "fails": "ValueError: a bad record",
    "callback": "ValueError: a bad record",
    "barrier-names": "AssertionError: sync_global_devices name mismatch",
}


# One of each family of kinds always runs; what else differs within a family, the unit tests of the report tell apart.
RECORD_ALWAYS = (
    "shape-local-batch",  # what the ranks call a function with
    "static-argument",
    "mesh-order",
    "branch",  # which function they call
    "rank-0-only",
    "threads",
    "last-batch-end",  # whether they make the call at all
    "gather-shapes",  # and Gloo aborts the job
)
STRICT_ALWAYS = ("static-argument", "rank-0-only", "halves-in-turn", "last-batch-end")
# Strict tells what record can tell by the same means; beside these, it is tried with what record cannot.
STRICT_TOO = (*STRICT_ALWAYS, "shape-local-batch", "set-order", "branch-late", "threads", "gather-shapes")
STUCK_ALWAYS = ("stopped", "typing")
ERRORS_ALWAYS = ("callback",)


# What each JAX does in its own way: what an argument is, an array that is gathered, and a rank that waits in a call.
OF_JAX = (*(case.kind for case in OF_ARGUMENTS), "branch", "rank-0-only", "gather-shapes", "last-batch-end")


def marks(is_always_run: bool) -> list[pytest.MarkDecorator]:
    return [] if is_always_run else [pytest.mark.extended]


def marked(case: Case, always: Collection[str]) -> object:
    """The case as a parameter, extended unless its kind is in `always`."""
    its_marks = marks(case.kind in always)
    its_marks += [pytest.mark.jax_version] if case.kind in OF_JAX and not its_marks else []
    return pytest.param(case, id=case.kind, marks=its_marks)


def diverge(tmp_path: Path, mode: str, kind: str, size: int, *flags: str) -> Result:
    """At a keyboard that nobody touches. `--timeout` is for what must not be: a hang that is not seen."""
    keyboard, fingers = os.pipe()
    try:
        flags = ("-n", str(size), "--lockstep", mode, "--timeout", "60", *flags)
        return jaxrun(tmp_path, *flags, DIVERGE, kind, stdin=keyboard)
    finally:
        os.close(keyboard)
        os.close(fingers)


@pytest.mark.parametrize("case", [marked(case, RECORD_ALWAYS) for case in CASES])
def test_record_reports_the_divergence(tmp_path: Path, case: Case) -> None:
    result = diverge(tmp_path, "record", case.kind, case.size, "-d", str(case.devices), *STALL)
    assert result.code == case.ends, result.err
    report = str(result.verdict()["divergence"])
    if case.unsaid:
        assert not report and "disagree" not in result.err, result.err
        assert all(where in result.err for _, where in case.call_groups(case.size).values()), result.err
        last = f"after call #{case.number - 1} jit({case.calls[0]})"
        assert case.ends != 124 or last in result.err.rpartition("no progress")[2], result.err
    else:
        check_report(case, case.size, report)
        assert report in result.err


@pytest.mark.parametrize(
    "case", [marked(case, STRICT_ALWAYS) for case in CASES if case.unsaid or case.kind in STRICT_TOO]
)
def test_strict_raises_the_divergence_at_the_line_of_each_rank(tmp_path: Path, case: Case) -> None:
    result = diverge(tmp_path, "strict", case.kind, case.size, "-d", str(case.devices))
    assert (result.code, result.verdict()["outcome"]) == (1, "failed"), result.err
    for ranks, (_, where) in case.call_groups(case.size).items():
        first, _, last = ranks.partition("-")
        for rank in range(int(first), int(last or first) + 1):
            stack, _, report = (result.run_dir / f"rank-{rank:04d}.err").read_text().rpartition("DivergenceError: ")
            check_report(case, case.size, report)
            frames = re.findall(r'File ".*/(\S+)", line (\d+)', stack)
            assert ":".join(frames[-1]) == where, stack


@pytest.mark.parametrize(
    ("kind", "mode", "size"),
    [
        *(pytest.param(kind, "record", 3, marks=marks(kind in STUCK_ALWAYS)) for kind in STUCK),
        ("last-batch-sleep", "strict", 2),
        pytest.param("typing", "strict", 2, marks=pytest.mark.extended),
    ],
)
def test_a_rank_that_is_stuck_is_named_with_its_line(tmp_path: Path, kind: str, mode: str, size: int) -> None:
    result = diverge(tmp_path, mode, kind, size, *STALL)
    assert (result.code, result.verdict()["outcome"], result.verdict()["divergence"]) == (124, "stall", ""), result.err
    shown = result.err.rpartition("no progress")[2]
    odd, others = (0, range(1, size)) if STUCK[kind] else (size - 1, range(size - 1))
    where = "stopped by a signal" if kind == "stopped" else place(kind)
    assert re.search(rf"^  1 rank +{odd} .*{where}", shown, re.MULTILINE), result.err
    waiting = f"{others[0]}-{others[-1]}" if len(others) > 1 else str(others[0])
    assert re.search(rf"^  {len(others)} ranks? +{waiting} .*{place(kind, 'the others')}", shown, re.MULTILINE), (
        result.err
    )
    if mode == "strict":  # those that wait for their turn are explained like those that wait in the call
        assert "waits for it in JAX" in " ".join(shown.split()), result.err


@pytest.mark.parametrize("mode", ["record", pytest.param("strict", marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    ("kind", "words"),
    [pytest.param(kind, words, marks=marks(kind in ERRORS_ALWAYS)) for kind, words in OWN_ERRORS.items()],
)
def test_an_error_of_a_ranks_own_is_the_headline(tmp_path: Path, kind: str, words: str, mode: str) -> None:
    result = diverge(tmp_path, mode, kind, 2)
    assert (result.code, result.verdict()["outcome"]) == (1, "failed"), result.err
    assert words in str(result.verdict()["traceback"]) and "DivergenceError" not in result.err, result.err


def test_a_ring_of_pairs_that_wait_for_each_other(tmp_path: Path) -> None:
    result = diverge(tmp_path, "strict", "meshes-in-turn", 4)
    assert result.code == 1, result.err
    for rank in range(4):
        report = (result.run_dir / f"rank-{rank:04d}.err").read_text()
        assert re.search(rf"call #1 of ranks {min(rank, (rank + 1) % 4)}.*{max(rank, (rank + 1) % 4)}\n", report), (
            report
        )
        assert "waits in call #1 of ranks" in report and place("meshes-in-turn") in report, report
        assert "groups that share ranks must make their calls in one order" in report


def test_a_ring_of_pairs_that_nobody_holds_up_is_a_hang(tmp_path: Path) -> None:
    result = diverge(tmp_path, "record", "meshes-in-turn", 4, *STALL)
    assert (result.code, result.verdict()["outcome"]) == (124, "stall"), result.err
    assert f"4 ranks  0-3  {place('meshes-in-turn')}" in result.err


def test_a_divergence_that_the_program_swallows_is_reported_at_the_end(tmp_path: Path) -> None:
    result = diverge(tmp_path, "strict", "swallowed", 2)
    assert result.out.count("skipped: DivergenceError") == 2, result
    assert "the processes disagree at cross-process call #4" in result.err, result.err


def test_every_kind_has_its_test() -> None:
    sources = "".join(path.read_text() for path in (HERE / "diverging").glob("*.py"))
    kinds = {name.replace("_", "-") for name in re.findall(r"^@kind\ndef (\w+)", sources, re.MULTILINE)}
    assert kinds == {case.kind for case in CASES} | {*STUCK, *OWN_ERRORS, "meshes-in-turn"}
