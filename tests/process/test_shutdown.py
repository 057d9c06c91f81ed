"""The end of a worker: one job, and each rank's program ends in a way of its own."""

import gzip
import re

import pytest

from jaxrun.protocol.worker_messages import Done, Failed, ThreadFailed

pytestmark = pytest.mark.jax_version

_CASES = {
    "number": "import sys; sys.exit(3)",
    "text": "import sys; sys.exit('no data')",
    "object": "import sys\nclass Odd:\n    def __str__(self): raise ValueError\nsys.exit(Odd())",
    "raises": "raise ValueError('bad record')",
    "interrupted": "raise KeyboardInterrupt",
    "own-hook": """
import sys
sys.excepthook = lambda *args: print("own hook:", args[1], file=sys.stderr)
1 / 0
""",
    "broken-hook": "import sys\nsys.excepthook = None\nraise ValueError('bad record')",
    "handlers": """
import atexit, time, threading
def say(word):
    print(word, flush=True)
for number in 1, 2, 3:
    atexit.register(say, number)
def fail():
    raise ValueError("in a handler")
atexit.register(fail)
def last():
    say("first")
    time.sleep(0.2)
    say(time.time())
atexit.register(last)
""",
    "handlers-after-failure": """
import atexit, os, time
def wait():
    deadline = time.monotonic() + 90
    while not os.path.exists("heard") and time.monotonic() < deadline:
        time.sleep(0.01)
    print("heard" if os.path.exists("heard") else "nobody heard")
atexit.register(wait)
raise ValueError
""",
    "executes": "import os, sys; os.execlp(sys.executable, sys.executable, '-c', 'pass')",
    "executes-in-a-child": """
import os
pid = os.fork()
if not pid:
    os.execlp("sh", "sh", "-c", "exit 3")
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
    "closes-channel": "import os; from jaxrun_runtime import this_rank; os.close(this_rank.read({}).channel_fd)",
    "takes-channels-number": """
import os
from jaxrun_runtime import this_rank
number = this_rank.read({}).channel_fd
file = open("file", "w")
os.dup2(file.fileno(), number)
""",
    "takes-channels-number-socket": """
import os, socket, subprocess
from jaxrun_runtime import this_rank
ours, theirs = socket.socketpair()
os.dup2(theirs.fileno(), this_rank.read({}).channel_fd)
subprocess.Popen(["cat"], stdin=ours)  # prints what is sent there, and ends with the worker
""",
    "thread": """
import atexit, threading, time
word = "a global"
atexit.register(print, "handler")
def late():
    time.sleep(0.2)
    print(word, __name__)
threading.Thread(target=late).start()
""",
    "thread-fails": "import threading; threading.Thread(target=lambda: 1 / 0, name='loader').start()",
    "daemon": "import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
    "late-signals": """
import signal, time
def fail(number, frame):
    raise TimeoutError("late")
signal.signal(signal.SIGALRM, fail)
class Keeper:
    def __del__(self):
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)  # again and again, until the worker has gone
        time.sleep(0.1)
        print("finalized")
keeper = Keeper()
""",
    "signal-while-threads-run": """
import atexit, signal, sys, threading, time
signal.signal(signal.SIGALRM, lambda *_: sys.exit(3))
atexit.register(print, "handler")
def waits(frame):
    return frame is not None and (frame.f_code.co_name == "_shutdown" or waits(frame.f_back))
def late():
    main = threading.main_thread().ident
    while not waits(sys._current_frames()[main]):
        time.sleep(0.01)
    signal.pthread_kill(main, signal.SIGALRM)
    time.sleep(99)
threading.Thread(target=late).start()
""",
    "open-files": """
import gzip
text = open("text", "w")
text.write("written")
zipped = gzip.open("zipped", "wb")
zipped.write(b"written")
binary = [open("binary", "wb")]
binary.append(binary)  # a cycle
binary[0].write(b"written")
class Keeper:
    def __del__(self): print("finalized", word)
word = "with globals"
keeper = Keeper()
""",
    "open-file-of-a-failure": "file = open('text', 'w')\nfile.write('written')\nraise ValueError",
    "c-output": "import ctypes; ctypes.CDLL(None).printf(b'from C')",
    "no-newline": "print('partial', end='')",
    "after-rank-0": """
import re, time
while not (said := re.search(r"handler (\\d+)\\n", open("../harness-0/out-0").read())):
    time.sleep(0.01)
