"""Runs on a host before the agent, and becomes the agent: checks what it needs, and says what is missing.

Its text comes by standard input, to an interpreter that may have nothing but Python's own library. Where jaxrun is
carried, a kit follows: the few modules of jaxrun that keep copies on this host's disk (node/staging). With them it
finds the copy of jaxrun that an earlier start has left, or asks for it.
"""

from __future__ import annotations

import io
import json
import os
import sys
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

_UNAVAILABLE = 69


def main(stdin: BinaryIO) -> NoReturn:
    """Read the message (remote_command.py), and become the command that it names."""
    sys.path[:] = [part for part in sys.path if part]
    start: dict[str, Any] = json.loads(_read(stdin, int(stdin.readline())))
    env = _environment(start["env"])
    _enter(start, env)
    if start["carried"]:
        directory = _find_carried(start, stdin, env)
        env["PYTHONPATH"] = ":".join(filter(None, (directory, env.get("PYTHONPATH", ""))))
    else:
        _check_version(start, env)
    words = [sys.executable if word == start["python"] else word for word in start["argv"]]
    _answer(start, "")
    try:
        os.execvpe(words[0], words, env)
    except OSError as error:
        sys.exit(f"{words[0]}: {error.strerror}")


def _read(stdin: BinaryIO, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = stdin.read(count - len(data))
        if not more:
            sys.exit("the connection ended before the start")
        data += more
    return bytes(data)


def _answer(start: dict[str, Any], problem: str, detail: str = "", *, wants_carried: bool = False) -> None:
    answer = {"problem": problem, "detail": detail, "wants_carried": wants_carried}
    os.write(1, f"\n{start['mark']} {json.dumps(answer)}\n".encode())
    if problem:
        sys.exit(_UNAVAILABLE)


def _environment(given: dict[str, str]) -> dict[str, str]:
    """The login's environment with these variables; of the login's PATH, what the given one lacks comes last."""
    env = dict(os.environ)
    mine = [part for part in env.get("PATH", "").split(":") if part]
    env.update(given)
    path = [part for part in env.get("PATH", "").split(":") if part]
    env["PATH"] = ":".join(path + [part for part in mine if part not in path])
    return env


def _enter(start: dict[str, Any], env: dict[str, str]) -> None:
    """Go to the directory of the launcher, or leave that to the agent, where the directory comes to this host."""
    try:
        os.chdir(start["directory"])
    except OSError as error:
        if not start["directory_comes"]:
            _answer(start, "directory", f"{start['directory']}: {error.strerror}")
        os.chdir("/")
        env.update(start["directory_comes"])


def _check_version(start: dict[str, Any], env: dict[str, str]) -> None:
    sys.path[:] = [part for part in env.get("PYTHONPATH", "").split(":") + sys.path if part]
    try:
        found = _version()
    except Exception as error:
        _answer(start, "import", f"jaxrun cannot be imported: {type(error).__name__}: {error}")
        raise
    if found != start["version"]:
        _answer(start, "version", found)


def _version() -> str:
    import importlib.util

    if importlib.util.find_spec("jaxrun") is None:
        return ""
    from jaxrun.protocol.names import VERSION

    return VERSION


def _find_carried(start: dict[str, Any], stdin: BinaryIO, env: dict[str, str]) -> str:
    """Return the directory of jaxrun on this host; the agent inherits a lock on it, which keeps it from removal."""
    carried = start["carried"]
    kit = os.memfd_create("jaxrun-kit")
    os.write(kit, _read(stdin, carried["kit_bytes"]))
    if os.uname().machine != carried["machine"]:
        _answer(start, "machine", os.uname().machine)
    sys.path.insert(0, f"/proc/self/fd/{kit}")
    try:
        from jaxrun.errors import JaxrunError
        from jaxrun.node.staging.archive import Archive, extract_copy
        from jaxrun.node.staging.copies import Copies

        name = carried["name"]
        try:
            copies = Copies(carried["stage_dir"])
            if copies.find(name) is None:
                _answer(start, "", wants_carried=True)
                data = io.BytesIO(zlib.decompress(_read(stdin, carried["archive_bytes"])))
                copies.add(len(data.getvalue()), lambda draft: extract_copy(Archive(_pieces(data)), draft, name))
            env[carried["lock_variable"]] = str(copies.keep_for_next_program(name))
            return f"{copies.path}/{name}/copy"
        except (OSError, JaxrunError, zlib.error) as error:
            _answer(start, "copy", str(error))
            raise
    finally:
        sys.path.pop(0)


def _pieces(data: io.BytesIO) -> Callable[[], bytes]:
    return lambda: data.read(2**17)
