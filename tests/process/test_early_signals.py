"""Signals from jaxrun's first line on, the signal mask that it was given, and a fork server whose launcher has gone."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from harness import TIME_LIMIT, extended, jaxrun, started
from harness_worker import environment

from jaxrun.node.forkserver import client
from jaxrun.protocol.codec import encode
from jaxrun.protocol.forkserver_messages import ForkWorker

# Sends a signal to jaxrun as it calls a function, the first time after another function was called.
_SEND_AT_CALL = """
import os, sys
if sys.orig_argv[1:3] == ["-m", "jaxrun"]:
    todo, launcher = [part.split(":") for part in os.environ.pop("CALLS").split()], os.getpid()
    def trace(frame, event, argument):
        code = frame.f_code
        if todo and code.co_name == todo[0][1] and code.co_filename.endswith(todo[0][0]) and os.getpid() == launcher:
            is_dropped = todo.pop(0)[2:]
            if not todo:
                try:
                    os.kill(launcher, int(os.environ["SIGNAL"]))
                except KeyboardInterrupt:
                    if not is_dropped:
                        raise
    sys.settrace(trace)
"""
_ENTRY, _COMMANDS = "jaxrun/__main__.py:entry", "cli/main.py:main"
_CALLBACK_OF_IMPORT = "importlib._bootstrap>:cb"  # of a weak reference: Python drops an exception that is raised there
_CALLS = {
    "entry": (signal.SIGINT, _ENTRY),
    "an import before the commands": (signal.SIGINT, f"{_ENTRY} {_CALLBACK_OF_IMPORT}"),
    "the fork server starts": (signal.SIGINT, "client.py:start_process"),
    "an import of the commands": (signal.SIGINT, f"{_COMMANDS} {_CALLBACK_OF_IMPORT}"),
    "an import of the supervisor": (signal.SIGINT, f"run_job.py:run {_CALLBACK_OF_IMPORT}"),
    "an exception that C code drops": (signal.SIGINT, "run_job.py:run:dropped"),
    "the guard starts": (signal.SIGINT, "guard.py:_start"),
    "signals become events": (signal.SIGINT, "signals.py:__enter__"),
    "the attempt begins": (signal.SIGINT, "attempts.py:_run_attempt"),
    "workers are asked for": (signal.SIGINT, "spawn.py:fork_request"),
    "SIGTERM, the supervisor": (signal.SIGTERM, f"run_job.py:run {_CALLBACK_OF_IMPORT}"),
    "SIGTERM, signals become events": (signal.SIGTERM, "signals.py:__enter__"),
    "SIGALRM, the attempt begins": (signal.SIGALRM, "attempts.py:_run_attempt"),
    "SIGHUP, the attempt begins": (signal.SIGHUP, "attempts.py:_run_attempt"),
}
_IN_PLAIN_RUNS = tuple(_CALLS)[:4]  # which end before jaxrun has done much


@pytest.mark.parametrize(
    ("signum", "calls"),
    [
        pytest.param(*case, id=name) if name in _IN_PLAIN_RUNS else extended(*case, id=name)
        for name, case in _CALLS.items()
    ],
)
def test_a_signal_while_jaxrun_starts_ends_it(tmp_path: Path, script, signum: int, calls: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_SEND_AT_CALL)
    path = os.pathsep.join((str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")))
    env = {"PYTHONPATH": path, "CALLS": calls, "SIGNAL": str(int(signum))}
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which jaxrun would leave alone, as under nohup
    try:
        with started(tmp_path, "-n", "2", str(script("import time\ntime.sleep(600)")), env=env) as job:
            result = job.end()
    finally:
        signal.signal(signal.SIGHUP, ignored)
    assert result.code in (128 + signum, -signum if signum != signal.SIGINT else 130), result
    assert "Traceback" not in result.err and "ignored" not in result.err, result


_RAISED_LATE = """
import os, signal
from jaxrun_runtime import interrupts
interrupts.hold()
os.kill(os.getpid(), signal.SIGINT)
print("held")
try:
    interrupts.raise_in_program(lambda: print("reported"))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_that_comes_before_the_program_is_raised_as_it_begins() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _RAISED_LATE], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (found.stdout.split(), found.stderr) == (["held", "reported", "interrupted"], "")


