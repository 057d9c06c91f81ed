"""Nothing is deleted that is not this user's own, whatever others put in its place; everything by descriptors."""

import ast
import os
from pathlib import Path

import pytest

import jaxrun
import jaxrun_runtime
from jaxrun.protocol.deletion import remove_directory, remove_file

# What else deletes than protocol/deletion.py, and what: all but one by the descriptor of the directory that it is in.
_DELETING = {
    "jaxrun/node/agent/spawn.py": "a recorder that was just made, in the run directory",
    "jaxrun/protocol/compiled_programs.py": "the user's directory in memory, by its name, once it is empty",
    "jaxrun/protocol/whole_file.py": "a draft of its own, whose name nobody can guess",
    "jaxrun/records/rundir/jobs.py": "the link `latest` of a collection",
    "jaxrun/records/rundir/request_files.py": "requests",
    "jaxrun/records/rundir/rundir.py": "files of a run",
    "jaxrun_runtime/compile_cache/set_up.py": "old compiled programs on disk",
    "jaxrun_runtime/compile_cache/shared_programs.py": "old compiled programs in memory",
}
_DELETERS = {"unlink", "rmdir", "rmtree", "removedirs", "TemporaryDirectory"}


def _deletions(path: Path) -> list[ast.Call]:
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
    del found["jaxrun/protocol/deletion.py"]
    assert set(found) == set(_DELETING)
    by_path = [
        name for name, calls in found.items() for call in calls if "dir_fd" not in {word.arg for word in call.keywords}
    ]
    assert by_path == ["jaxrun/protocol/compiled_programs.py"]


def _fill(directory: Path) -> Path:
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
def test_a_link_or_a_file_is_no_directory(tmp_path, private):
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
