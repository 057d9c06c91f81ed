"""scripts/preload-check: what counts as a difference between a program with and without preloading."""

import sys
from copy import deepcopy
from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "scripts" / "preload-check.d"


@pytest.fixture(scope="module")
def differences():
    sys.path.insert(0, str(FOLDER))
    try:
        return import_module("compare").differences
    finally:
        del sys.path[0]


def _rank(number):
    return {
        "sys.modules": ["sys", "jax", "jaxrun_runtime.worker", "flax"],
        "cwd": {"directory": "/work"},
        "warnings filters": ["a", "b"],
        "threads": {"of the kernel": ["python", "python", "tf_XLAEigen"]},
        "atexit": 7,
        "own values": ["flax:.pid"],
        "values": {"flax:.pid": str(100 + number), "flax:.level": "3", "jaxrun:.x": "1"},
    }


def _run(change=lambda state, number: None):
    ranks = [_rank(number) for number in range(2)]
    for number, state in enumerate(ranks):
        change(state, number)
    return ranks


WITHOUT = [_run(), _run(lambda state, number: state["values"].update({"flax:.pid": str(200 + number)}))]


def test_runs_that_differ_by_no_more_than_two_without_do_not_differ(differences):
    def own(state, number):
        state["values"] |= {"flax:.pid": str(300 + number), "jaxrun:.x": "2"}
        state["own values"] += ["flax:.other"] if number else []
        state["threads"]["of the kernel"].remove("python")  # a pool that starts again when it is used

    assert differences(WITHOUT, _run(own)) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda s, n: s["cwd"].update(directory="/"), "cwd: directory is /, and /work without"),
        (lambda s, n: s.update(atexit=8), "atexit: is 8, and 7 without"),
        (lambda s, n: s["warnings filters"].reverse(), "warnings filters: all is ['b', 'a'], and ['a', 'b'] without"),
        (lambda s, n: s["values"].update({"flax:.pid": "5"}), "values: flax:.pid is the same on all ranks (5)"),
        (lambda s, n: s["own values"].clear(), "own values: flax:.pid is not there, and 1 without"),
        (lambda s, n: s["values"].pop("flax:.level"), "values: flax:.level is not there, and 3 without"),
        (lambda s, n: s["sys.modules"].append("optax"), "sys.modules: only with preloading: optax"),
        (lambda s, n: s["sys.modules"].remove("flax"), "sys.modules: only without: flax"),
        (lambda s, n: s["sys.modules"].sort(), "sys.modules: flax stands where sys stands without"),
        (
            lambda s, n: s["threads"]["of the kernel"].append("a thread"),
            "threads: of the kernel: a thread is 1, and not there without",
        ),
        (lambda s, n: n or s["cwd"].update(directory="/"), "cwd: directory is /, and /work without"),
    ],
)
def test_what_a_program_would_see_is_named(differences, change, line):
    before = deepcopy(WITHOUT)
    assert line in differences(WITHOUT, _run(change))
    assert before == WITHOUT


def test_of_many_differences_in_one_part_the_first_are_shown_and_the_others_counted(differences):
    found = differences(WITHOUT, _run(lambda s, n: s["values"].update({f"flax:.x{i}": "" for i in range(9)})), most=4)
    assert len(found) == 5 and found[-1] == "values: and 5 more"


def test_each_package_of_the_table_that_is_preloaded_has_a_program_that_uses_it(monkeypatch):
    from jaxrun.spec.job.preload_table import PRELOADABLE

    monkeypatch.syspath_prepend(str(FOLDER))
    uses = import_module("uses").USES
    assert {name for name, entry in PRELOADABLE.items() if entry.safe} - {"jax"} == uses.keys() - {"blackjax", "netket"}
    for use in uses.values():
        compile(use.imports + use.code, "use", "exec")
