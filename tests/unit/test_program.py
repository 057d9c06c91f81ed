"""The program is found, and its settings are read, without running or importing any of it."""

import os
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.errors import UsageError
from jaxrun.job.program import find_module, find_script, forbids_fork


@pytest.mark.parametrize("name", ["train.py", "with space.py", "line\nbreak.py", "ä'\".py", "no_suffix"])
def test_a_script_is_found_whatever_it_is_called(tmp_path, name):
    (tmp_path / name).write_text("x = 1\n")
    assert find_script(tmp_path / name) == tmp_path / name


def test_a_directory_or_zip_file_with_a_main_runs_as_under_python(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").touch()
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    assert find_script(tmp_path / "app") == tmp_path / "app" / "__main__.py"
    assert find_script(tmp_path / "app.zip") is None


def test_a_mistyped_name_suggests_the_nearest(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "data.csv").touch()
    with pytest.raises(UsageError, match=r"trian\.py' does not exist; did you mean .*/train\.py\?$"):
        find_script(tmp_path / "trian.py")


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"there is no directory '.*/gone'"):
        find_script(tmp_path / "gone" / "train.py")


def test_a_name_like_no_other_says_how_programs_are_named(tmp_path):
    with pytest.raises(UsageError, match="a module is started with -m"):
        find_script(tmp_path / "package.train")


def test_python_itself_is_to_be_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="leave python3 out"):
        find_script(Path("python3"))


def test_a_directory_without_a_main_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"is a directory without __main__.py"):
        find_script(tmp_path)


def test_a_pipe_is_refused_because_every_process_reads_the_program(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a regular file"):
        find_script(tmp_path / "pipe")


def test_a_program_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "loop.py").symlink_to("loop.py")
    with pytest.raises(UsageError, match=r"loop\.py' cannot be read: Too many levels"):
        find_script(tmp_path / "loop.py")
    with pytest.raises(UsageError, match="cannot be read: Input/output error"):
        find_script(Path("/proc/self/mem"))


def test_a_name_too_long_for_the_file_system_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: File name too long"):
        find_script(tmp_path / ("x" * 5000))


@pytest.fixture
def package(tmp_path):
    """pkg/__main__.py and pkg/sub/job.py; importing any part of it fails."""
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    for folder in (tmp_path / "pkg", tmp_path / "pkg" / "sub"):
        (folder / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "pkg" / "__main__.py").touch()
    (tmp_path / "pkg" / "sub" / "job.py").touch()
    (tmp_path / "plain.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("plain", "plain.py"),
        ("pkg", "pkg/__main__.py"),
        ("pkg.sub.job", "pkg/sub/job.py"),
        ("pkg.sub", None),
        ("pkg.gone", None),
    ],
)
def test_a_modules_source_is_found_without_importing_its_package(package, name, source):
    assert find_module(name, str(package)) == (package / source if source else None)


@pytest.mark.parametrize(
    ("name", "source"),
    [("space.deep.job", "space/deep/job.py"), ("space.deep", None), ("space.gone.job", None), ("space.run", None)],
)
@pytest.mark.parametrize("installed", [False, True])
def test_folders_between_need_no_init_file(tmp_path, monkeypatch, name, source, installed):
    """None is for what Python itself refuses when the rank runs it."""
    (tmp_path / "space" / "deep").mkdir(parents=True)
    (tmp_path / "space" / "deep" / "job.py").touch()
    if installed:
        monkeypatch.syspath_prepend(tmp_path)
    found = find_module(name, str(tmp_path.parent if installed else tmp_path))
    assert found == (tmp_path / source if source else None)


def test_a_main_module_in_a_folder_without_init_file_is_found(tmp_path):
    (tmp_path / "space" / "app").mkdir(parents=True)
    (tmp_path / "space" / "app" / "__main__.py").touch()
    assert find_module("space.app", str(tmp_path)) == tmp_path / "space" / "app" / "__main__.py"


class BrokenFinder:
    """On sys.meta_path, as packages put theirs there."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        raise RuntimeError("a bug in somebody's finder")


def test_a_finder_that_raises_does_not_stop_the_look_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.meta_path", [BrokenFinder])
    (tmp_path / "job.py").touch()
    assert find_module("job", str(tmp_path)) == tmp_path / "job.py"
    with pytest.raises(UsageError, match="no module named 'nosuch'"):
        find_module("nosuch", str(tmp_path))


def test_the_name_of_the_main_module_is_no_module(tmp_path):
    with pytest.raises(UsageError, match="no module named '__main__'"):
        find_module("__main__", str(tmp_path))


def test_an_installed_module_is_found(tmp_path):
    found = find_module("json.tool", str(tmp_path))
    assert found is not None and found.name == "tool.py"


def test_the_current_directory_comes_first(tmp_path):
    (tmp_path / "json.py").touch()
    assert find_module("json", str(tmp_path)) == tmp_path / "json.py"


def test_a_module_that_is_nowhere_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no module named 'nosuch' in .* or among the installed"):
        find_module("nosuch.part", str(tmp_path))


def test_a_file_name_after_m_says_to_leave_m_out(package):
    with pytest.raises(UsageError, match=r"'plain' is not a package; leave -m out to run the file plain\.py"):
        find_module("plain.py", str(package))
    with pytest.raises(UsageError, match=r"'plain' is not a package$"):
        find_module("plain.part", str(package))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# jaxrun: no-fork\n", True),
        ("#!/usr/bin/env python\n\n  #jaxrun:no-fork  (it starts threads)\n", True),
        ("\n" * 19 + "# jaxrun: no-fork", True),
        ("\n" * 20 + "# jaxrun: no-fork", False),
        ("# jaxrun: no-forking\n", False),
        ("x = '# jaxrun: no-fork'\n", False),
        ("", False),
    ],
)
def test_a_program_declines_forking_in_its_first_lines(tmp_path, text, expected):
    path = tmp_path / "p.py"
    path.write_text(text)
    assert forbids_fork(path) is expected


@given(st.binary())
def test_any_bytes_may_be_a_program(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("p") / "p.py"
    path.write_bytes(data)
    assert forbids_fork(path) in (True, False)


def test_a_missing_source_requests_nothing(tmp_path):
    assert forbids_fork(tmp_path / "gone.py") is False
