"""One import of jax, then a fork for each worker, as good as a fresh one; a server that comes early, and stays."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness import jaxrun, kill, process_state, started, wait_until, wait_until_dead
from harness_worker import RANK_THREADS, environment

from jaxrun.files.procfs import children
from jaxrun.node.forkserver import client, prestart
from jaxrun.protocol.forkserver_messages import (
    ConfigureForkServer,
    ForkDeclined,
    ForkServerMessageDecoder,
    WorkerForked,
)
from jaxrun.protocol.names import SUBCOMMANDS
from jaxrun.protocol.probe_messages import Machine
from jaxrun.spec.backends.local import plan
from jaxrun.spec.job.job import Job

_ASK = """
import json, os, random, sys, time, threading
import numpy as np
from jaxrun_runtime import this_rank
env = this_rank.read({})
print(json.dumps({
    "random": random.random(),
    "numpy": np.random.random(),
    "environ": {k: v for k, v in os.environ.items() if k.startswith(("JAX", "PYTHON"))},
    "path": sys.path,
    "argv": sys.argv,
    "stdin": sys.stdin.read(),
    "session": os.getsid(0) == os.getpid(),
    "inherited": [os.get_inheritable(number) for number in (env.channel_fd, env.stacks_fd)],
    "threads": [thread.name for thread in threading.enumerate()],
}))
print("error of", os.environ["JAXRUN_RANK"], file=sys.stderr)
"""


def _write_decoys(script):
    """Modules in the directory where the worker starts, which must not get in its way."""
    for name in "random", "socket", "numpy", "jax", "worker":
        script("raise ValueError('the wrong module')", f"harness-0/{name}.py")


@pytest.mark.jax_version
def test_a_forked_worker_behaves_like_a_fresh_one(start, script, tmp_path):
    (tmp_path / "input").write_text("line 1\nline 2\n")
    _write_decoys(script)
    harness = start([script(_ASK, "elsewhere/program.py"), "a b"], 3, stdin=tmp_path / "input")
    workers = harness.run()
    assert [worker.status for worker in workers] == [0, 0, 0], harness.describe()
    assert [type(answer) for answer in harness.answers] == [WorkerForked] * 3
    assert [worker.err for worker in workers] == [f"error of {rank}\n" for rank in range(3)]
    results = [json.loads(worker.out) for worker in workers]
    assert len({one["random"] for one in results}) == 3
    assert len({one["numpy"] for one in results}) == 3
    assert [one["stdin"] for one in results] == ["line 1\nline 2\n", "", ""]
    for rank, one in enumerate(results):
        env = one["environ"]
        assert [env[name] for name in ("JAXRUN_RANK", "JAX_PROCESS_ID")] == [str(rank)] * 2
        assert env["JAX_NUM_PROCESSES"] == "3"
        assert not {name for name in env if name.endswith("_FD")}
        assert "PYTHONSAFEPATH" not in env
        assert one["argv"] == [str(tmp_path / "elsewhere" / "program.py"), "a b"]
        assert one["path"][0] == str(tmp_path / "elsewhere")
        assert one["path"][1:3] == environment()["PYTHONPATH"].split(":")
        assert "" not in one["path"] and str(harness.folder) not in one["path"]  # where it was started
        assert one["session"]
        assert one["inherited"] == [False, False]
        assert [name for name in one["threads"] if name != "jaxrun-preemption"] == RANK_THREADS  # rank 0 may have it


@pytest.mark.extended
@pytest.mark.jax_version
def test_modules_of_the_current_directory_do_not_get_in_a_fresh_workers_way(start, script):
    _write_decoys(script)
    program = script("import sys, random\nprint(random.random() < 1)", "elsewhere/program.py")
    (worker,) = start([program], 1, fork=False).run()
    assert (worker.status, worker.out) == (0, "True\n"), worker.err


# ---- declining


def _path(tmp_path, script, name, text):
    script(text, f"site/{name}.py")
    return {"PYTHONPATH": f"{tmp_path / 'site'}:{environment()['PYTHONPATH']}"}


_IMPORTED_BY_JAX = "\nimport sys\nsys.path.remove({site!r})\ndel sys.modules[__name__]\nimport opt_einsum\n"
THREADS = {
    "sitecustomize": "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "opt_einsum": f"import _thread, time; _thread.start_new_thread(time.sleep, (60,)){_IMPORTED_BY_JAX}",
}


@pytest.mark.extended
@pytest.mark.jax_version
@pytest.mark.parametrize("module", THREADS)
def test_it_declines_where_a_thread_runs_already(start, script, tmp_path, module):
    text = THREADS[module].format(site=str(tmp_path / "site"))
    harness = start([script("")], 1, env=_path(tmp_path, script, module, text))
    assert harness.answers == [ForkDeclined("1 thread ran before the fork", "")]
    _, status = os.waitpid(harness.server, 0)
    harness.server = 0
    assert status == 0


@pytest.mark.extended
def test_it_says_that_no_more_processes_may_be_started(start, script, tmp_path):
    no_fork = "import errno, os\ndef fork(): raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))\nos.fork = fork\n"
    harness = start([script("")], 1, env=_path(tmp_path, script, "sitecustomize", no_fork))
    assert harness.answers == [ForkDeclined("no process can be forked: Resource temporarily unavailable", "")]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise ValueError('é' * 1_000_000)", "ValueError"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("import sys; sys.exit(3)", "SystemExit"),
    ],
)
def test_a_jax_that_cannot_be_imported_is_reported_with_its_traceback(start, script, tmp_path, text, error):
    harness = start([script("")], 1, env=_path(tmp_path, script, "jax", text))
    (answer,) = harness.answers
    assert isinstance(answer, ForkDeclined)
    assert answer.reason.partition(":")[0] == error
    if error != "SystemExit":
        assert answer.traceback.startswith("Traceback")
        assert f'File "{tmp_path / "site" / "jax.py"}", line 1' in answer.traceback
        assert "jaxrun_runtime" not in answer.traceback
    assert ("characters left out" in answer.traceback) is (error == "ValueError")  # or it fits into no message


def test_a_fresh_worker_reports_a_broken_jax_in_its_failure_report(start, script, tmp_path):
    broken = _path(tmp_path, script, "jax", "raise ValueError('broken jax')")
    (worker,) = start([script("")], 1, fork=False, env=broken).run()
    failure = worker.failure()
    assert (failure.stage, failure.error, failure.message) == ("start", "ValueError", "broken jax")
    assert worker.status == 1


# ---- the server that is started before the command line is read: kept if it fits the plan, else it ends


@pytest.fixture
def servers(monkeypatch):
    """Fork servers without processes: the ends of their channels, by process id."""
    ends = []
    with contextlib.ExitStack() as stack:

        def start(interpreter, environ):
            ours, theirs = map(stack.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            ends.append(theirs)
            return client.ForkServer(len(ends) - 1, ours, environ)

        monkeypatch.setattr(client, "start", start)
        yield ends


def _server_for(started, fork=True, **request):
    job = Job(program=("train.py", "a b"), platform="cpu", **request)
    wanted = plan(job, {"PATH": "/bin"}, started.job_id, Machine("box", cores=(0, 1)))
    return prestart.server_for(wanted.argv, wanted.base_env({"PATH": "/bin"}), started, fork=fork)


def _start():
    return prestart.start(["-n", "2", "train.py"], {"PATH": "/bin", "JAXRUN_RANK": "7"})


def test_an_early_server_that_fits_is_used(servers):
    started = _start()
    assert _server_for(started, processes=2, env={"MINE": "x"}) is started.server and len(servers) == 1
    (order,) = ForkServerMessageDecoder().feed(servers[0].recv(65536))
    assert isinstance(order, ConfigureForkServer) and order.environment["MINE"] == "x"


def test_an_early_server_that_does_not_fit_or_has_died_ends_and_there_is_another_if_the_plan_forks(servers):
    interpreters = _start()
    assert _server_for(interpreters, env={"PYTHONHASHSEED": "3"}).pid == 1
    died = _start()
    servers[2].close()
    assert _server_for(died).pid == 3
    fresh = _start()
    assert _server_for(fresh, fork=False) is None and len(servers) == 5
    assert [started.server.channel.fileno() for started in (interpreters, died, fresh)] == [-1] * 3


_NOT_A_JOB = [
    [],
    ["--help"],
    ["-n", "2", "--dry-run", "x.py"],
    ["--no-fork", "x"],
    ["ps"],
    *([name] for name in SUBCOMMANDS),
]


def test_a_command_that_forks_nothing_gets_no_fork_server():
    assert [prestart.start(words, {}) for words in _NOT_A_JOB] == [None] * len(_NOT_A_JOB)
    assert prestart.start(["x.py"], {"_JAXRUN_COMPLETE": "bash_source"}) is None


# ---- one server for all attempts of a job

_PARENTS = """
import os, signal, sys
def read(pid, name):
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
launcher = os.getppid()
of_launcher = map(int, read(launcher, f"task/{launcher}/children").split())
servers = [(pid, read(pid, "stat").split()[-31]) for pid in of_launcher if b"forkserver" in read(pid, "cmdline")]
print(launcher, servers, flush=True)
if os.environ["JAXRUN_ATTEMPT"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_workers_of_all_attempts_come_from_one_server_which_the_launcher_keeps(tmp_path):
    (tmp_path / "program.py").write_text(_PARENTS)
    result = jaxrun(tmp_path, "-n", "1", "--max-restarts", "1", "program.py")
    first, second = (line for line in result.out.splitlines() if "[(" in line)
    assert first == second and first.count("(") == 1, result.out


# A launcher with a fork server, whose copy forks the workers of one attempt; both say when they are bound to it.
_SERVER_WITH_COPY = """
import os, socket, time
from jaxrun_runtime import linux
from jaxrun_runtime.forkserver import workers

ours, theirs = socket.socketpair()
if os.fork() == 0:
    linux.die_with_maker(theirs)
    os.write(1, b"%d\\n" % os.getpid())
    assert workers._fork_copy(theirs)
    os.write(1, b"%d\\n" % os.getpid())
time.sleep(600)
"""


def test_a_server_and_its_copy_that_are_stopped_die_with_their_launcher():
    pipe = subprocess.PIPE
    launcher = subprocess.Popen([sys.executable, "-c", _SERVER_WITH_COPY], stdout=pipe, text=True, env=environment())
    servers = [int(launcher.stdout.readline()) for _ in range(2)]
    try:
        for pid in servers:
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda pid=pid: process_state(pid) == "T")
        launcher.kill()
        launcher.wait()
        wait_until_dead(*servers)
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
        kill(servers)