time.sleep(0.3)
state = open(f"/proc/{said[1]}/stat").read().split()[2]
print(said[1], "lives" if state != "Z" else "has ended")
""",
    "collective-handler": "import jax, atexit; atexit.register(lambda: print(jax.device_count()))",
}


_RANK_0 = """
import atexit, os
atexit.register(lambda: print("handler", os.getpid(), flush=True))
raise ValueError("bad record")
"""


@pytest.fixture(scope="module")
def cases(run_cases, request):
    return run_cases(_CASES, on_failed=lambda worker: (worker.folder / "heard").touch(), rank_0=_RANK_0)


STATUS = {
    **{"number": 3, "text": 1, "object": 1, "raises": 1, "interrupted": 130},
    **{"own-hook": 1, "handlers": 0, "handlers-after-failure": 1, "closes-channel": 0, "takes-channels-number": 0},
    **dict.fromkeys(("late-signals", "signal-while-threads-run"), 0),
    **dict.fromkeys(("thread", "thread-fails", "daemon", "open-files", "c-output"), 0),
}


@pytest.mark.parametrize(("name", "status"), STATUS.items(), ids=STATUS)
def test_the_exit_status_is_what_python_would_give(cases, name, status):
    worker = cases[name]
    assert worker.status == status, worker.err
    if status:
        assert worker.failure().status == status
        assert not worker.received(Done)
    else:
        assert not worker.received(Failed)
        assert len(worker.received(Done)) == (0 if "channel" in name else 1)


def test_the_message_of_a_sys_exit_is_printed_and_reported(cases):
    assert cases["text"].err == "no data\n"
    assert (cases["text"].failure().error, cases["text"].failure().message) == ("SystemExit", "no data")
    assert cases["number"].err == ""


def test_an_exception_is_reported_but_printed_by_the_launcher_or_a_hook_of_the_program(cases):
    assert cases["raises"].err == ""
    failure = cases["raises"].failure()
    assert (failure.error, failure.message, failure.stage) == ("ValueError", "bad record", "program")
    assert failure.traceback.endswith("ValueError: bad record\n")
    assert cases["own-hook"].err == "own hook: division by zero\n"
    text = cases["broken-hook"].err
    assert text.index("Error in sys.excepthook:") < text.index("Original exception was:")
    assert text.endswith("ValueError: bad record\n")


def test_exit_handlers_run_once_in_reverse_order_before_the_worker_reports_done(cases):
    worker = cases["handlers"]
    first, ended, *numbers = worker.out.split()
    assert (first, numbers) == ("first", ["3", "2", "1"])
    assert float(ended) < worker.received(Done)[0].time
    assert "in a handler" in worker.err
    assert cases["collective-handler"].out == f"{2 * (len(_CASES) + 1)}\n"  # they can still use JAX
    assert cases["handlers-after-failure"].out == "heard\n"  # the failure report comes before they run


def test_nothing_is_written_to_a_file_that_has_reused_the_channels_descriptor(cases):
    assert (cases["takes-channels-number"].folder / "file").read_bytes() == b""
    assert cases["takes-channels-number-socket"].out == ""


def test_threads_are_waited_for_and_find_the_programs_globals(cases):
    assert cases["thread"].out == "a global __main__\nhandler\n"


def test_a_signal_handler_that_raises_ends_the_wait_for_threads_as_in_python_and_is_not_run_later(cases):
    assert (cases["late-signals"].out, cases["late-signals"].err) == ("finalized\n", "")
    assert cases["signal-while-threads-run"].out == "handler\n"
    assert cases["signal-while-threads-run"].err.endswith("SystemExit: 3\n")


def test_a_failed_thread_is_reported_and_printed(cases):
    (failure,) = cases["thread-fails"].received(ThreadFailed)
    assert (failure.thread, failure.error) == ("loader", "ZeroDivisionError")
    assert failure.traceback.endswith("ZeroDivisionError: division by zero\n")
    assert re.match(r"Exception in thread loader:\nTraceback", cases["thread-fails"].err)


def test_a_program_may_not_replace_its_rank_but_its_child_may_replace_itself(cases):
    failure = cases["executes"].failure()
    assert (failure.error, failure.status) == ("ExecError", 1)
    assert "os.execv would replace this process by" in failure.message and "jaxrun --env" in failure.message
    assert "unsupported" not in failure.traceback.replace("unsupported.ExecError", "")
    assert cases["executes-in-a-child"].out == "3\n"


def test_files_left_open_are_written_out_and_objects_finalized(cases):
    folder = cases["open-files"].folder
    assert (folder / "text").read_text() == "written"
    assert (folder / "binary").read_bytes() == b"written"
    assert gzip.decompress((folder / "zipped").read_bytes()) == b"written"
    assert cases["open-files"].out == "finalized with globals\n"
    assert (cases["open-file-of-a-failure"].folder / "text").read_text() == "written"


def test_output_without_a_newline_or_from_c_is_not_lost(cases):
    assert cases["no-newline"].out == "partial"
    assert cases["c-output"].out == "from C"


def test_rank_0_that_has_failed_keeps_the_coordinator_until_the_others_have_ended(cases):
    word, pid = cases["rank 0"].out.split()
    assert (word, cases["rank 0"].status) == ("handler", 1)
    assert cases["after-rank-0"].out == f"{pid} lives\n"
    assert -6 not in {worker.status for worker in cases.values()}  # without the coordinator, JAX aborts them
