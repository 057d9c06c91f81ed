"""Ranks that diverge in all the ways of diverge.py, until nothing is left; lockstep off, and with less of JAX."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from divergences import CASES, OF_ARGUMENTS, Case, check_report, place
from harness import HERE, Result, extended, jaxrun, started
from harness_worker import SETTING, environment, record

from jaxrun.protocol.flight_file import COMPILATIONS, EVERY_CALL, FIRST_CALLS, NOTHING, STRICT_WORD
from jaxrun.protocol.worker_messages import Call, Failed

DIVERGE = str(HERE / "diverge.py")
STALL = ("--stall-timeout", "5")  # more than a busy machine may keep a rank from its next call
KINDS = {case.kind: case for case in CASES}
# Held up in strict mode, the ranks raise the error and go on: one job tries all kinds, the last one of a finished rank.
ALONE = ("rank-0-only-end", "last-batch-end")
IN_TURN = [case for case in CASES if case.kind not in ALONE]
# One of each way in which record mode finds a divergence; that of the compilers is below.
RECORDED = ("branch", "rank-0-only", "rank-0-only-end", "last-batch-end", "gather-shapes", "shape-explicit")
# What each JAX does in its own way: what an argument is, an array that is gathered, and a rank that waits in a call.
OF_JAX = (*(case.kind for case in OF_ARGUMENTS), "branch", "rank-0-only", "gather-shapes", "last-batch-end")


def diverge(tmp_path: Path, mode: str, *kinds: str, size: int = 2, flags: tuple[str, ...] = ()) -> Result:
    """At a keyboard that nobody touches. `--timeout` is for what must not be: a hang that is not seen."""
    keyboard, fingers = os.pipe()
    try:
        flags = ("-n", str(size), "--lockstep", mode, "--timeout", "200", *flags)
        return jaxrun(tmp_path, *flags, DIVERGE, *kinds, stdin=keyboard)
    finally:
        os.close(keyboard)
        os.close(fingers)


# ---- strict


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A job of two ranks that diverge in all these ways, one after the other, and go on after each error."""
    folder = tmp_path_factory.mktemp("in-turn")
    return diverge(folder, "strict", *(case.kind for case in IN_TURN), flags=("-d", "2"))


def errors_of(result: Result, rank: int) -> Mapping[str, str]:
    """What a rank of that job has printed about each kind."""
    text = (result.run_dir / f"rank-{rank:04d}.err").read_text()
    _, *parts = re.split(r"^=== (\S+) ===\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def check_error(case: Case, text: str, where: str, calls_before: int) -> None:
    """The error has this report, and was raised at this line."""
    stack, _, report = text.rpartition("DivergenceError: ")
    check_report(case, 2, report.partition("\n-----")[0], calls_before=calls_before)
    frames = re.findall(r'File ".*/diverging/(\S+)", line (\d+)', stack)
    assert ":".join(frames[-1]) == where, stack


@pytest.mark.extended
def test_a_program_that_catches_its_divergences_succeeds_and_the_end_reports_them(in_turn: Result) -> None:
    assert (in_turn.code, in_turn.out.count("the end")) == (0, 2), in_turn.err
    assert "the processes disagree at cross-process call #4\n" in in_turn.err.rpartition("done in")[2], in_turn.err


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.kind, marks=[pytest.mark.jax_version] * (case.kind in OF_JAX)) for case in IN_TURN],
)
def test_strict_raises_the_divergence_at_the_line_of_each_rank(in_turn: Result, case: Case) -> None:
    calls_before = sum(other.number for other in IN_TURN[: IN_TURN.index(case)])
    for rank, (_, where) in case.call_groups(2).items():
        check_error(case, errors_of(in_turn, int(rank))[case.kind], where, calls_before)


