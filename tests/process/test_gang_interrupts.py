"""Python processes that use gangs, at Ctrl-C: it ends the start or the call, and the gang can be used."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from gang_script import session
from harness import wait_until

__all__ = ["session"]  # a fixture

_INTERRUPTED = """
def sleep():
    print("asleep")
    time.sleep(60)

def waits_in_cpp(pid):
    # For a while: what is compiled already goes from Python to its wait at once, unless no core is free for it.
    for _ in range(100):
        time.sleep(0.01)
        if "futex" not in open(f"/proc/{pid}/wchan").read():
            return False
    return True

def stuck(pid_of_0):
    if rank() == 0:
        meet()
    else:
        while not waits_in_cpp(pid_of_0):
            pass
        print("asleep")
        while True:
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                open("interrupted", "w").close()

def compiles(new):  # in no cache yet
    import jax, jax.numpy as jnp

    def long(x):
        for step in range(60):
            x = jnp.sin(x) @ x + step + new
        return x

    lowered = jax.jit(long).lower(jnp.ones((4, 4)))
    print("compiling")
    lowered.compile()
    time.sleep(60)

def interrupted(fn, *args, timeout):
    jaxrun.frontends.gang.call.INTERRUPT_TIMEOUT_S = timeout
    before = [worker.pid for worker in gang.workers]
    try:
        gang.run(fn, *args)
    except KeyboardInterrupt:
        print("caught", gang.healthy, gang.run(meet), [worker.pid for worker in gang.workers] == before, flush=True)
"""

_START = """
pool_for = gang_job.pool_for
gang_job.pool_for = lambda *args, **more: (print("starting", flush=True), pool_for(*args, **more))[1]
try:
    jaxrun.Gang(processes=2)
    while True:
        time.sleep(0.1)
except KeyboardInterrupt:
    print("caught", flush=True)
gang_job.pool_for = pool_for
gang = jaxrun.Gang(processes=2)
gang.run(meet)
"""


def test_ctrl_c_ends_a_start_or_the_call_and_leaves_a_gang_that_can_be_used(session):
    running = session(f"""{_INTERRUPTED}{_START}
interrupted(sleep, timeout=60)
interrupted(compiles, time.time() % 1000, timeout=1)
interrupted(stuck, gang.workers[0].pid, timeout=0.2)
jaxrun.frontends.gang.call.INTERRUPT_TIMEOUT_S = 60
gang.run(sleep)
""")
    running.wait_for("starting")
    running.interrupt()
    assert running.wait_for("[0] asleep")[0] == "caught"
    running.interrupt()
    running.wait_for("caught True ((2, 2), (2, 2)) True")
    running.wait_for("[0] compiling")
    running.interrupt()
    running.wait_for("caught True ((2, 2), (2, 2)) True")
    running.wait_for("[1] asleep")
    running.interrupt()
    running.wait_for("caught False ((2, 2), (2, 2)) False")
    running.wait_for("[1] asleep")
    running.interrupt()
    _, err = running.end(-signal.SIGINT, unclosed=True)
    assert "ranks 0-1 did not come back from the last call" in err, err
    assert err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.extended
def test_ctrl_c_while_results_arrive_or_an_earlier_call_is_waited_for_leaves_the_gang_as_it_was(session, tmp_path):
    running = session(f"""{_INTERRUPTED}
class Slow:
    def __reduce__(self):  # goes on once the caller has waited in vain
        open(f"packing-{{os.getpid()}}", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
        return str, ("slow",)

GangCall = jaxrun.frontends.gang.call.GangCall
find = GangCall._find_worth_waiting
GangCall._find_worth_waiting = lambda *args: (open("go", "w").close(), find(*args))[1]

gang = jaxrun.Gang(processes=2)
interrupted(Slow, timeout=0.2)
gang.start_call(sleep)
interrupted(rank, timeout=60)
call = gang.start_call(sleep)
try:
    call.results()
except KeyboardInterrupt:
    print("caught", gang.run(rank), flush=True)
""")
    wait_until(lambda: len(list(tmp_path.glob("packing-*"))) == 2, "the packing of both results")
    running.interrupt()
    running.wait_for("caught True ((2, 2), (2, 2)) True")
    running.wait_for("[1] asleep")
    running.interrupt()
    running.wait_for("caught True ((2, 2), (2, 2)) True")
    running.wait_for("[1] asleep")
    running.interrupt()
    running.wait_for("caught (0, 1)")
    running.end()


@pytest.mark.extended
def test_ctrl_c_ends_a_call_where_another_thread_receives_the_signal(session):
    """As with one that comes just before the wait for the ranks begins, no system call of the main thread ends."""
    running = session("""
def sleep():
    print("asleep")
    time.sleep(30)
    print("awake")

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
gang = jaxrun.Gang(processes=1)
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
try:
    gang.run(sleep)
except KeyboardInterrupt:
    print("caught")
""")
    running.wait_for("[0] asleep")
    wchan = Path(f"/proc/{running.process.pid}/wchan")
    wait_until(lambda: "poll" in wchan.read_text(), "wait for the rank")
    running.interrupt()
    assert running.wait_for("caught") == []
    running.end()
