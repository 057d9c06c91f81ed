"""What a rank's children are told, and which of their calls of jax.distributed.initialize mean a job of their own."""

import ast
import importlib.util
import json
import os

import pytest

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.names import CHILD_OF, COORDINATOR_ADDRESS, INITIALIZE_IN_CHILD
from jaxrun.protocol.rank_or_child import is_child, is_rank
from jaxrun.records.output.noise import NoiseFilter
from jaxrun_runtime import children

_ENV = WorkerEnv("ab" * 16, 1, 4, 0, 2, host="h1")
_JOB = "10.0.0.1:4711"
_OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "job-1"}


@pytest.fixture(scope="module")
def child_side():
    spec = importlib.util.spec_from_file_location("child_side", children.SITE / "sitecustomize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _environment_of_rank(**more):
    environ = {COORDINATOR_ADDRESS: _JOB, **_OPEN_MPI, **more}
    children.tell_children(_ENV, environ)
    return environ


_NOT_A_JOB = {
    "nothing is given": (None, {}),
    "the rank's own coordinator is given": (_JOB, {}),
    "the variables of the rank are not all passed on": (None, {"PMIX_NAMESPACE": None, "OMPI_COMM_WORLD_SIZE": None}),
    "no address is inherited": (None, {COORDINATOR_ADDRESS: None}),
    "another variable has changed": (None, {"OMP_NUM_THREADS": "7"}),
}
_OWN_JOB = {
    "another coordinator is given": ("localhost:1", {}),
    "another coordinator stands in the environment": (None, {COORDINATOR_ADDRESS: "localhost:1"}),
    "another mpirun has started it": (None, {"PMIX_NAMESPACE": "job-2"}),
    "another step of Slurm has started it": (None, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_PROCID": "0"}),
}


@pytest.mark.parametrize(
    ("address", "changed", "own"),
    [(*case, False) for case in _NOT_A_JOB.values()] + [(*case, True) for case in _OWN_JOB.values()],
    ids=[*_NOT_A_JOB, *_OWN_JOB],
)
def test_a_child_joins_another_job_only_if_it_is_told_to(child_side, address, changed, own):
    environ = _environment_of_rank()
    parent = json.loads(environ[CHILD_OF])
    environ = {name: value for name, value in {**environ, **changed}.items() if value is not None}
    assert child_side.is_own_job(address, environ, parent) is own


@pytest.mark.parametrize(("before", "after"), [({}, ""), ({"PYTHONPATH": "a:b"}, ":a:b"), ({"PYTHONPATH": ""}, "")])
def test_the_directory_comes_first_on_pythonpath_and_once(before, after):
    environ = _environment_of_rank(**before)
    assert environ["PYTHONPATH"] == f"{children.SITE}{after}"
    children.tell_children(_ENV, environ)  # a job that a rank has started
    assert environ["PYTHONPATH"] == f"{children.SITE}{after}"


def test_the_rank_itself_does_not_count_as_a_child():
    rank = _environment_of_rank(JAXRUN_RANK="1")
    child = {**rank, CHILD_OF: rank[CHILD_OF].replace(f'"pid": {os.getpid()}', '"pid": 1')}
    assert [is_rank(environ) for environ in ({}, {"JAXRUN_RANK": "1"}, rank, child)] == [False, True, True, False]
    assert [is_child(environ) for environ in ({}, {"JAXRUN_RANK": "1"}, rank, child)] == [False, False, False, True]


def test_the_screen_shows_once_for_each_rank_what_all_its_children_say():
    line = f"{children.what_initialize_says(1)}\n".encode()
    assert line.startswith(INITIALIZE_IN_CHILD.encode()) and line.count(b"\n") == 1
    screen = NoiseFilter()
    assert screen.remove(b"a\n" + line + b"b\n" + line) == b"a\n" + line + b"b\n"
    assert screen.remove(line) == b""
    assert NoiseFilter().remove(line) == line


def test_the_childs_side_is_python_3_6():
    """A Python that cannot read it prints an error each time it starts, and leaves the user's sitecustomize out."""
    tree = ast.parse((children.SITE / "sitecustomize.py").read_text(), feature_version=(3, 7))
    futures = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    arguments = [argument for node in functions for argument in ast.walk(node.args) if isinstance(argument, ast.arg)]
    evaluated = [node.returns for node in functions] + [argument.annotation for argument in arguments]
    assert futures == []
    assert [ast.unparse(node) for node in evaluated if isinstance(node, ast.BinOp | ast.Subscript)] == []
