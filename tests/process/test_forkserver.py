"""One import of jax, then a fork for each worker: each must be as good as one of its own."""

import json
import os

import pytest
from harness_worker import RANK_THREADS, environment

from jaxrun.protocol.forkserver_messages import ForkDeclined, WorkerForked

pytestmark = pytest.mark.jax_version

_ASK = """
import json, os, random, sys, time, threading
import numpy as np
print(json.dumps({
    "random": random.random(),
    "numpy": np.random.random(),
    "environ": {k: v for k, v in os.environ.items() if k.startswith(("JAX", "PYTHON"))},
    "path": sys.path,
    "argv": sys.argv,
    "stdin": sys.stdin.read(),
    "session": os.getsid(0) == os.getpid(),
    "inherited": [os.get_inheritable(int(os.environ[f"JAXRUN_{name}_FD"])) for name in ("CHANNEL", "STACKS")],
    "threads": [thread.name for thread in threading.enumerate()],
}))
print("error of", os.environ["JAXRUN_RANK"], file=sys.stderr)
"""


@pytest.fixture
def answers(start, script, tmp_path):
    (tmp_path / "input").write_text("line 1\nline 2\n")
    harness = start([script(_ASK), "a b"], 3, stdin=tmp_path / "input")
    workers = harness.run()
    assert [worker.status for worker in workers] == [0, 0, 0], harness.describe()
    assert [type(answer) for answer in harness.answers] == [WorkerForked] * 3
    assert [worker.err for worker in workers] == [f"error of {rank}\n" for rank in range(3)]
    return harness, [json.loads(worker.out) for worker in workers]


def test_a_forked_worker_is_as_good_as_a_fresh_one(answers, tmp_path):
    harness, results = answers
    assert len({one["random"] for one in results}) == 3
    assert len({one["numpy"] for one in results}) == 3
    assert [one["stdin"] for one in results] == ["line 1\nline 2\n", "", ""]
    for rank, one in enumerate(results):
        env = one["environ"]
        assert [env[name] for name in ("JAXRUN_RANK", "JAX_PROCESS_ID")] == [str(rank)] * 2
        assert env["JAX_NUM_PROCESSES"] == "3"
        assert env["JAXRUN_CHANNEL_FD"] != "-1"
        assert "PYTHONSAFEPATH" not in env
        assert one["argv"] == [str(tmp_path / "program0.py"), "a b"]
        assert one["path"][0] == str(tmp_path)
        assert one["path"][1:3] == environment()["PYTHONPATH"].split(":")
        assert "" not in one["path"] and str(harness.folder) not in one["path"]  # where it was started
        assert one["session"]
        assert one["inherited"] == [False, False]
        assert one["threads"] == RANK_THREADS


def _path(tmp_path, script, files):
    for name, text in files.items():
        script(text, f"site/{name}")
    return {"PYTHONPATH": f"{tmp_path / 'site'}:{environment()['PYTHONPATH']}"}


@pytest.mark.parametrize(
    "start_thread",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "import _thread, time; _thread.start_new_thread(time.sleep, (60,))",
    ],
)
@pytest.mark.parametrize("module", ["sitecustomize", "opt_einsum"])
def test_it_declines_where_a_thread_runs_already(start, script, tmp_path, start_thread, module):
    if module != "sitecustomize":  # something that jax imports
        start_thread += f"\nimport sys\nsys.path.remove({str(tmp_path / 'site')!r})\ndel sys.modules[__name__]"
        start_thread += "\nimport opt_einsum\n"
    harness = start([script("")], 1, env=_path(tmp_path, script, {f"{module}.py": start_thread}))
    assert harness.answers == [ForkDeclined("1 thread ran before the fork", "")]
    _, status = os.waitpid(harness.server, 0)
    harness.server = 0
    assert status == 0


def test_it_says_that_no_more_processes_may_be_started(start, script, tmp_path):
    no_fork = "import errno, os\ndef fork(): raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))\nos.fork = fork\n"
    harness = start([script("")], 1, env=_path(tmp_path, script, {"sitecustomize.py": no_fork}))
    assert harness.answers == [ForkDeclined("no process can be forked: Resource temporarily unavailable", "")]


@pytest.mark.parametrize("text", ["raise ValueError('broken jax')", "import no_such_module", "import sys; sys.exit(3)"])
def test_a_jax_that_cannot_be_imported_is_reported_with_its_traceback(start, script, tmp_path, text):
    harness = start([script("")], 1, env=_path(tmp_path, script, {"jax.py": text}))
    (answer,) = harness.answers
    assert isinstance(answer, ForkDeclined)
    assert answer.reason.partition(":")[0] in ("ValueError", "ModuleNotFoundError", "SystemExit")
    if "exit" not in text:
        assert f'File "{tmp_path / "site" / "jax.py"}", line 1' in answer.traceback
        assert "jaxrun_runtime" not in answer.traceback


def test_a_huge_traceback_fits_into_one_answer(start, script, tmp_path):
    harness = start([script("")], 1, env=_path(tmp_path, script, {"jax.py": "raise ValueError('é' * 1_000_000)"}))
    (answer,) = harness.answers
    assert answer.traceback.startswith("Traceback") and "characters left out" in answer.traceback


def test_a_fresh_worker_reports_a_broken_jax_in_its_failure_report(start, script, tmp_path):
    harness = start(
        [script("")], 1, fork=False, env=_path(tmp_path, script, {"jax.py": "raise ValueError('broken jax')"})
    )
    (worker,) = harness.run()
    failure = worker.failure()
    assert (failure.stage, failure.error, failure.message, worker.status) == (
        "start",
        "ValueError",
        "broken jax",
        1,
    )


@pytest.mark.parametrize("fork", [True, False])
def test_modules_of_the_current_directory_do_not_get_in_the_way(start, script, tmp_path, fork):
    for name in "random", "socket", "numpy", "jax", "worker", "program":
        script("raise ValueError('the wrong module')", f"harness-0/{name}.py")
    program = script("import sys, random\nprint(random.random() < 1)", "elsewhere/program.py")
    (worker,) = start([program], 1, fork=fork).run()
    assert (worker.status, worker.out) == (0, "True\n"), worker.err
