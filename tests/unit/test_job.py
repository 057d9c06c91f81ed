"""A Job is valid or does not exist; the variables of --env and --env-file; its program is found without running it."""

import math
import os
import re
import zipfile
from pathlib import Path

import pytest
from fakes import BrokenFinder
from msgspec.structs import fields

from jaxrun.errors import UsageError
from jaxrun.protocol.settings import WorkerSettings
from jaxrun.spec.job.combinations import check_rank_options
from jaxrun.spec.job.env_options import mask_secret, parse_assignment, parse_env_file, read_env_file
from jaxrun.spec.job.fault_spec import parse_faults
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.option_declaration import options_of
from jaxrun.spec.job.options import JobOptions
from jaxrun.spec.job.program_check import find_module, find_script, forbids_fork
from jaxrun.text import parse_ranks


def test_the_smallest_request_has_usable_defaults():
    job = Job(program=("train.py",))
    assert (job.processes, job.platform, job.backend, job.timeout) == (None, "auto", "local", None)
    assert job.init_timeout > 0 and (job.failure_grace, job.signal_grace) == (5, 30)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"program": ()}, "no program given"),
        ({"program": ("",)}, "no program given"),
        ({"program": (), "module": True}, "-m needs the name of a module"),
        ({"program": ("-x.py",)}, r"write \./-x\.py"),
        ({"program": ("a\0b",)}, "NUL byte"),
        ({"program": ("train.py", "a\0b")}, "NUL byte"),
        ({"program": ("dir/train.py",), "module": True}, "leave -m out to run a file"),
        ({"program": (".train",), "module": True}, "name of a module"),
        ({"processes": 0}, "-n/--processes must be 1 or more, not 0"),
        ({"devices_per_process": 0}, "-d/--devices-per-process must be 1 or more"),
        ({"simulated_hosts": -1}, "--simulate-hosts must be 1 or more"),
        ({"platform": "xpu"}, "auto, cpu, gpu, cuda, rocm, tpu, not 'xpu'"),
        ({"processes": 1, "hosts": 2}, "-n 1 leaves hosts of -N 2 without a process; give -N 1 or less"),
        ({"processes": 3, "processes_per_host": 2}, "-n 3 is not a multiple of --processes-per-host 2; leave one"),
        ({"processes": 2, "hosts": 2, "processes_per_host": 2}, "-n 2 is not -N 2 x --processes-per-host 2; leave one"),
        ({"timeout": 0.0}, "--timeout must be a positive number of seconds, not 0"),
        ({"timeout": math.nan}, "not nan"),
        ({"init_timeout": math.inf}, "--init-timeout .* not inf"),
        ({"grace": -1.0}, "--grace must be 0 seconds or more, not -1"),
        ({"grace": math.nan}, "--grace"),
        ({"run_dir": Path("x"), "no_run_dir": True}, "--run-dir x and --no-run-dir contradict"),
        ({"quiet_ranks": (range(1),), "only_ranks": (range(1),)}, "--quiet-ranks 0 and --only-rank 0 contradict"),
        ({"live": True, "stdin": "1"}, "--live and --stdin 1 both read what you type"),
        ({"live": True, "no_run_dir": True}, "--live, which shows .* and --no-run-dir contradict"),
        ({"metrics": "9400", "no_run_dir": True}, "--metrics 9400, which asks the job .* and --no-run-dir contradict"),
        ({"keep_survivors": True, "restart_on": "lost"}, "--keep-survivors and --restart-on lost contradict"),
        ({"keep_survivors": True, "lockstep": "strict"}, "--lockstep strict, with which .* and --keep-survivors"),
        *(({"stdin": rank}, "--stdin must be the number of a rank, or none") for rank in ("-1", "all", "1.5", "٣")),
    ],
)
def test_a_wrong_request_is_refused_and_says_what_was_received(fields, message):
    with pytest.raises(UsageError, match=message):
        Job(**{"program": ("train.py",), **fields})


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"quiet_ranks": parse_ranks("1-2,4", "--quiet-ranks")}, [0, 3, 5]),
        ({"only_ranks": parse_ranks("3", "--only-rank")}, [3]),
    ],
)
def test_ranks_are_shown_unless_they_are_quiet_or_others_are_asked_for(fields, shown):
    job = Job(program=("p",), **fields)
    assert [rank for rank in range(6) if job.shows(rank)] == shown


