"""Lockstep turned off, in a JAX that offers less, and with errors of its own."""

import os

import pytest
from harness_worker import SETTING, environment, record

from jaxrun.protocol.flight_file import COMPILATIONS, EVERY_CALL, FIRST_CALLS, STRICT_WORD
from jaxrun.protocol.worker_messages import Call, Failed

pytestmark = pytest.mark.jax_version


def test_off_leaves_jax_alone(start, script):
    body = """
from jax._src.interpreters import pxla
print(pxla.ExecuteReplicated.__call__.__module__, type(pxla.MeshExecutableFastpathData).__name__)
doubled = jax.jit(lambda a: a * 2)
doubled(x), doubled(x)
"""
    (worker,) = record(start, script, body, 1, local={"lockstep": "off"})
    assert not worker.flight.written
    assert worker.received(Call) == []
    (line,) = worker.out.splitlines()
    assert "jaxrun" not in line and line.endswith(" type"), line


# What JAX lacks, run before anything else.
_NO_FIELDS = "del pxla.MeshExecutableFastpathData._fields"
_OTHER_FROM_HLO = """
original = pxla.UnloadedMeshExecutable.from_hlo
pxla.UnloadedMeshExecutable.from_hlo = staticmethod(lambda *args, **kwargs: original(*args, **kwargs))
"""


@pytest.mark.parametrize(
    ("taken", "mode", "level", "calls", "warnings"),
    [
        (_NO_FIELDS, "strict", FIRST_CALLS, [1], ["the first call of each program only", "strict is not possible"]),
        (_OTHER_FROM_HLO, "record", EVERY_CALL, [1, 2, 3], ["same name and shapes for the same"]),
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


def test_without_a_recorder_the_program_runs(start, script):
    harness = start([script(SETTING + "jax.jit(lambda a: a * 2)(x)\n")], 1)
    os.ftruncate(harness.workers[0].flight_fd, 0)
    (worker,) = harness.run()
    assert worker.status == 0
    assert not worker.received(Failed)
    assert "has no flight recorder" in worker.err