@pytest.mark.extended
def test_the_server_of_the_next_attempt_dies_with_a_launcher_and_a_guard_that_are_killed_though_it_is_stopped(tmp_path):
    (tmp_path / "program.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    with started(tmp_path, "-n", "1", "--max-restarts", "1", "program.py") as job:
        wait_until(lambda: (job.run_dir / "rank-0000.out").exists() and (job.run_dir / "rank-0000.out").read_text())
        launcher = job.process.pid

        def find(word):
            return [pid for pid in children(launcher) if word in Path(f"/proc/{pid}/cmdline").read_bytes()]

        (server,) = wait_until(lambda: len(find(b"forkserver")) == 1 and find(b"forkserver"))
        (guard,) = find(b"--max-restarts")
        os.kill(server, signal.SIGSTOP)
        os.kill(guard, signal.SIGKILL)
        job.process.kill()
        wait_until_dead(server)


def test_a_fork_server_of_another_interpreter_is_not_used():
    class Server:
        closed = False

        def configure(self, program, environ):
            raise AssertionError("it has another interpreter")

        def close(self):
            self.closed = True

    server = Server()
    argv = ("/tmp/1/copy/bin/python", "/tmp/1/copy/lib/jaxrun_runtime", "train.py")
    assert prestart.server_for(argv, {}, prestart.PrestartedServer("ab" * 16, server)) is None and server.closed