@pytest.mark.parametrize(
    ("option", "given"),
    {
        "--quiet-ranks": {"quiet_ranks": (range(2), range(3, 5))},
        "--only-rank": {"only_ranks": (range(5),)},
        "--stdin": {"stdin": "4"},
        "--chaos": {"chaos": parse_faults("kill:1@1s,pause:0,4@2s")},
    }.items(),
)
def test_ranks_that_the_job_does_not_have_are_refused(option, given):
    job = Job(program=("p",), **given)
    check_rank_options(job, 5)
    with pytest.raises(UsageError, match=f"{option} names rank 4, but the ranks of this job are 0 to 3"):
        check_rank_options(job, 4)


# ---- --env and --env-file


@pytest.mark.parametrize(
    ("text", "expected"), [("A=b=c d", ("A", "b=c d")), ("A=", ("A", "")), ("HOME", ("HOME", "/root"))]
)
def test_an_assignment_has_a_value_or_passes_the_variable_on(text, expected):
    assert parse_assignment(text, {"A": "x", "HOME": "/root"}) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--env NAME=VALUE is expected, not ''"),
        ("=x", "NAME=VALUE is expected"),
        ("1A=x", "NAME=VALUE is expected, not '1A=…'"),
        ("GONE", "GONE is not set; write GONE=VALUE"),
        ("JAXRUN_RANK=1", "JAXRUN_RANK cannot be set: jaxrun sets it"),
        ("JAX_PROCESS_ID=1", "JAX_PROCESS_ID cannot be set"),
        ("JAX_NUM_PROCESSES=1", "cannot be set"),
        ("JAX_COORDINATOR_ADDRESS=a:1", "cannot be set"),
        ("A=b\0c", "NUL byte"),
    ],
)
def test_a_wrong_assignment_is_named(text, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_assignment(text, {})


def test_an_env_file_is_read_as_shells_write_it():
    text = """
    # a comment
    PLAIN=some words # and a remark
    HASH=a#b
    export EXPORTED=1
    EMPTY=
    DOUBLE="with spaces, # and \\"quotes\\" \\$HOME"  # remark
    SINGLE='raw \\n "x"'
    PLAIN=the later one\r
    """
    assert parse_env_file(text, "job.env") == {
        "PLAIN": "the later one",
        "HASH": "a#b",
        "EXPORTED": "1",
        "EMPTY": "",
        "DOUBLE": 'with spaces, # and "quotes" $HOME',
        "SINGLE": 'raw \\n "x"',
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("just words", "job.env:2: NAME=VALUE is expected, but this line has no equals sign"),
        ('A="open', 'job.env:2: the quote " of A is not closed'),
        ("A='x'y", "job.env:2: the quote ' of A is not closed, or something follows"),
        ("JAXRUN_SIZE=3", "job.env:2: JAXRUN_SIZE cannot be set"),
        ("A=\0", "job.env:2: the value of A contains a NUL byte"),
    ],
)
def test_a_wrong_line_of_an_env_file_is_named_by_its_number(line, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_env_file(f"GOOD=1\n{line}\nALSO=2\n", "job.env")


def test_an_env_file_may_hold_bytes_that_are_no_utf8_and_must_be_there(tmp_path):
    path = tmp_path / "job.env"
    path.write_bytes(b"A=\xff\xc3\xa4\n")
    assert os.fsencode(read_env_file(path)["A"]) == b"\xff\xc3\xa4"
    with pytest.raises(UsageError, match=r"--env-file .*gone.env cannot be read: No such file"):
        read_env_file(tmp_path / "gone.env")


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        *((name, "hunter2", "***") for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "X_CREDENTIALS")),
        ("https_proxy", "http://me:pw@proxy:80/", "http://***@proxy:80/"),
        ("XLA_FLAGS", "--a=b", "--a=b"),
    ],
)
def test_secrets_are_not_shown(name, value, shown):
    assert mask_secret(name, value) == shown


@pytest.mark.parametrize("setting", fields(WorkerSettings), ids=lambda setting: setting.name)
def test_what_workers_read_has_an_option_of_the_same_default(setting):
    (declared,) = (each for each, _ in options_of(JobOptions) if each.name == setting.name)
    assert declared.default == setting.default


# ---- the program is found, and its settings are read, without running or importing any of it


