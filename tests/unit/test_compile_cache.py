"""The directories of compiled programs, of jobs to come and of the ranks of a host: whom they trust, what stays."""

import os
import sys
import time
from pathlib import Path

import pytest
from fakes import fake_module

from jaxrun.files import shared_memory as directories
from jaxrun.files.compiled_programs import cache_directory, make_cache_directory, open_cache_directory
from jaxrun.files.own_files import draft_name
from jaxrun.protocol.env import WorkerEnv
from jaxrun_runtime.compile_cache import compiler_hooks, set_up
from jaxrun_runtime.compile_cache.shared_programs import SharedPrograms


def test_auto_is_this_users_own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for base, below in (("", tmp_path / ".cache"), ("/scratch/me", "/scratch/me"), ("relative", tmp_path / ".cache")):
        assert cache_directory("auto", {"XDG_CACHE_HOME": base}) == Path(below) / "jaxrun/compiled"
    assert cache_directory("/scratch/own", {}) == Path("/scratch/own")


@pytest.mark.parametrize("mode", [0o775, 0o707, 0o1777])
def test_it_is_made_for_this_user_alone_and_refused_where_others_can_write(tmp_path, mode):
    for _ in range(2):
        make_cache_directory(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0
    (tmp_path / "a" / "b").chmod(mode)
    with pytest.raises(OSError, match="others can write to it, and what is in it is executed") as error:
        make_cache_directory(tmp_path / "a" / "b")
    assert error.value.strerror
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        make_cache_directory(tmp_path / "file")


def test_it_is_refused_where_everybody_can_put_another_in_its_place(tmp_path):
    make_cache_directory(tmp_path / "a" / "b")
    (tmp_path / "a").chmod(0o777)
    for use in (make_cache_directory, open_cache_directory):
        with pytest.raises(OSError, match=f"everybody can write to {tmp_path}/a") as error:
            use(tmp_path / "a" / "b")
        assert error.value.strerror
    with pytest.raises(OSError, match="everybody can write to"):
        make_cache_directory(tmp_path / "a" / "new" / "one")
    assert not (tmp_path / "a" / "new").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_where_another_user_owns_it_it_is_refused(tmp_path):
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, -1)
    with pytest.raises(OSError, match="it belongs to user 12345, and what is in it is executed"):
        make_cache_directory(tmp_path / "theirs")


def test_the_oldest_files_make_room_and_what_was_never_finished_is_deleted(tmp_path):
    now = time.time()
    for age in range(5):
        (tmp_path / f"{age}-cache").write_bytes(bytes(100))
        os.utime(tmp_path / f"{age}-cache", (now - age, now - age))
    old, new = tmp_path / draft_name(), tmp_path / draft_name()
    for path, age in ((old, 7200), (new, 10)):
        path.touch()
        os.utime(path, (now - age, now - age))
    set_up.clean(tmp_path, None)
    assert len(list(tmp_path.iterdir())) == 6 and not old.exists()
    set_up.clean(tmp_path, 400)
    assert {path.name for path in tmp_path.glob("*-cache")} == {"0-cache", "1-cache", "2-cache"}
    set_up.clean(tmp_path / "missing", 400)


# ---- JAX's writing


@pytest.mark.parametrize(("rank", "printed"), [(0, 0), (1, 0), (2, 1)], ids=["first", "beside it", "first of a host"])
def test_a_feature_that_this_jax_lacks_is_reported_once(tmp_path, monkeypatch, capsys, rank, printed):
    for name in ("compiler", "compilation_cache", "cache_key", "lru_cache"):
        monkeypatch.setitem(sys.modules, f"jax._src.{name}", fake_module(name))
    config = fake_module("config", update=lambda option, value: None)
    monkeypatch.setitem(sys.modules, "jax", fake_module("jax", config=config, __version__="0.99"))
    told = []
    env = WorkerEnv("ab" * 16, rank, 4, rank % 2, 2, "h2", compile_cache=str(tmp_path / "cache"))
    set_up.set_up(env, told.append)
    assert told == [
        "jax 0.99 lacks what jaxrun uses: "
        "a rank that is killed may leave half a program in the directory of --compile-cache",
        "jax 0.99 lacks what jaxrun uses: on CPUs only rank 0 finds what --compile-cache keeps",
    ]
    line = (
        "jaxrun: rank 2 (h2): jax 0.99 lacks what jaxrun uses: "
        "this host keeps no programs unless it shares the directory of --compile-cache\n"
    )
    assert capsys.readouterr().err == line * printed


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An object like JAX's cache of files, whose class writes whole files; `reported` has the errors."""
    written = []
    kind = type("LRUCache", (), {"put": lambda self, key, value: written.append((key, value))})
    monkeypatch.setitem(compiler_hooks.sys.modules, "jax._src.lru_cache", fake_module("lru_cache", LRUCache=kind))
    reported = []
    assert compiler_hooks.write_whole_files(reported.append)
    found = kind()
    found._path, found.eviction_enabled, found.reported, found.by_jax = str(tmp_path), False, reported, written
    return found


def test_a_file_is_written_as_a_whole_also_in_the_place_of_one_that_cannot_be_read(cache, tmp_path):
    (tmp_path / "k-cache").write_bytes(b"half")
    cache.put("k", b"whole")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("k-cache", b"whole")]
    assert cache.reported == cache.by_jax == []


def test_the_first_error_is_reported_and_nothing_more_is_written(cache, tmp_path):
    cache._path = str(tmp_path / "gone")
    cache.put("k", b"whole")
    cache._path = str(tmp_path)
    cache.put("k", b"whole")
    assert cache.reported == ["No such file or directory"] and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("path", "evicts"), [("gs://bucket/cache", False), ("", True)])