@pytest.mark.extended
def test_a_rank_that_waits_for_a_finished_one_fails(tmp_path: Path) -> None:
    case = KINDS["rank-0-only-end"]
    result = diverge(tmp_path, "strict", case.kind)
    assert (result.code, result.verdict()["outcome"]) == (1, "failed"), result.err
    check_error(case, (result.run_dir / "rank-0000.err").read_text(), place(case.kind), 0)


@pytest.mark.extended
def test_a_ring_of_pairs_that_wait_for_each_other(tmp_path: Path) -> None:
    result = diverge(tmp_path, "strict", "meshes-in-turn", size=3)
    assert result.code == 1, result.err
    for rank, pair in enumerate((r"0-1", r"1-2", r"0, ?2")):
        report = (result.run_dir / f"rank-{rank:04d}.err").read_text()
        assert re.search(rf"call #1 of ranks {pair}\n", report), report
        assert "waits in call #1 of ranks" in report and place("meshes-in-turn") in report, report
        assert "groups that share ranks must make their calls in one order" in report


# ---- record

_NAN = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.config.update("jax_debug_nans", True)
rank, sharding = jax.process_index(), NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))
step = jax.jit(lambda x: jnp.log(x).sum())
for k in range(3):
    shift = -2.0 if k == rank == 1 else 0.0
    x = jax.make_array_from_callback((8,), sharding, lambda index: np.ones((8,), np.float32)[index] + shift)
    step(x)
"""


@pytest.mark.extended
@pytest.mark.jax_version
def test_a_step_that_jax_runs_again_to_find_a_nan_is_no_divergence(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_NAN)
    result = jaxrun(tmp_path, "-n", "2", "--timeout", "100", "train.py")
    verdict = result.verdict()
    assert (result.code, verdict["culprits"], verdict["divergence"]) == (1, [1], ""), result.err
    assert "rank 1 of 2 raised FloatingPointError" in result.err and "disagree" not in result.err


@pytest.mark.extended
@pytest.mark.parametrize(
    "case",
    [pytest.param(KINDS[kind], id=kind, marks=[pytest.mark.jax_version] * (kind in OF_JAX)) for kind in RECORDED],
)
def test_record_reports_the_divergence(tmp_path: Path, case: Case) -> None:
    result = diverge(tmp_path, "record", case.kind, flags=STALL if case.ends == 124 else ())
    assert result.code == case.ends, result.err
    report = str(result.verdict()["divergence"])
    if case.unsaid:
        assert not report and "disagree" not in result.err, result.err
        assert all(where in result.err for _, where in case.call_groups(2).values()), result.err
        last = f"after call #{case.number - 1} jit({case.calls[0]})"
        assert case.ends != 124 or last in result.err.rpartition("no progress")[2], result.err
    else:
        check_report(case, 2, report)
        assert report in result.err


# ---- check and fail


@pytest.mark.parametrize(
    ("mode", "headline"),
    [
        ("check", "but its ranks were not in step"),
        extended("fail", "the ranks were out of step at cross-process call #13 ("),
    ],
)
def test_a_job_whose_programs_end_well_ends_as_failed(tmp_path: Path, mode: str, headline: str) -> None:
    case = KINDS["branch"]
    result = diverge(tmp_path, mode, case.kind)
    assert (result.code, result.verdict()["outcome"]) == (1, "diverged"), result.err
    assert result.out.count("the end") == 2 or mode == "fail"
    check_report(case, 2, str(result.verdict()["divergence"]))
    assert headline in result.err, result.err


@pytest.mark.extended
def test_fail_stops_all_ranks_once_they_are_found_to_differ(tmp_path: Path, script) -> None:
    """They have called both functions before, so that only the recorders show it, and would go on for long."""
    body = """
one, other = jax.jit(lambda a: a.sum()), jax.jit(lambda a: a.sum() * 2)
one(x), other(x)
for function in (one, other) if jr.rank == 0 else (other, one):
    function(x)
