"""The directory of compiled programs: where it is, whom it trusts, and what is deleted from it."""

import os
import time
from types import SimpleNamespace

import pytest

from jaxrun.protocol.compile_cache import cache_directory, make_cache_directory
from jaxrun.protocol.whole_file import draft_name
from jaxrun_runtime.compile_cache import jax_hooks, set_up


def test_auto_is_this_users_own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory("auto", {}) == tmp_path / ".cache/jaxrun/compiled"
    assert cache_directory("auto", {"XDG_CACHE_HOME": "/scratch/me"}) == cache_directory(
        "/scratch/me/jaxrun/compiled", {}
    )
    assert cache_directory("auto", {"XDG_CACHE_HOME": "not/absolute"}) == tmp_path / ".cache/jaxrun/compiled"


def test_it_is_made_for_this_user_alone(tmp_path):
    make_cache_directory(tmp_path / "a" / "b")
    make_cache_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("mode", [0o775, 0o707, 0o1777])
def test_where_others_can_write_it_is_refused(tmp_path, mode):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    with pytest.raises(OSError, match="others can write to it, and what is in it is executed") as error:
        make_cache_directory(tmp_path / "shared")
    assert error.value.strerror


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_where_another_user_owns_it_it_is_refused(tmp_path):
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, -1)
    with pytest.raises(OSError, match="it belongs to user 12345, and what is in it is executed"):
        make_cache_directory(tmp_path / "theirs")


def test_a_file_in_its_place_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        make_cache_directory(tmp_path / "file")


def test_the_oldest_programs_make_room_and_what_was_never_finished_is_deleted(tmp_path):
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


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An object like JAX's cache of files, whose class writes whole files; `reported` has the errors."""
    written = []
    kind = type("LRUCache", (), {"put": lambda self, key, value: written.append((key, value))})
    monkeypatch.setitem(jax_hooks.sys.modules, "jax._src.lru_cache", SimpleNamespace(LRUCache=kind))
    reported = []
    assert jax_hooks.write_whole_files(reported.append)
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
