"""Files that are there as a whole or not at all, and which stored programs are deleted where there are too many."""

import os

import pytest

from jaxrun.protocol.whole_file import draft_name, is_draft, write_whole_file
from jaxrun_runtime.compile_cache.eviction import StoredFile, choose_oldest, list_stored


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


def test_a_draft_has_a_name_of_its_own_by_which_it_is_known():
    assert draft_name() != draft_name() and is_draft(draft_name())
    assert not any(is_draft(name) for name in ("k-cache", ".jaxrun-attach-0123", "file.draft", ".gitignore"))


# ---- eviction from the compile cache


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