time.sleep(1000)
"""
    result = jaxrun(tmp_path, "-n", "2", "--lockstep", "fail", "--timeout", "200", str(script(SETTING + body)))
    assert (result.code, result.verdict()["outcome"]) == (1, "diverged"), result.err
    assert "the processes disagree at cross-process call #3\n" in result.err, result.err
    assert "--lockstep fail ended the job" in result.err, result.err


# ---- record, and compilers


# A compiler that waits for the other ranks, until the file of the first argument is there.
_COMPILES = """
from jax._src import compiler
compile_it = compiler.backend_compile_and_load
def compile_together(backend, module, *args, **more):
    if "step" in str(module.operation.attributes["sym_name"]):
        print("compiling", flush=True)
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.05)
    return compile_it(backend, module, *args, **more)
compiler.backend_compile_and_load = compile_together

@jax.jit
def step(a):
    return a * (3.0 if jr.rank == 1 else 2.0)

if jr.rank == 0:  # ahead of time, to look at it: that is nobody else's business
    jax.jit(lambda a: a.sum()).lower(x).compile()
step(x)
print("called")
"""


@pytest.mark.extended
@pytest.mark.jax_version
def test_a_difference_is_on_the_screen_while_the_compilers_wait(tmp_path: Path, script) -> None:
    go_on, screen = tmp_path / "go-on", tmp_path / "screen"
    program = script(SETTING + _COMPILES)
    with (
        screen.open("w") as err,
        started(tmp_path, "-n", "2", "--timeout", "200", str(program), str(go_on), stderr=err) as job,
    ):
        job.wait_until(lambda: "pass the value" in screen.read_text(), "report")
        job.wait_for_output("compiling", 2)
        assert "the processes disagree at cross-process call #1\n" in screen.read_text()
        assert "- %cst = stablehlo.constant dense<2.0" in screen.read_text()
        assert not any("called" in log.read_text() for log in job.run_dir.glob("rank-*.out"))
        go_on.touch()
        result = job.result()
    assert (result.code, result.verdict()["outcome"]) == (1, "diverged"), screen.read_text()
    assert str(result.verdict()["divergence"]) in screen.read_text()
    assert screen.read_text().count("the processes disagree") == 1, screen.read_text()


# ---- no call differs


@pytest.mark.extended
@pytest.mark.parametrize(("kind", "mode"), [("stopped", "record"), ("last-batch-sleep", "strict")])
def test_a_rank_that_is_stuck_is_named_with_its_line(tmp_path: Path, kind: str, mode: str) -> None:
    result = diverge(tmp_path, mode, kind, flags=STALL)
    assert (result.code, result.verdict()["outcome"], result.verdict()["divergence"]) == (124, "stall", ""), result.err
    shown = result.err.rpartition("no progress")[2]
    where = "stopped by a signal" if kind == "stopped" else place(kind)
    assert re.search(rf"^  1 rank +1 .*{where}", shown, re.MULTILINE), result.err
    assert re.search(rf"^  1 rank +0 .*{place(kind, 'the others')}", shown, re.MULTILINE), result.err
    if mode == "strict":  # those that wait for their turn are explained like those that wait in the call
        assert "waits for it in JAX" in str(result.verdict()["headline"]), result.err


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "mode", "words"),
    [
        ("callback", "record", "ValueError: a bad record"),
        ("fails", "strict", "ValueError: a bad record"),  # the others wait for its word, and are at no fault
    ],
)
def test_an_error_of_a_ranks_own_is_the_headline(tmp_path: Path, kind: str, mode: str, words: str) -> None:
    result = diverge(tmp_path, mode, kind)
    assert (result.code, result.verdict()["outcome"]) == (1, "failed"), result.err
    assert words in str(result.verdict()["traceback"]) and "DivergenceError" not in result.err, result.err


# ---- lockstep turned off, in a JAX that offers less, and with errors of its own


@pytest.mark.extended
@pytest.mark.jax_version
def test_off_leaves_jax_alone(start, script):
    body = """
