"""The files and the commands that the pages of the documentation show, and whether a command prints what they show.

In what a page shows below a command, `…` stands for any text of a line; alone, for any lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_NUMBER = re.compile(r'(?P<line>\.py:\d+|\.py", line \d+)|\d+')
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Example:
    """A command of a page, the prompt before it, and what the page shows below it."""

    page: Path
    prompt: str
    command: str
    shown: str

    def __str__(self) -> str:
        return f"{self.page.name}: {self.command}"

    @property
    def exit_code(self) -> int:
        """The one that the page shows, 0 where it shows none."""
        found = re.search(r"^(?:exit|  \"exit_code\":) (\d+)$", self.shown, re.MULTILINE)
        return int(found[1]) if found else 0

    def missing(self, output: str) -> Iterator[str]:
        """The lines that the page shows and that are not in the output of the command."""
        lines = [_without_variable_parts(line) for line in output.splitlines()]
        for shown in self.shown.splitlines():
            words = _without_variable_parts(shown).split("…")
            pattern = re.compile(".*".join(map(re.escape, words)))
            if shown != "…" and not any(pattern.fullmatch(line) for line in lines):
                yield shown


def files(text: str) -> dict[str, str]:
    """The files of a page by name: blocks of Python or TOML whose first line is `# NAME`."""
    blocks = re.findall(r"^```(?:python|toml)\n# ([\w-]+\.\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return {name: f"# {name}\n{body}" for name, body in blocks}


def examples(page: Path, prompts: Iterable[str]) -> list[Example]:
    """The commands of a page with one of these prompts: "$", "login$". Other prompts begin a command, too."""
    blocks = re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    commands = [
        Example(page, prompt, command, shown)
        for block in blocks
        for prompt, command, shown in re.findall(r"^(\w*\$) (.*)\n((?:(?!\w*\$ ).*\n)*)", block, re.MULTILINE)
    ]
    return [example for example in commands if example.prompt in prompts]


def _without_variable_parts(line: str) -> str:
    """A line without what differs from run to run: colours, numbers, the width of columns, the directories of files.

    The numbers of lines in programs stay: `train.py:13`, `File "train.py", line 13`.
    """
    plain = re.sub(r"\x1b\[\d*m", "", line)
    plain = re.sub(r"(?<=\S) {2,}", "  ", plain)
    return _NUMBER.sub(lambda found: found["line"] or "#", re.sub(r'File ".*/', 'File "', plain))
