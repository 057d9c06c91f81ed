"""Files are there as a whole or not at all; nothing is deleted that is not this user's own; all by descriptors."""

import ast
import os
import resource
from pathlib import Path

import pytest

import jaxrun
import jaxrun_runtime
from jaxrun.files.own_files import check_way, draft_name, is_draft, remove_directory, remove_file, write_whole_file
from jaxrun_runtime.compile_cache.shared_programs import StoredFile, choose_oldest, list_stored

# What else deletes than files/own_files.py, and what: all but one by the descriptor of the directory that it is in.
_DELETING = {
    "jaxrun/node/agent/spawn.py": "a recorder that was just made, in the run directory",
    "jaxrun/files/shared_memory.py": "the user's directory in memory, by its name, once it is empty",
    "jaxrun/records/rundir/jobs.py": "the link `latest` of a collection",
    "jaxrun/records/rundir/job_numbers.py": "the links from numbers of jobs that are gone",
    "jaxrun/records/rundir/job_sockets.py": "sockets of jobs, and the user's directory of them",
    "jaxrun/records/rundir/rundir.py": "files of a run",
    "jaxrun_runtime/compile_cache/set_up.py": "old compiled programs on disk",
    "jaxrun_runtime/compile_cache/shared_programs.py": "old compiled programs in memory",
    "jaxrun_runtime/state_snapshots/host_memory.py": "old snapshots in memory",
}
_DELETERS = {"unlink", "rmdir", "rmtree", "removedirs", "TemporaryDirectory"}


def _deletions(path):
    found = []
    for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        owner = getattr(getattr(call.func, "value", None), "id", "")
        if name in _DELETERS or (owner, name) == ("os", "remove"):
            found.append(call)
    return found


def test_every_place_that_deletes_is_known_and_does_so_by_a_descriptor():
    found = {}
    for package in (jaxrun, jaxrun_runtime):
        root = Path(package.__file__).parent
        calls = {str(path.relative_to(root.parent)): _deletions(path) for path in root.rglob("*.py")}
        found |= {name: deletions for name, deletions in calls.items() if deletions}
    del found["jaxrun/files/own_files.py"]
    assert set(found) <= set(_DELETING)
    by_path = [
        name for name, calls in found.items() for call in calls if "dir_fd" not in {word.arg for word in call.keywords}
    ]
    assert by_path == ["jaxrun/files/shared_memory.py"]


def _fill(directory):
    (directory / "sub" / "subsub").mkdir(parents=True)
    directory.chmod(0o700)
    for name in ("file", "sub/file", "sub/subsub/file"):
        (directory / name).touch()
    return directory


def test_a_directory_goes_with_all_that_is_in_it_and_links_lead_nowhere(tmp_path):
    victim, doomed = _fill(tmp_path / "victim"), _fill(tmp_path / "doomed")
    for name in ("link", "sub/link"):
        (doomed / name).symlink_to(victim)
    (doomed / "dangling").symlink_to("nowhere")
    remove_directory(doomed)
    assert not doomed.exists() and len(list(victim.rglob("*"))) == 5
    with pytest.raises(FileNotFoundError):
        remove_directory(doomed)


@pytest.mark.parametrize("private", [True, False])
def test_a_link_or_a_file_is_refused_as_a_directory(tmp_path, private):
    victim = _fill(tmp_path / "victim")
    (tmp_path / "link").symlink_to(victim)
    for name in ("link", "victim/file"):
        with pytest.raises(OSError):
            remove_directory(tmp_path / name, private=private)
    assert len(list(victim.rglob("*"))) == 5 and (tmp_path / "link").is_symlink()


def test_one_that_others_may_enter_is_removed_where_it_need_not_be_private(tmp_path):
    directory = _fill(tmp_path / "directory")
    directory.chmod(0o755)
    with pytest.raises(OSError, match=r"not this user's alone.*0755"):
        remove_directory(directory)
    assert (directory / "file").exists()
    remove_directory(directory, private=False)
    assert not directory.exists()


def test_one_entry_that_cannot_be_removed_keeps_no_other(tmp_path, monkeypatch):
    directory, unlink = _fill(tmp_path / "directory"), os.unlink
    (directory / "a").touch()

    def unlink_but_one(name, *, dir_fd):
        if name == "a":
            raise PermissionError(1, "not this one")
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink_but_one)
    with pytest.raises(PermissionError, match="not this one"):
        remove_directory(directory)
    assert [path.name for path in directory.iterdir()] == ["a"]


