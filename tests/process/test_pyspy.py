"""C frames by py-spy: parsing of its output, and dumps that nobody waits for."""

import gc
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from fakes import fake_module
from harness import TIME_LIMIT, process_state, wait_until

from jaxrun.analysis.diagnosis.stacks import NATIVE_STACKS_TIMEOUT_S
from jaxrun.analysis.verdict.stack_text import format_by_text
from jaxrun.node.agent import pyspy
from jaxrun.node.agent.pyspy import PySpy, format_dump

LIBJAX = "/v/lib/python3.13/site-packages/jaxlib/libjax_common.so"
LIBC = "/usr/lib/x86_64-linux-gnu/libc.so.6"
LONG = "absl::lts_20260526::internal_any_invocable::RemoteInvoker<false, " + "tsl::Future<void>, " * 20


HERE = 2**22 + 4711  # no process has this number


def frame(name, filename, line=0, *, python=True):
    return {"name": name, "filename": filename, "module": None if python else filename, "line": line}


def c_frame(name, filename):
    return frame(name, filename, python=False)


def thread(*frames, pid=HERE, name="MainThread"):
    return {"pid": HERE, "os_thread_id": pid, "thread_name": name, "frames": list(frames)}


IN_GLOO = thread(
    c_frame("0x7f09d70a3f16", LIBC),
    c_frame("0x7f09d70a4f16", LIBC),
    c_frame("pthread_cond_timedwait", LIBC),
    c_frame("gloo::allreduce", LIBJAX),
    c_frame(LONG, LIBJAX),
    c_frame("PjitFunction_tp_vectorcall", LIBJAX),
    frame("0x7ffd778ecd40", "?"),
    frame("step", "/job/train.py", 23),
    frame("<module>", "/job/train.py", 157),
    frame("run", "/v/lib/python3.13/site-packages/jaxrun_runtime/run_program.py", 46),
    frame("_run_code", "<frozen runpy>", 88),
    c_frame("0x7f09d704524a", LIBC),
)
LOADER = thread(c_frame("read", LIBC), frame("load", "/job/data.py", 7), pid=4720, name="Loader-1")
OURS = thread(frame("wait", "/usr/lib/python3.13/threading.py", 359), pid=4721, name="Thread-1")

DENIED = "Permission Denied: Try running again with elevated permissions by going 'sudo env \"PATH=$PATH\" !!'\n"
FAILED = (
    "Error: Failed to get stack traces\n\nCaused by:\n    0: Failed to suspend process\n"
    "    1: unexpected waitpid result\n\nStack backtrace:\n   0: <E as anyhow::context::ext::StdError>::ext_context\n"
)


def test_the_programs_frames_and_what_is_below_them_are_shown_innermost_last():
    assert format_dump(json.dumps([OURS, LOADER, IN_GLOO]), "", HERE).splitlines() == [
        '  File "/job/train.py", line 157, in <module>',
        '  File "/job/train.py", line 23, in step',
        "    PjitFunction_tp_vectorcall   libjax_common.so",
        f"    {LONG[:90]}…   libjax_common.so",
        "    gloo::allreduce   libjax_common.so",
        "    pthread_cond_timedwait   libc.so.6",
        "    ?   libc.so.6",
        "  thread Loader-1:",
        '  File "/job/data.py", line 7, in load',
        "    read   libc.so.6",
    ]


def test_the_stacks_of_a_stopped_process_note_that_c_frames_are_missing():
    text = format_dump(
        json.dumps([thread(frame("step", "/job/train.py", 23))]), "", HERE, without_c="a stopped process"
    )
    assert text == '  (a stopped process is seen without C frames)\n  File "/job/train.py", line 23, in step'
    assert format_dump("[]", "", HERE) == "  no frames"


def test_a_refusal_of_the_kernel_comes_with_the_command_to_type(monkeypatch, tmp_path):
    (tmp_path / "scope").write_text("1\n")
    monkeypatch.setattr(pyspy, "_YAMA", str(tmp_path / "scope"))
    text = format_dump("", DENIED, HERE)
    assert f"may not look into process {HERE}: sudo sysctl kernel.yama.ptrace_scope=0 allows it (it is 1)" in text
    monkeypatch.setattr(pyspy, "_YAMA", str(tmp_path / "none"))
    assert format_dump("", DENIED, HERE).endswith("ask as root; in a container: --cap-add=SYS_PTRACE")


