"""What --stage copies, and the copies on a host's disk."""

import os

import pytest
from staged_directory import contents, copied, make_source

from jaxrun.errors import UnavailableError
from jaxrun.node.staging import copies as copies_module
from jaxrun.node.staging.copies import Copies
from jaxrun.node.staging.directory_copy import copy_directory, list_directory


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path / "source")


@pytest.fixture
def copies(tmp_path):
    return Copies(str(tmp_path))


def next_job(tmp_path):
    """The same copies in another process, which uses none of them yet."""
    return Copies(str(tmp_path))


def test_a_copy_is_as_the_directory_was_and_is_found_as_long_as_that_is_the_same(source, copies, tmp_path):
    name = copied(copies, source)
    assert contents(tmp_path / copies.path / name / "copy") == contents(source)
    assert next_job(tmp_path).find_listing(list_directory(str(source))[1]) == name
    assert os.stat(copies.path).st_mode & 0o777 == 0o700
    (source / "new").write_bytes((source / "tool").read_bytes())
    (source / "new").replace(source / "tool")  # as pip does
    assert copies.find_listing(list_directory(str(source))[1]) is None


def test_a_name_is_a_hash_of_paths_modes_links_and_contents(source, copies):
    names = [copied(copies, source)]
    for change in (
        lambda: (source / "lib" / "module.py").write_text("x = 2\n"),
        lambda: (source / "tool").chmod(0o644),
        lambda: ((source / "link").unlink(), (source / "link").symlink_to("tool")),
        lambda: (source / "lib" / "nothing").rename(source / "lib" / "renamed"),
    ):
        change()
        names.append(copied(copies, source))
    assert len(set(names)) == 5 and copied(copies, source) == names[-1]


def test_what_is_no_file_and_what_grows_with_each_job_is_left_out(source):
    listed, seen = list_directory(str(source))
    (source / ".git").mkdir()
    (source / "jaxrun-runs" / "1").mkdir(parents=True)
    os.mkfifo(source / "fifo")
    assert list_directory(str(source))[1] == seen
    assert [path for path, _ in listed] == [
        "lib", "lib/empty", "lib/large", "lib/module.py", "lib/nothing", "link", "tool",
    ]  # fmt: skip


def test_a_file_that_changes_while_it_is_read_is_named_and_nothing_is_left(source, copies):
    listed, _ = list_directory(str(source))
    with open(source / "lib" / "large", "ab") as file:
        file.write(b"more")
    with pytest.raises(UnavailableError, match=f"{source}/lib/large has changed while it was read"):
        copies.add(1, lambda draft: copy_directory(str(source), draft, listed))
    assert os.listdir(copies.path) == []


def test_a_copy_that_is_in_use_is_not_removed(source, copies, tmp_path):
    name = copied(copies, source)
    assert next_job(tmp_path).remove_unused() == (1, 0) and copies.find(name)
    os.close(copies._locks[name])
    assert next_job(tmp_path).remove_unused() == (1, 1) and next_job(tmp_path).find(name) is None


def test_what_was_left_unfinished_and_the_oldest_copies_make_room(source, copies, tmp_path, monkeypatch):
    monkeypatch.setattr(copies_module, "_KEPT", 2)
    os.makedirs(f"{copies.path}/.jaxrun-1.draft/copy")
    os.chmod(f"{copies.path}/.jaxrun-1.draft", 0o700)
    names = []
    for text in "abcd":
        (source / "tool").write_text(text)
        names.append(copied(copies, source))
        os.utime(f"{copies.path}/{names[-1]}", (len(names), len(names)))
        if text != "a":  # which stays in use
            os.close(copies._locks.pop(names[-1]))
    assert sorted(os.listdir(copies.path)) == sorted((names[0], names[2], names[3]))
    monkeypatch.setattr(copies_module, "_FREE_BYTES", 2**80)  # a full disk
    (source / "tool").write_text("e")
    assert sorted(os.listdir(copies.path)) != sorted((names[0], copied(copies, source)))
    assert len(os.listdir(copies.path)) == 2


def test_of_two_that_make_the_same_copy_both_have_it(source, copies, tmp_path):
    other = next_job(tmp_path)

    def write(draft):
        (tmp_path / draft / "copy").mkdir()
        return copied(other, source)

    name = copies.add(1, write)
    assert os.listdir(copies.path) == [name] and copies.find(name) == other.find(name)
    assert contents(tmp_path / copies.path / name / "copy") == contents(source)