def test_directories_may_be_nested_deeper_than_python_calls_and_than_files_can_be_open(tmp_path):
    at = os.open(_fill(tmp_path / "deep"), os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=at)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    are_open = max(map(int, os.listdir("/proc/self/fd")))  # by other tests of this process, too
    resource.setrlimit(resource.RLIMIT_NOFILE, (are_open + 100, limits[1]))
    try:
        remove_directory(tmp_path / "deep")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not os.listdir(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_another_user_stays(tmp_path):
    directory, file = _fill(tmp_path / "directory"), tmp_path / "file"
    file.touch()
    for path in (directory, file):
        os.chown(path, 12345, -1)
    for private in (True, False):
        with pytest.raises(OSError, match="belongs to user 12345"):
            remove_directory(directory, private=private)
    with pytest.raises(OSError, match="another user"):
        remove_file(file)
    assert file.exists() and (directory / "file").exists()


def test_a_file_is_removed_and_a_link_is_not_followed(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.touch()
    link.symlink_to(victim)
    remove_file(link)
    assert victim.exists() and not link.is_symlink()
    remove_file(victim)
    with pytest.raises(FileNotFoundError):
        remove_file(victim)


# ---- files that are there as a whole


@pytest.fixture
def way(tmp_path):
    """A directory three levels down."""
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    return tmp_path / "a" / "b" / "c"


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o775, 0o1777])
def test_a_way_on_which_nobody_else_can_replace_anything_is_right(way, mode):
    (way.parents[0]).chmod(mode)
    for path in (way, way / "not" / "there" / "yet", f"{way}/../c/"):
        check_way(path)


def test_a_directory_on_the_way_that_everybody_can_write_to_is_named(way, tmp_path, monkeypatch):
    (open_one := way.parents[1]).chmod(0o777)
    (tmp_path / "link").symlink_to(way)
    monkeypatch.chdir(way)
    for path in (way, way / "new" / "one", "new", tmp_path / "link" / "new", f"{way}/../b/c"):
        with pytest.raises(OSError, match=rf"everybody can write to {open_one} \(mode 0777\), and so replace"):
            check_way(path)
    check_way(open_one)
    check_way(tmp_path / "new")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_a_link_on_the_way_that_is_another_users_is_refused(way, tmp_path):
    (tmp_path / "link").symlink_to(way)
    check_way(tmp_path / "link" / "new")
    os.chown(tmp_path / "link", 12345, -1, follow_symlinks=False)
    with pytest.raises(OSError, match="it leads through a symbolic link of user 12345"):
        check_way(tmp_path / "link" / "new")


@pytest.fixture(params=[0o000, 0o027, 0o777])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("mode", [0o600, 0o700, 0o644, 0o666])
def test_the_umask_takes_nothing_from_a_file_for_its_owner_alone(tmp_path, umask, mode):
    write_whole_file(tmp_path / "file", b"content", mode)
    found = (tmp_path / "file").stat().st_mode & 0o777
    assert found == (mode & ~umask if mode & 0o077 else mode)


def test_a_file_is_replaced_in_the_directory_of_a_descriptor(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/file").write_bytes(b"before")
    directory = os.open(tmp_path / "in", os.O_RDONLY)
    monkeypatch.chdir(tmp_path)
    write_whole_file("file", b"after", dir_fd=directory)
    os.close(directory)
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "in").iterdir()] == [("file", b"after")]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_what_cannot_be_written_leaves_no_draft(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole_file(tmp_path / "taken", b"content")
    with pytest.raises(TypeError):
        write_whole_file(tmp_path / "file", "no bytes")
    with pytest.raises(OSError, match="Bad file descriptor"):
        write_whole_file("file", b"content", dir_fd=-1)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_draft_is_recognized_by_its_name():
    assert draft_name() != draft_name() and is_draft(draft_name())
    assert not any(is_draft(name) for name in ("k-cache", ".jaxrun-attach-0123", "file.draft", ".gitignore"))


# ---- which compiled programs are deleted where there are too many

FILES = [StoredFile(float(written), 100, str(written)) for written in (3, 1, 4, 2)]


@pytest.mark.parametrize(
    ("total", "max_bytes", "chosen"),
    [
        (400, 400, ""),
        (401, 400, "12"),  # one byte and a quarter
        (500, 400, "12"),
        (501, 400, "123"),
        (10**6, 400, "1234"),  # all of them, and no error though that is not enough
        (400, 0, "1234"),
    ],
)
def test_the_oldest_go_until_a_quarter_is_free(total, max_bytes, chosen):
    assert choose_oldest(FILES, total, max_bytes) == list(chosen)


def test_a_link_counts_as_itself(tmp_path):
    (tmp_path / "program").write_bytes(bytes(1000))
    (tmp_path / "link").symlink_to("program")
    (tmp_path / "to nothing").symlink_to("gone")
    os.utime(tmp_path / "program", (7, 7))
    found = {file.name: file for file in list_stored(tmp_path)}
    assert found["program"] == (7.0, 1000, "program")
    assert (found["link"].size, found["to nothing"].size) == (len("program"), len("gone"))
