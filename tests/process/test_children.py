"""Children of a rank: none joins the job as that rank, whatever started it and whatever it inherits."""

import json
import os
import subprocess
import sys

import pytest
from harness_worker import environment
from worker_harness import worker_harnesses

from jaxrun_runtime import children

pytestmark = pytest.mark.jax_version

# By these JAX's own detection would take a child for rank 0 of 1, and begin to listen at an address of its own.
_OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
_SAYS = [children.what_initialize_says(0)]

# Calls that all do nothing, made by one child.
_NOT_JOINING = """
jax.distributed.initialize()
from jax.distributed import initialize; initialize()
from jax._src.distributed import initialize; initialize()
jax.distributed.initialize(job, 1, 0)
jax.distributed.initialize(num_processes=3, process_id=2)
jax.distributed.initialize(cluster_detection_method="ompi")
"""
# What each child runs, whether it joins something then, and what it says.
_CHILDREN = {
    "the rank's": (_NOT_JOINING, False, _SAYS),
    "another address": ("jax.distributed.initialize(f'127.0.0.1:{free_port()}', 1, 0)", True, []),
    "another variable": (
        "os.environ['JAX_COORDINATOR_ADDRESS'] = f'127.0.0.1:{free_port()}'; jax.distributed.initialize()",
        True,
        [],
    ),
}
_PROLOGUE = """
import json, os, socket
import jax
job = os.environ["JAX_COORDINATOR_ADDRESS"]
held = socket.socket()  # so that nobody else gets the port
held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
def free_port():
    held.bind(("127.0.0.1", 0))
    return held.getsockname()[1]
"""
_EPILOGUE = """
print(json.dumps([jax.process_count(), jax.distributed.is_initialized()]))
"""
_STARTS_CHILDREN = """
import json, subprocess, sys
for source in json.loads({sources!r}):
    child = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    print(json.dumps([child.stdout, child.stderr, child.returncode]))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """What each child of a rank has written, and its exit status."""
    folder = tmp_path_factory.mktemp("children")
    sources = [f"{_PROLOGUE}\n{call}\n{_EPILOGUE}" for call, _, _ in _CHILDREN.values()]
    (folder / "program.py").write_text(_STARTS_CHILDREN.format(sources=json.dumps(sources)))
    with worker_harnesses(folder) as begin:
        (rank,) = begin([folder / "program.py"], env=_OPEN_MPI).run()
    return dict(zip(_CHILDREN, map(json.loads, rank.out.splitlines()), strict=True))


@pytest.mark.parametrize("name", _CHILDREN)
def test_initialize_in_a_child_does_nothing_unless_it_is_for_a_job_of_its_own(ended, name):
    out, err, status = ended[name]
    _, joins, says = _CHILDREN[name]
    assert status == 0, err
    assert json.loads(out) == [1, joins]
    assert err.splitlines() == says


_POOL = """
import multiprocessing, sys
import jax
jax.distributed.initialize()

def work(number):
    return number, jax.process_count(), "sitecustomize" in sys.modules

if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(1, maxtasksperchild=1) as pool:
        print(pool.map(work, range(2), chunksize=1))
"""


@pytest.mark.extended
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.extended)])
def test_a_pool_may_import_a_main_file_that_initializes(start, script, method):
    for rank, worker in enumerate(start([script(_POOL.format(method=method))], 2).run()):
        assert worker.out == "[(0, 1, False), (1, 1, False)]\n"
        assert set(worker.err.splitlines()) == {children.what_initialize_says(rank)}


_FORKS = """
import os, sys, warnings, jax
from jaxrun_runtime import restore
warnings.simplefilter("ignore")  # JAX warns of forks
if not os.fork():
    jax.distributed.initialize()
    jax.distributed.initialize()
    print(restore({}), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.extended
def test_a_forked_process_is_told_the_same_and_takes_no_part_in_what_ranks_do_together(start, script):
    (worker,) = start([script(_FORKS)]).run()
    assert (worker.out, worker.err.splitlines()) == ("None\n", _SAYS)


# ---- the file itself


def _run_with_site(tmp_path, code, *, own):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.found = __file__")
    path = os.pathsep.join([str(children.SITE), *([str(tmp_path)] if own else [])])
    env = {**environment(), "PYTHONPATH": path, "JAXRUN_CHILD_OF": "null"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_a_sitecustomize_of_the_users_own_runs_as_if_there_were_no_other(tmp_path):
    code = "import sys; print(found, sys.modules['sitecustomize'].__file__, *sys.path)"
    result = _run_with_site(tmp_path, code, own=True)
    own = str(tmp_path / "sitecustomize.py")
    assert result.stdout.split()[:2] == [own, own] and str(children.SITE) not in result.stdout
    assert result.stderr == ""


@pytest.mark.extended
def test_without_a_sitecustomize_jax_is_found_as_before(tmp_path):
    code = """
import sys, importlib.util
print("sitecustomize" in sys.modules)
spec = importlib.util.find_spec("jax.distributed")
print(type(spec.loader).__name__, spec.loader.get_source(spec.name)[:1])
"""
    result = _run_with_site(tmp_path, code, own=False)
    assert (result.stdout, result.stderr) == ("False\nSourceFileLoader #\n", "")
