"""Strict mode: every call waits until all its ranks are about to make it."""

import re
import time

import pytest
from recording import SETTING, line_of, record

from jaxrun.protocol.flight_file import STRICT_WORD
from jaxrun.protocol.worker_messages import Call, Done

pytestmark = pytest.mark.jax_version


def test_in_strict_mode_every_call_waits_for_the_others(start, script):
    body = """
doubled = jax.jit(lambda a: a * 2)
for _ in range(3):
    doubled(x)
jax.jit(lambda a: a + 1)(jnp.ones(3))
made_ahead = doubled.lower(x).compile()
made_ahead(x), made_ahead(x)
def in_thread():
    doubled(x)
thread = threading.Thread(target=in_thread)
thread.start()
thread.join()
"""
    for worker in record(start, script, body, local={"lockstep": "strict"}):
        calls = worker.received(Call)
        first, *others = [(call.number, call.waits_for_answer, call.is_compiled) for call in calls]
        assert first == (1, True, False)  # before its program is compiled; the next one is compiled ahead of time
        assert others == [(n, True, True) for n in range(1, 7)]
        assert [call.number for call in worker.flight.calls] == list(range(1, 7))
        assert worker.flight.words[STRICT_WORD] == 1


_STRAYS = """
@jax.jit
def good(a):
    return a + 1
@partial(jax.jit, static_argnums=1)
def step(a, s):
    return a * s
good(x)
for _ in range(2):
    try:
        step(x, 2.0 + jr.rank)
    except jr.DivergenceError as error:
        print(error, flush=True)
good(x)
"""


def test_a_program_may_go_on_after_a_lockstep_error(start, script):
    for worker in record(start, script, _STRAYS, local={"lockstep": "strict"}):
        numbers = [int(line.split()[1].strip("#:")) for line in worker.out.splitlines()]
        assert numbers == [2, 3]
        assert [call.number for call in worker.flight.calls] == [1, 4]
        assert worker.flight.pending is None


@pytest.mark.parametrize("ahead", [False, True])
def test_out_of_step_is_an_error_at_the_users_line(start, script, ahead):
    body = """
def main():
    f = jax.jit(lambda a: a * (2.0 + jr.rank))
    if AHEAD:
        f = f.lower(x).compile()
    f(x)  # here
main()
""".replace("AHEAD", str(ahead))
    workers = start([script(SETTING + body)], 2, local={"lockstep": "strict"}).run(kill_on_failure=False)
    for worker in workers:
        words = worker.failure()
        assert ("jit(<lambda>)" in worker.flight.compiled) == ahead
        assert (words.error, worker.status, words.notes) == ("DivergenceError", 1, ())
        assert words.message.startswith("call #1: 0: program")
        frames = [line for line in words.traceback.splitlines() if line.startswith("  File ")]
        assert [re.sub(r".*, line (\d+), in (.*)", r"\1 \2", frame) for frame in frames] == [
            f"{line_of(body, 'here') + 1} <module>",
            f"{line_of(body, 'here')} main",
        ]
        assert words.traceback.splitlines()[-1].startswith("jaxrun_runtime.DivergenceError: call #1: ")


def test_a_thread_may_wait_for_its_call_while_the_main_thread_waits_to_leave(start, script):
    body = """
summed = jax.jit(lambda a: a * 2)
summed(x)
def late():
    time.sleep(0.3)
    summed(x)
    print("called", flush=True)
threading.Thread(target=late, daemon=True).start()
"""
    harness = start([script(SETTING + body)], 2, local={"lockstep": "strict"})
    deadline = time.monotonic() + 30
    while not all("called" in worker.out for worker in harness.workers) and time.monotonic() < deadline:
        harness.poll(0.02)
        if not harness._all(Done):
            harness.send_due()
        harness.answer_calls()
    harness.run()
    for worker in harness.workers:
        assert (worker.status, worker.out.split()) == (0, ["called"]), worker.err
        assert [call.number for call in worker.flight.calls] == [1, 2]


def test_a_rank_that_waits_ends_when_its_agent_does(start, script):
    body = """
jax.jit(lambda a: a * 2)(x) if jr.rank == 0 else time.sleep(60)
print("not reached", flush=True)
"""
    harness = start([script(SETTING + body)], 2, local={"lockstep": "strict"})
    first = harness.workers[0]
    deadline = time.monotonic() + 30
    while not first.received(Call) and time.monotonic() < deadline:
        harness.poll(0.02)
        harness.send_due()
    first.channel.close()
    while first.status is None and time.monotonic() < deadline:
        harness.poll(0.02)
    assert first.status == 70
    assert "not reached" not in first.out
