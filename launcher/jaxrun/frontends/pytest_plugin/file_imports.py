"""The leading imports of a file of tests and its conftest files, which each rank that runs the tests needs."""

from __future__ import annotations

from pathlib import Path

from jaxrun.protocol.forkserver_messages import ImportedName
from jaxrun.spec.job.leading_imports import imports_of_file
from jaxrun.spec.job.preload_table import preloadable


def imports_of_tests(file: Path, root: Path) -> list[ImportedName]:
    """The leading imports of the conftest files from `root` down to the file's directory, and then of the file."""
    folders = [folder for folder in reversed(file.parents) if folder == root or root in folder.parents]
    files = [*(path for folder in folders if (path := folder / "conftest.py").is_file()), file]
    return [line for each in files for line in imports_of_file(each, [str(each.parent)], preloadable)]