def test_a_script_and_a_directory_or_zip_file_with_a_main_are_found(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").touch()
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    (tmp_path / "line\nbreak ä'\"").write_text("x = 1\n")
    assert find_script(tmp_path / "app") == tmp_path / "app" / "__main__.py"
    assert find_script(tmp_path / "app.zip") is None
    assert find_script(tmp_path / "line\nbreak ä'\"") == tmp_path / "line\nbreak ä'\""
    for name, first in (("tool", "#!/bin/sh\n'''exec' /long/python"), ("uses-uv", "#!/usr/bin/env -S uv run --script")):
        (tmp_path / name).write_text(f"{first}\n")
        assert find_script(tmp_path / name) == tmp_path / name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trian.py", r"trian\.py' does not exist; did you mean train\.py\?$"),
        ("gone/train.py", r"there is no directory 'gone'"),
        ("package.train", "a module is started with -m"),
        ("python3", "leave out python3"),
        ("pytest", r"'pytest' does not exist here; start the module with: jaxrun \[OPTIONS\] -m pytest"),
        ("start.sh", "is a script in another language"),
        ("start", "is a script in another language"),
        ("work.ipynb", "is a notebook; convert it to a program with: jupyter nbconvert --to script work.ipynb"),
        ("a.out", "is a compiled program"),
        (".", r"is a directory without __main__.py"),
        ("pipe", "is not a regular file"),  # as every process reads the program
        ("loop.py", r"loop\.py' cannot be read: Too many levels"),
        ("/proc/self/mem", "cannot be read: Input/output error"),
        ("x" * 5000, "cannot be read: File name too long"),
    ],
    ids=lambda text: text[:20],
)
def test_a_file_that_is_not_a_program_is_refused_with_the_reason(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    for file in ("train.py", "data.csv"):
        (tmp_path / file).touch()
    (tmp_path / "start.sh").write_text("python train.py\n")
    (tmp_path / "start").write_text("#!/usr/bin/env bash\npython train.py\n")
    (tmp_path / "work.ipynb").write_text("{}")
    (tmp_path / "a.out").write_bytes(b"\x7fELF\x02")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop.py").symlink_to("loop.py")
    with pytest.raises(UsageError, match=message):
        find_script(Path(name))


@pytest.fixture
def package(tmp_path):
    """The packages pkg and pkg.sub, whose import fails, and space, which has no __init__.py; the module plain."""
    for folder in ("pkg/sub", "space/deep", "space/app"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("pkg", "pkg/sub"):
        (tmp_path / folder / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "__init__.py").write_text("__path__.append('elsewhere')")
    for file in ("plain.py", "pkg/__main__.py", "pkg/sub/job.py", "space/deep/job.py", "space/app/__main__.py"):
        (tmp_path / file).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("plain", "plain.py"),
        ("pkg", "pkg/__main__.py"),
        ("pkg.sub.job", "pkg/sub/job.py"),
        ("space.deep.job", "space/deep/job.py"),
        ("space.app", "space/app/__main__.py"),
        # Python itself refuses these when the rank runs them.
        *((name, None) for name in ("open.gone", "space.deep", "space.gone.job", "space.run")),
    ],
)
@pytest.mark.parametrize("installed", [False, True])
def test_a_modules_source_is_found_without_importing_its_package(package, monkeypatch, name, source, installed):
    if installed:
        monkeypatch.syspath_prepend(package)
    assert find_module(name, str(package.parent if installed else package)) == (package / source if source else None)


def test_a_module_that_its_package_does_not_have_is_refused_and_the_nearest_named(package):
    with pytest.raises(UsageError, match=r"no module named 'pkg.sub.jbo': .* 'pkg.sub' has no 'jbo'; .*-m pkg.sub.job"):
        find_module("pkg.sub.jbo", str(package))


def test_a_finder_that_raises_does_not_stop_the_look_ahead(tmp_path, monkeypatch):
    broken = BrokenFinder(RuntimeError("a bug in somebody's finder, as packages put theirs there"))
    monkeypatch.setattr("sys.meta_path", [broken])
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
        ("pkg.sub", r"the package 'pkg\.sub' cannot be run: it has no __main__; .*-m pkg\.sub\.MODULE"),
        ("nosuch.part", r"no module named 'nosuch' in .* or among the installed"),
        ("plain.py", r"'plain' is not a package; leave out -m to run the file plain\.py"),
        ("plain.part", r"'plain' is not a package$"),
    ],
)
def test_a_name_that_is_not_a_module_is_refused_with_the_reason(package, name, message):
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
