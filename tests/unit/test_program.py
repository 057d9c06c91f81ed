"""The program is found, and its settings are read, without running or importing any of it."""

import os
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrun.errors import UsageError
from jaxrun.spec.job.program import find_module, find_script, forbids_fork


def test_a_script_and_a_directory_or_zip_file_with_a_main_are_found(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").touch()
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    (tmp_path / "line\nbreak ä'\"").write_text("x = 1\n")
    assert find_script(tmp_path / "app") == tmp_path / "app" / "__main__.py"
    assert find_script(tmp_path / "app.zip") is None
    assert find_script(tmp_path / "line\nbreak ä'\"") == tmp_path / "line\nbreak ä'\""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trian.py", r"trian\.py' does not exist; did you mean train\.py\?$"),
        ("gone/train.py", r"there is no directory 'gone'"),
        ("package.train", "a module is started with -m"),
        ("python3", "leave python3 out"),
        (".", r"is a directory without __main__.py"),
        ("pipe", "is not a regular file"),  # as every process reads the program
        ("loop.py", r"loop\.py' cannot be read: Too many levels"),
        ("/proc/self/mem", "cannot be read: Input/output error"),
        ("x" * 5000, "cannot be read: File name too long"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_program_is_refused_with_the_reason(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    for file in ("train.py", "data.csv"):
        (tmp_path / file).touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop.py").symlink_to("loop.py")
    with pytest.raises(UsageError, match=message):
        find_script(Path(name))


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
    [
        ("space.deep.job", "space/deep/job.py"),
        ("space.app", "space/app/__main__.py"),
        ("space.deep", None),
        ("space.gone.job", None),
        ("space.run", None),
    ],
)
@pytest.mark.parametrize("installed", [False, True])
def test_folders_between_need_no_init_file(tmp_path, monkeypatch, name, source, installed):
    """None is for what Python itself refuses when the rank runs it."""
    for folder, file in (("deep", "job.py"), ("app", "__main__.py")):
        (tmp_path / "space" / folder).mkdir(parents=True)
        (tmp_path / "space" / folder / file).touch()
    if installed:
        monkeypatch.syspath_prepend(tmp_path)
    found = find_module(name, str(tmp_path.parent if installed else tmp_path))
    assert found == (tmp_path / source if source else None)


def test_a_finder_that_raises_does_not_stop_the_look_ahead(tmp_path, monkeypatch):
    def find_spec(name, path=None, target=None):
        raise RuntimeError("a bug in somebody's finder, as packages put theirs there")

    monkeypatch.setattr("sys.meta_path", [SimpleNamespace(find_spec=find_spec)])
    (tmp_path / "job.py").touch()
    assert find_module("job", str(tmp_path)) == tmp_path / "job.py"
    with pytest.raises(UsageError, match="no module named 'nosuch'"):
        find_module("nosuch", str(tmp_path))


def test_an_installed_module_is_found_but_the_current_directory_comes_first(tmp_path):
    found = find_module("json.tool", str(tmp_path))
    assert found is not None and found.name == "tool.py"
    (tmp_path / "json.py").touch()
    assert find_module("json", str(tmp_path)) == tmp_path / "json.py"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("__main__", "no module named '__main__'"),
        ("nosuch.part", r"no module named 'nosuch' in .* or among the installed"),
        ("plain.py", r"'plain' is not a package; leave -m out to run the file plain\.py"),
        ("plain.part", r"'plain' is not a package$"),
    ],
)
def test_what_is_no_module_is_refused_with_the_reason(package, name, message):
    with pytest.raises(UsageError, match=message):
        find_module(name, str(package))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# jaxrun: no-fork\n", True),
        ("#!/usr/bin/env python\n\n  #jaxrun:no-fork  (it starts threads)\n", True),
        ("\n" * 19 + "# jaxrun: no-fork", True),
        ("\n" * 20 + "# jaxrun: no-fork", False),
        ("# jaxrun: no-forking\n", False),
        ("x = '# jaxrun: no-fork'\n", False),
        ("\udcff\x00# jaxrun: no-fork", False),
    ],
)
def test_a_program_declines_forking_in_its_first_lines(tmp_path, text, expected):
    path = tmp_path / "p.py"
    path.write_text(text, errors="surrogateescape")
    assert forbids_fork(path) is expected
    assert forbids_fork(tmp_path / "gone.py") is False