@pytest.mark.parametrize(
    ("out", "err", "reason"),
    [
        ("", FAILED, "Failed to get stack traces: unexpected waitpid result"),
        ("", "", "it said nothing"),
        ('{"a": 1}', "x", "x"),
        ('[{"frames": 1}]', "x", "x"),
    ],
)
def test_a_failure_of_py_spy_is_summarised_in_one_line(out, err, reason):
    assert format_dump(out, err, HERE) == f"  py-spy could not look into process {HERE}: {reason}"


@pytest.fixture
def py_spy(tmp_path):
    """Makes a program that takes py-spy's place: a line of shell, in which $pid is the process and $how the option."""

    def make(line):
        program = tmp_path / "py-spy"
        program.write_text(f'#!/bin/sh\n[ "$*" = "dump --json $3 --pid $5" ] || exit 9\nhow=$3 pid=$5\n{line}\n')
        program.chmod(0o755)
        return str(program)

    return make


ANSWER = """printf '[{"os_thread_id": %s, "thread_name": "", "frames": [{"name": "%s", "filename": "a.py",
"module": null, "line": 1}]}]' $pid $how"""


def finish(dump):
    wait_until(lambda: dump.has_ended(time.monotonic()))
    return dump.text()


@pytest.fixture
def processes(monkeypatch):
    """All that are started."""
    started = []

    def start(*arguments, **more):
        started.append(subprocess.Popen(*arguments, **more))
        return started[-1]

    names = {**vars(subprocess), "Popen": start}
    monkeypatch.setattr(pyspy, "subprocess", fake_module("subprocess", **names))
    return started


def test_a_stopped_process_is_dumped_without_halting_it(py_spy):
    assert finish(PySpy(HERE, time.monotonic(), program=py_spy(ANSWER))) == '  File "a.py", line 1, in --native'
    text = finish(PySpy(HERE, time.monotonic(), stopped=True, program=py_spy(ANSWER)))
    assert text.splitlines()[1] == '  File "a.py", line 1, in --nonblocking'


@pytest.mark.parametrize("end", ["deadline", "close"])
def test_one_that_does_not_answer_is_killed_at_the_deadline_or_by_closing(py_spy, processes, end):
    gc.collect()  # of tests before this one
    fds = len(os.listdir("/proc/self/fd"))
    dump = PySpy(HERE, 1000.0, program=py_spy("exec sleep 600"))
    assert not dump.has_ended(999.0 + NATIVE_STACKS_TIMEOUT_S)
    if end == "close":
        dump.close()
    else:
        assert dump.has_ended(dump.deadline)
        assert dump.text() == f"  py-spy has not answered in {NATIVE_STACKS_TIMEOUT_S:g} s"
    assert [process.wait(TIME_LIMIT) for process in processes] == [-signal.SIGKILL]
    assert len(os.listdir("/proc/self/fd")) <= fds


def test_it_may_be_reaped_by_the_agent(py_spy, processes):
    """As the agent does with all its children."""
    dump = PySpy(HERE, time.monotonic(), program=py_spy(ANSWER))
    os.waitpid(processes[0].pid, 0)
    assert "--native" in finish(dump)


def test_without_py_spy_the_command_to_install_it_is_shown(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    dump = PySpy(HERE, 0.0)
    assert dump.has_ended(0.0)
    assert dump.text() == f"  py-spy is not installed for {tmp_path}/python; install it: pip install py-spy"


def test_it_is_found_beside_python_though_its_environment_is_not_active(monkeypatch, py_spy, tmp_path):
    program = py_spy(ANSWER)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert pyspy.find_pyspy() == program


def test_one_that_cannot_be_started_costs_no_more_than_its_answer(tmp_path):
    (tmp_path / "py-spy").write_text("#!/nowhere/sh\n")
    (tmp_path / "py-spy").chmod(0o755)
    dump = PySpy(HERE, 0.0, program=str(tmp_path / "py-spy"))
    assert dump.has_ended(0.0)
    assert dump.text() == f"  {tmp_path}/py-spy could not be started: No such file or directory"


def test_ranks_with_the_same_c_frames_are_shown_together():
    texts = {0: "  gloo::allreduce", 1: "  read", 2: "  gloo::allreduce"}
    assert format_by_text(texts, {}) == "ranks 0, 2:\n  gloo::allreduce\n\nrank 1:\n  read"


def test_py_spy_itself_shows_c_frames():
    """Whether this machine allows it or not, an answer comes, in one of the two forms."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import time\nprint('ready', flush=True)\ntime.sleep(60)"], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        wait_until(lambda: process_state(child.pid) == "S", "sleep")
        text = finish(PySpy(child.pid, time.monotonic()))
    finally:
        child.kill()
        child.communicate()
    assert ('File "<string>", line 3, in <module>' in text and "nanosleep" in text) or text.startswith("  py-spy ")
