"""The worker in real processes, from its first message to its end."""

import os
import signal
import subprocess
import sys

import pytest
from harness import wait_until, wait_until_dead
from harness_worker import environment

from jaxrun.protocol.worker_messages import CoordinatorReady, DeviceReport, Done, Failed, Hello, Run, StartCoordinator

_CASES = {
    "fork-ends": """
import os, sys
pid = os.fork()
if pid == 0:
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
    "fork-runs-to-the-end": """
import os, time, atexit
pid = os.fork()
atexit.register(lambda: print("handler", flush=True))
if pid:
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
""",
    "fork-fails": """
import os, sys
pid = os.fork()
if pid == 0:
    raise ValueError("in the child")
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
    "fork-thread-fails": """
import os, threading
pid = os.fork()
if pid == 0:
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    os._exit(0)
os.waitpid(pid, 0)
""",
    "subprocess": """
import subprocess, sys
code = "import jaxrun_runtime as jr; print(jr.rank > 0)"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
""",
    "hard-exit": "import os; os._exit(7)",
    "segfault": "import ctypes; ctypes.string_at(0)",
}


@pytest.fixture(scope="module")
def cases(run_cases):
    return run_cases(_CASES)


@pytest.mark.extended
@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("fork-ends", "5\n"),
        ("fork-runs-to-the-end", "handler\n0\nhandler\n"),
        ("fork-fails", "1\n"),
        ("fork-thread-fails", ""),
        ("subprocess", "True\n\n"),
    ],
)
def test_processes_of_the_program_are_its_own_business(cases, name, out):
    worker = cases[name]
    assert (worker.status, worker.out) == (0, out), worker.err
    assert [type(message) for message in worker.messages] == [Hello, DeviceReport, Done]


@pytest.mark.extended
@pytest.mark.jax_version
def test_a_forked_process_prints_its_error_like_any_other(cases):
    assert "ValueError: in the child\n" in cases["fork-fails"].err
    assert "ZeroDivisionError" in cases["fork-thread-fails"].err


@pytest.mark.jax_version
@pytest.mark.parametrize(("name", "status"), [("hard-exit", 7), ("segfault", -signal.SIGSEGV)])
def test_an_end_without_a_failure_report_shows_in_the_status(cases, name, status):
    assert cases[name].status == status
    assert not cases[name].received(Failed) and not cases[name].received(Done)


@pytest.mark.jax_version
def test_a_fatal_signal_leaves_its_stack_with_the_agent(cases):
    text = os.pread(cases["segfault"].stacks_fd, 2**20, 0).decode()
    assert "Segmentation fault" in text
    assert "in string_at" in text


_WAITS = "import time\nprint('started', flush=True)\ndef wait_here():\n    time.sleep(60)\nwait_here()\n"


def _poll_until(harness, condition):
    wait_until(lambda: harness.poll(0.01) or condition())


@pytest.mark.jax_version
def test_a_worker_sends_its_messages_in_the_order_of_the_protocol(start, script):
    harness = start([script("print('ran')")], 2)
    first, second = harness.workers
    _poll_until(harness, lambda: first.received(Hello) and second.received(Hello))
    harness.send_due()  # StartCoordinator, for the first alone
    _poll_until(harness, lambda: first.received(CoordinatorReady))
    assert not first.received(DeviceReport)  # rank 0 waits for the other
    harness.send_due()  # Join, for the second
    _poll_until(harness, lambda: first.received(DeviceReport) and second.received(DeviceReport))
    assert [worker.out for worker in harness.workers] == ["", ""]  # nobody starts before Run
    harness.run()
    assert [[type(message) for message in worker.messages] for worker in harness.workers] == [
        [Hello, CoordinatorReady, DeviceReport, Done],
        [Hello, DeviceReport, Done],
    ]
    assert [(worker.status, worker.out) for worker in harness.workers] == [(0, "ran\n")] * 2


@pytest.mark.extended
@pytest.mark.jax_version
def test_a_fresh_worker_is_pinned_knows_its_simulated_host_and_shows_its_stacks_at_any_time(start, script):
    core = min(os.sched_getaffinity(0))
    boot_id = "12345678-1234-1234-1234-123456789abc"
    local = {"cpus": (core,), "host": "h2", "simulated_boot_id": boot_id}
    shows = 'print(os.sched_getaffinity(0), socket.gethostname(), open("/proc/sys/kernel/random/boot_id").read())'
    harness = start([script(f"import os, socket\n{shows}\n{_WAITS}")], 1, fork=False, local=local)
    (worker,) = harness.workers
    _poll_until(harness, lambda: harness.send_due() or "started" in worker.out)
    assert [type(message) for message in worker.messages] == [Hello, CoordinatorReady, DeviceReport]
    worker.wait_for_stacks("in wait_here")
    assert worker.live
    cores, *host, _ = worker.out.split()
    assert cores == f"{{{core}}}"
    if "forbids namespaces" not in worker.err:
        assert host == ["h2", boot_id]


@pytest.mark.parametrize("fork", [True, False])
def test_it_dies_with_its_agent(tmp_path, script, fork):
    code = f"""
import ctypes, pathlib, sys, time
sys.path[:] = {sys.path!r}
from worker_harness import WorkerHarness
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
harness = WorkerHarness(pathlib.Path({str(tmp_path)!r}), [{str(script(_WAITS))!r}], 2, fork={fork})
while not all(worker.out for worker in harness.workers):
    harness.poll(0.01)
    harness.send_due()
print(*[worker.pid for worker in harness.workers], flush=True)
time.sleep(60)
"""
    agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment())
    pids = [int(word) for word in agent.stdout.readline().split()]
    assert len(pids) == 2
    agent.kill()
    agent.wait()
    agent.stdout.close()
    wait_until_dead(*pids)


@pytest.mark.extended
def test_it_ends_by_itself_when_the_agent_hangs_up(start, script):
    harness = start([script("")], 1)
    (worker,) = harness.workers
    worker.send(StartCoordinator("127.0.0.1"))
    _poll_until(harness, lambda: worker.received(DeviceReport))
    worker.channel.close()
    _poll_until(harness, lambda: worker.status is not None)
    assert worker.status == 70


@pytest.mark.extended
def test_a_worker_that_has_not_joined_ends_too_and_a_message_out_of_turn_is_a_protocol_error(start, script):
    harness = start([script("")], 2)
    first, second = harness.workers
    _poll_until(harness, lambda: first.received(Hello) and second.received(Hello))
    first.send(Run())
    second.channel.close()
    _poll_until(harness, lambda: first.received(Failed) and second.status is not None)
    failure = first.failure()
    assert (failure.stage, failure.error) == ("join", "ProtocolError")
    assert "expected StartCoordinator or Join" in failure.message
    assert second.status == 70


def test_without_the_protocols_variables_the_error_says_how_to_start_a_worker():
    env = {name: value for name, value in environment().items() if not name.startswith("JAXRUN_")}
    result = subprocess.run([sys.executable, "-m", "jaxrun_runtime", "x.py"], capture_output=True, text=True, env=env)
    assert result.returncode == 1
    assert result.stderr == (
        "jaxrun_runtime: JAXRUN_JOB_ID is not set: this process was not started by jaxrun, or the command of --wrap "
        "passes on no variables. Start the program with: jaxrun -n PROCESSES PROGRAM\n"
    )