def test_what_jax_alone_can_do_is_left_to_it(cache, path, evicts):
    cache._path, cache.eviction_enabled = path or cache._path, evicts
    cache.put("k", b"whole")
    assert cache.by_jax == [("k", b"whole")]


# ---- the directory in memory that the ranks of a host share


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The directory in the place of /dev/shm/jaxrun-UID, below a directory of the test's."""
    monkeypatch.setattr(directories, "_MEMORY", str(tmp_path))
    return tmp_path / f"jaxrun-{os.geteuid()}"


@pytest.fixture
def programs(own):
    return SharedPrograms("shared", 2)


def test_one_rank_claims_a_program_and_the_others_read_it(programs, own):
    other = SharedPrograms("shared", 2)
    assert programs.read("k") is None
    assert programs.claim("k") == 0 and other.claim("k") == os.getpid()
    programs.write("k", b"program")
    assert other.read("k") == other.wait_for("k", os.getpid()) == b"program"
    assert (own / "shared").stat().st_mode & 0o777 == 0o700


def test_what_cannot_be_shared_or_is_too_large_keeps_nobody_waiting(programs):
    programs.claim("k")
    programs.refuse("k")
    assert programs.wait_for("k", os.getpid()) == b""
    small = SharedPrograms("shared", 2, max_bytes=100)
    small.claim("large")
    small.write("large", bytes(26))
    assert small.wait_for("large", os.getpid()) == b""


def test_the_oldest_programs_make_room(own):
    programs = SharedPrograms("shared", 1, max_bytes=4000)
    for number in range(12):
        programs.claim(str(number))
        programs.write(str(number), bytes(1000))
        os.utime(own / "shared" / str(number), (number, number))
    left = {path.name for path in (own / "shared").iterdir() if "." not in path.name}
    assert "11" in left and "0" not in left and 2 <= len(left) <= 4
    assert programs.claim("0") == 0  # it may be compiled again


def test_programs_take_no_more_than_an_eighth_of_the_file_system(own, monkeypatch):
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result((1000, 1000, 32, *[0] * 7)))
    programs = SharedPrograms("shared", 1)
    for size in (1000, 1001):
        programs.claim(str(size))
        programs.write(str(size), bytes(size))
    assert (programs.read("1000"), programs.read("1001")) == (bytes(1000), b"")


def test_a_directory_that_is_gone_is_not_made_again(programs, own):
    programs.claim("k")
    programs.write("k", b"program")
    directories.remove_shared_directory("shared")
    assert not (own / "shared").exists()
    assert programs.claim("k") < 0
    programs.write("k", b"program")
    assert not (own / "shared").exists()


@pytest.mark.parametrize("level", ["the user's", "the job's"])
@pytest.mark.parametrize("kind", ["open to all", "a link", "a dangling link", "a file"])
def test_what_is_not_this_users_alone_is_neither_used_nor_emptied(own, tmp_path, level, kind):
    path = own if level == "the user's" else own / "shared"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    victim = tmp_path / "victim"
    if kind != "a dangling link":
        (victim / "shared").mkdir(parents=True, mode=0o700)
        (victim / "shared" / "k").write_bytes(b"theirs")
        victim.chmod(0o700)
    if kind == "open to all":
        victim.rename(path).chmod(0o777)
        victim = path
    elif kind == "a file":
        path.touch()
    else:
        path.symlink_to(victim)
    programs = SharedPrograms("shared", 2)
    if level == "the user's":
        os.close(directories.open_shared_directory("shared"))
        assert (tmp_path / f"{own.name}-shared" / "shared").is_dir()
    else:
        with pytest.raises(OSError):
            directories.open_shared_directory("shared")
        assert programs.claim("k") < 0
    assert programs.read("k") is None
    programs.write("k", b"mine")
    directories.remove_shared_directory("shared")
    directories.remove_all_of_job("shar")
    if kind != "a dangling link":
        assert (victim / "shared" / "k").read_bytes() == b"theirs"


def test_all_of_a_job_is_removed_and_nothing_else_and_no_link_is_followed(own, tmp_path):
    for job, attempt, host in (("a1", 1, "h/1"), ("a1", 2, "h2"), ("a12", 1, "h1")):
        name = directories.shared_directory(job, attempt, host)
        os.close(directories.open_shared_directory(name))
        (own / name / "file").touch()
    victim, links = tmp_path / "victim", [own / "a1-3-h1", own / "a1-anything"]
    victim.mkdir(mode=0o700)
    (victim / "file").touch()
    for link in links:  # though nobody else can make them any more
        link.symlink_to(victim)
    directories.remove_shared_directory("a1-3-h1")
    directories.remove_all_of_job("a1")
    assert (victim / "file").exists()
    assert {*own.iterdir()} == {own / "a12-1-h1", *links}  # which have kept nothing else from being removed
    for link in links:
        link.unlink()
    directories.remove_all_of_job("a12")
    assert not own.exists()


def test_files_of_killed_jobs_are_removed_and_files_in_use_are_not(own):
    left, used, new = (directories.shared_directory(job, 1, "h") for job in ("a", "b", "c"))
    os.close(directories.open_shared_directory(left))
    descriptors = [directories.open_shared_directory(used)]
    os.close(directories.open_shared_directory(left))  # as if it were of another job that was killed meanwhile
    (own / "0 odd").symlink_to("nowhere")
    descriptors.append(directories.open_shared_directory(new))
    directories.remove_abandoned("c")
    assert {path.name for path in own.iterdir()} == {used, new, "0 odd"}
    for descriptor in descriptors:
        os.close(descriptor)
