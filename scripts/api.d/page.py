"""Writes docs/api.md, the API on which programs and tools may rely, from the docstrings: `scripts/api`."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxrun
import jaxrun_runtime
from jaxrun.frontends.pytest_plugin import fixtures
from jaxrun.frontends.pytest_plugin.plugin import MARKER

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
_FIXTURES = ("gang", "process_index", "process_count", "shared_tmp_path", "gangs")
_INTERNAL = ("mark_broken", "ensure_usable", "from_verdict")  # public methods that only jaxrun itself calls
_PARAMETERS = re.compile(r"[\w, ]+: .*:  |[\w, ]+:  ", re.DOTALL)  # a block of "name:  what it is"
_HEAD = """# The API

Use `jaxrun` in your own Python process to run functions on many others, and `jaxrun_runtime` in programs that jaxrun
runs. Your programs and tools may rely on everything on this page.

```python
import jaxrun

with jaxrun.Gang(processes=4) as gang:  # in your own Python process
    print(gang.run(train, config))
```

```python
import jaxrun_runtime as jr  # in a program that jaxrun runs

if jr.is_main:
    print(f"{jr.size} processes, logs in {jr.run_dir}")
```

Tools may also rely on [the command line](command-line.md), [exit codes](failures.md), [environment
variables](environment.md), and [the event log](event-log.md) of each run directory. `scripts/api` makes this
page from the docstrings.
"""


def make_page() -> str:
    """Return the whole text."""
    return "\n".join([_HEAD, *_launcher(), *_runtime(), *_pytest()]).rstrip("\n") + "\n"


def _launcher() -> Iterator[str]:
    yield "## jaxrun\n"
    names = [name for name in dir(jaxrun) if not name.startswith("_")]
    for name in sorted(names, key=lambda name: (_is_error(getattr(jaxrun, name)), name.lower())):
        yield from _describe(getattr(jaxrun, name), f"jaxrun.{name}")


def _runtime() -> Iterator[str]:
    yield "## jaxrun_runtime\n"
    text = inspect.cleandoc(jaxrun_runtime.__doc__ or "")
    yield re.search(r"^\|.*^\|[^\n]*$", text, re.DOTALL | re.MULTILINE)[0] + "\n"  # type: ignore[index]
    for name in sorted(name for name in dir(jaxrun_runtime) if callable(getattr(jaxrun_runtime, name))):
        yield from _describe(getattr(jaxrun_runtime, name), f"jaxrun_runtime.{name}")


def _pytest() -> Iterator[str]:
    yield "## pytest\n"
    yield f"### `@pytest.mark.{MARKER.partition(': ')[0]}`\n\n{_text(MARKER.partition(': ')[2])}"
    for name in _FIXTURES:
        yield f"### fixture `{name}`\n\n{_text(inspect.getdoc(getattr(fixtures, name)))}"


def _describe(thing: Any, name: str) -> Iterator[str]:
    """Yield the text about a class with its public methods and properties, or about a function."""
    yield f"### `{name}{_signature(thing)}`\n\n{_text(inspect.getdoc(thing))}"
    if not inspect.isclass(thing):
        return
    for member in (member for member in vars(thing) if not member.startswith("_") and member not in _INTERNAL):
        found = inspect.getattr_static(thing, member)
        if not inspect.getdoc(found):
            continue
        if isinstance(found, property):
            yield f"**`.{member}`**: {_text(inspect.getdoc(found))}"
        elif isinstance(found, Callable | classmethod):  # type: ignore[arg-type]
            yield f"**`.{member}{_signature(getattr(thing, member))}`**: {_text(inspect.getdoc(found))}"


def _signature(thing: Any) -> str:
    """Return the names and defaults of the parameters, without their types."""
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return "()"
    if _is_error(thing) or (inspect.isclass(thing) and issubclass(thing, tuple)):  # which nobody makes
        return ""
    plain = [
        one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values() if one.name != "self"
    ]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def _is_error(thing: Any) -> bool:
    return inspect.isclass(thing) and issubclass(thing, BaseException)


def _text(docstring: str | None) -> str:
    """Return a docstring as Markdown. Blocks of "name:  meaning" stay as they are."""
    blocks = textwrap.dedent(docstring or "").strip().split("\n\n")
    return "\n\n".join(f"```text\n{block}\n```" if _PARAMETERS.match(block) else block for block in blocks) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page())
    print(f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")
