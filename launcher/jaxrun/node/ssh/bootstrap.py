"""What runs on a host before the agent: one line for any login shell, and the code that this line reads.

The line has nothing that a shell changes within single quotes: no `'`, `\\`, `!` and no line break. So it means the
same to sh, bash, zsh, fish and csh. It prints a mark, behind whatever the shell has printed, and runs the first line of
its standard input that is not empty. That line is HOST_CODE as a literal; a length and so many bytes of JSON follow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_LINE = (
    "exec {python} -c '"
    "import os,sys;"
    'os.write(1,(chr(10)+"{mark} "+sys.version.split()[0]+chr(10)).encode());'
    'f=os.fdopen(0,"rb",0,None,None,None,False);'
    "exec(next(l for l in f if l.strip()))'"
)
# Checks what the agent needs, says what is missing, and becomes the agent. `f` is standard input.
HOST_CODE = r"""
import os, sys
sys.path[:] = [part for part in sys.path if part]
import json
def read(count):
    data = b""
    while len(data) < count:
        more = f.read(count - len(data))
        if not more:
            sys.exit("the connection ended before the start")
        data += more
    return data
def answer(problem, detail=""):
    line = "\n%s %s\n" % (told["mark"], json.dumps({"problem": problem, "detail": detail}))
    os.write(1, line.encode())
    if problem:
        sys.exit(69)
def version():
    import importlib.util
    if importlib.util.find_spec("jaxrun") is None:
        return ""
    from jaxrun.protocol.names import VERSION
    return VERSION
told = json.loads(read(int(f.readline())))
env = dict(os.environ)
mine = [part for part in env.get("PATH", "").split(":") if part]
env.update(told["env"])
path = [part for part in env.get("PATH", "").split(":") if part]
env["PATH"] = ":".join(path + [part for part in mine if part not in path])
try:
    os.chdir(told["directory"])
except OSError as error:
    answer("directory", "%s: %s" % (told["directory"], error.strerror))
sys.path[:] = [part for part in env.get("PYTHONPATH", "").split(":") + sys.path if part]
try:
    found = version()
except Exception as error:
    answer("import", "jaxrun cannot be imported: %s: %s" % (type(error).__name__, error))
if found != told["version"]:
    answer("version", found)
words = [sys.executable if word == told["python"] else word for word in told["argv"]]
answer("")
try:
    os.execvpe(words[0], words, env)
except OSError as error:
    sys.exit("%s: %s" % (words[0], error.strerror))
"""


def remote_command(python: str, mark: str) -> str:
    """Return the line for the login shell of a host; `python` is a path that needs no quotes."""
    return _LINE.format(python=python, mark=mark)


def start_message(
    mark: str, argv: Sequence[str], python: str, directory: str, version: str, env: Mapping[str, str]
) -> bytes:
    """Return what is sent once the mark has come.

    argv:     what to run; the words that are `python`, this interpreter's path, become the path of the one there
    version:  of jaxrun, which must be there
    env:      to add to the environment of the login
    """
    told: dict[str, Any] = {
        "mark": mark,
        "argv": list(argv),
        "python": python,
        "directory": directory,
        "version": version,
        "env": dict(env),
    }
    data = json.dumps(told).encode()
    return f"exec({HOST_CODE!r})\n{len(data)}\n".encode() + data
