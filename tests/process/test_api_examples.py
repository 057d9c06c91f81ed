"""The examples in the docstrings of the API, in Python prompts, show what happens; … stands for any text."""

import doctest
import os
import sys
import time

import pytest

import jaxrun
from jaxrun.frontends.jobs.job_handle import JobRank
from jaxrun.records.history.rank_output import OutputLine

OF_JOBS = {"JobRank": JobRank, "OutputLine": OutputLine}


class Checker(doctest.OutputChecker):
    def check_output(self, want, got, optionflags):
        return super().check_output(want.replace("…", "..."), got, optionflags | doctest.ELLIPSIS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory with hello.py, and with a job that has run it on two ranks."""
    path = tmp_path_factory.mktemp("api")
    (path / "hello.py").write_text("print('hello')\n")
    before = os.getcwd()
    os.chdir(path)
    jaxrun.run("hello.py", processes=2)
    os.chdir(before)
    return path


@pytest.mark.extended
@pytest.mark.parametrize("name", [*jaxrun.__all__, *OF_JOBS])
def test_the_example_of_the_docstring_shows_what_happens(name, directory, monkeypatch):
    monkeypatch.chdir(directory)
    thing = OF_JOBS[name] if name in OF_JOBS else getattr(jaxrun, name)
    names = {"jaxrun": jaxrun, "os": os, "sys": sys, "time": time, "__name__": "__main__"}
    example = doctest.DocTestParser().get_doctest(thing.__doc__, names, name, None, None)
    assert example.examples
    report = []
    runner = doctest.DocTestRunner(Checker(), verbose=False)
    assert runner.run(example, out=report.append, clear_globs=False).failed == 0, "".join(report)
