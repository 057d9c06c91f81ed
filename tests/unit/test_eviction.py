"""Which of the stored programs are deleted once there are too many bytes of them."""

import os

import pytest

from jaxrun_runtime.compile_cache.eviction import StoredFile, choose_oldest, list_stored

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
