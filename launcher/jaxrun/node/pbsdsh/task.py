"""`python -m jaxrun.node.pbsdsh.task FILE WORDS`: becomes WORDS, with the directory and the environment in FILE."""

from __future__ import annotations

import json
import os
import sys


def main(path: str, words: list[str]) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            start = json.load(file)
        os.chdir(start["directory"])
    except OSError as error:
        host, wrong = os.uname().nodename, f"{error.filename}: {error.strerror}"
        sys.exit(f"jaxrun: on {host}: {wrong}; all hosts must see this directory")
    os.execve(words[0], words, {**os.environ, **start["env"]})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