# ---- the mask

_BLOCKED = {signal.SIGCHLD, signal.SIGUSR1}
_SHOW_MASK = """
import json, os, pathlib, signal
from jaxrun_runtime import rank
from jax.experimental.multihost_utils import sync_global_devices
mask = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
pathlib.Path(f"mask.{rank}").write_text(json.dumps(mask))
sync_global_devices("both have written")
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
sync_global_devices("never")
"""


@pytest.mark.parametrize("options", [(), extended(("--no-fork",)), extended(("--wrap", "nice"))], ids=" ".join)
def test_the_program_alone_gets_the_mask_that_jaxrun_was_given(tmp_path: Path, script, options: Iterable[str]) -> None:
    given = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)  # which jaxrun inherits
    try:
        result = jaxrun(tmp_path, "-n", "2", *options, str(script(_SHOW_MASK)))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, given)
    assert result.code == 137 and "rank 1 of 2 was killed by SIGKILL (9)" in result.err, result
    for rank in range(2):
        mask = set(json.loads((tmp_path / f"mask.{rank}").read_text()))
        assert mask & set(signal.Signals) == _BLOCKED, mask


_SHOW_INHERITED = """
import json, os, pathlib, resource, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
names = [name for name in dir(resource) if name.startswith("RLIMIT_") and name != "RLIMIT_NOFILE"]
facts = [status[name].strip() for name in ("Umask", "CapEff", "NoNewPrivs")], os.nice(0), sys.stdin.read()
facts = [*facts, *map(resource.getrlimit, (getattr(resource, name) for name in names))]
facts += [pathlib.Path("/proc/self", name).read_text() for name in ("oom_score_adj", "cgroup", "timerslack_ns")]
descriptor = int(os.environ["LOCKED"])
facts += [os.readlink(f"/proc/self/fd/{descriptor}"), os.get_inheritable(descriptor)]
pathlib.Path(sys.argv[1]).write_text(json.dumps(facts))
"""


# Becomes the command that follows, with what that inherits changed.
_CHANGE_WHAT_IS_INHERITED = """
import os, pathlib, resource, sys
os.nice(3)
os.umask(0o27)
resource.setrlimit(resource.RLIMIT_CORE, (4096, 4096))
pathlib.Path("/proc/self/oom_score_adj").write_text("517")
pathlib.Path("/proc/self/timerslack_ns").write_text("777777")
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.extended
@pytest.mark.parametrize("options", [(), ("--no-fork",)], ids=" ".join)
def test_the_program_inherits_what_it_would_under_python(tmp_path: Path, script, options: Iterable[str]) -> None:
    program, wait = str(script(_SHOW_INHERITED)), {"check": True, "timeout": TIME_LIMIT, "stdin": subprocess.DEVNULL}
    with open(tmp_path / "lock", "w") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        wait |= {"pass_fds": (locked.fileno(),)}
        changed = [sys.executable, "-c", _CHANGE_WHAT_IS_INHERITED, sys.executable]
        env = environment() | {"LOCKED": str(locked.fileno())}
        for words in ((), ("-m", "jaxrun", "-n", "1", "--no-run-dir", *options)):
            name = "under jaxrun" if words else "under python"
            subprocess.run([*changed, *words, program, str(tmp_path / name)], env=env, **wait)
    inherited, expected = (json.loads((tmp_path / f"under {one}").read_text()) for one in ("jaxrun", "python"))
    assert inherited == expected
    with open(tmp_path / "lock") as again:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no process of the job is left that holds it


# ---- a fork server


@pytest.mark.extended
def test_a_fork_server_whose_launcher_has_gone_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    server = client.start(sys.executable, environment())
    assert server.configure(["program.py"], environment())
    server.begin_attempt(1)
    with open(os.devnull, "rb") as end:
        server.send(encode(ForkWorker(0, {})), [end.fileno()] * 6)
    os.kill(server.pid, signal.SIGINT)  # as srun sends it to all processes of a step
    server.close()
    os.waitpid(server.pid, 0)
    assert capfd.readouterr().err == ""