from jax._src.interpreters import pxla
print(pxla.ExecuteReplicated.__call__.__module__, type(pxla.MeshExecutableFastpathData).__name__)
doubled = jax.jit(lambda a: a * 2)
doubled(x), doubled(x)
"""
    (worker,) = record(start, script, body, 1, local={"lockstep": "off"})
    assert (worker.flight.level, worker.flight.made, worker.flight.compiled) == (NOTHING, 0, [])
    assert worker.received(Call) == []
    (line,) = worker.out.splitlines()
    assert "jaxrun" not in line and line.endswith(" type"), line


# What JAX lacks, run before anything else.
_NO_FIELDS = "del pxla.MeshExecutableFastpathData._fields"
_OTHER_FROM_HLO = """
original = pxla.UnloadedMeshExecutable.from_hlo
pxla.UnloadedMeshExecutable.from_hlo = staticmethod(lambda *args, **kwargs: original(*args, **kwargs))
"""


@pytest.mark.extended
@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("taken", "mode", "level", "calls", "warnings"),
    [
        (_NO_FIELDS, "strict", FIRST_CALLS, [1], ["the first call of each program only", "strict is not possible"]),
        (_OTHER_FROM_HLO, "record", EVERY_CALL, [1, 2, 3], ["same name and shapes as equal"]),
    ],
)
def test_with_less_of_jax_less_is_recorded_and_rank_0_says_so(
    start, script, tmp_path, taken, mode, level, calls, warnings
):
    setting = "import jax\nfrom jax._src import pjit\nfrom jax._src.interpreters import pxla\n"
    script(setting + taken, "site/sitecustomize.py")
    body = "doubled = jax.jit(lambda a: a * 2)\nfor _ in range(3):\n    doubled(x)\n"
    env = {"PYTHONPATH": f"{tmp_path / 'site'}:{environment()['PYTHONPATH']}"}
    workers = record(start, script, body, env=env, local={"lockstep": mode})
    for worker in workers:
        assert (worker.flight.level, worker.flight.words[STRICT_WORD]) == (level, 0)
        assert [call.number for call in worker.flight.calls] == calls
        assert not any(call.waits_for_answer for call in worker.received(Call))
        assert "jit(<lambda>)" in worker.flight.compiled
    (line,) = workers[0].err.splitlines()
    assert all(warning in line for warning in warnings)
    assert workers[1].err == ""


@pytest.mark.extended
@pytest.mark.jax_version
def test_errors_of_the_recorders_own_are_recorded_and_the_program_goes_on(start, script):
    body = """
from jaxrun_runtime.lockstep import program_facts, program_signature
def broken(*_):
    raise KeyError("surprise")
program_signature.module_text = broken
for n in range(3):
    f = jax.jit(lambda a: a * n)
    f(x), f(x)
program_facts.call_info = broken
print(jax.jit(lambda a: a * 3 + 1)(x).shape, f(x).shape)
"""
    workers = record(start, script, body)
    one, other = (worker.flight for worker in workers)
    assert [worker.out.strip() for worker in workers] == ["(4, 3) (4, 3)"] * 2
    first, second = one.troubles
    assert first == "what a program computes is not known: KeyError: 'surprise'"
    assert "KeyError" in second and "surprise" in second
    assert one.level == COMPILATIONS
    assert [call.program["code"] for call in one.calls[:6]] == [""] * 6
    assert [call.chain for call in one.calls[:6]] == [call.chain for call in other.calls[:6]]


@pytest.mark.extended
@pytest.mark.jax_version
def test_without_a_recorder_the_program_runs(start, script):
    harness = start([script(SETTING + "jax.jit(lambda a: a * 2)(x)\n")], 1)
    os.ftruncate(harness.workers[0].flight_fd, 0)
    (worker,) = harness.run()
    assert worker.status == 0
    assert not worker.received(Failed)
    assert "has no flight recorder" in worker.err
