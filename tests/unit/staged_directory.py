"""A directory to be staged, and its copies."""

import os

from jaxrun.node.staging.directory_copy import copy_directory, list_directory


def make_source(folder):
    """A directory with all that there is in one."""
    (folder / "lib" / "empty").mkdir(parents=True)
    (folder / "lib" / "module.py").write_text("x = 1\n")
    (folder / "lib" / "large").write_bytes(os.urandom(3 * 2**20 + 5))
    (folder / "lib" / "nothing").touch()
    (folder / "tool").write_text("#!/bin/sh\n")
    (folder / "tool").chmod(0o755)
    (folder / "link").symlink_to("lib/module.py")
    os.utime(folder / "lib" / "module.py", ns=(1, 1_700_000_000_123_456_789))
    return folder


def copied(copies, folder):
    """The name of a copy of the directory, made as the launcher makes it."""
    listed, listing = list_directory(str(folder))
    return copies.add(1, lambda draft: copy_directory(str(folder), draft, listed), listing)


def contents(folder):
    """What is below a folder, with modes, times (seconds) and links."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        status, is_file = path.lstat(), path.is_file() and not path.is_symlink()
        found[str(path.relative_to(folder))] = kind, *((status.st_mode, int(status.st_mtime)) if is_file else ())
    return found
