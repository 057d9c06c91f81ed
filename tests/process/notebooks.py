"""Executes notebooks and single cells in real kernels, and sees to it that nothing of them is left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import TIME_LIMIT, wait_until

from jaxrun.node.agent.guard import find_marked

_MARK = "NOTEBOOK_TEST"
_OWN = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# In a process of its own, for which the warnings of Jupyter's packages are no errors.
_EXECUTE = "from nbclient.cli import main; main()"


@dataclass(frozen=True)
class Shown:
    """All that a cell has shown, as plain text without colours; the name of its error's type; its Out[]; PNG images."""

    text: str
    html: str
    error: str
    result: str
    images: int = 0


def execute(directory: Path, cells: Mapping[str, str]) -> dict[str, Shown]:
    """Execute a notebook of these cells with nbclient, and check that no process is left."""
    common: dict[str, Any] = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    written = [{**common, "id": str(number), "source": source} for number, source in enumerate(cells.values())]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path = directory / "notebook.ipynb"
    path.write_text(json.dumps({"cells": written, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, "-c", _EXECUTE, "--inplace", "--allow-errors", f"--timeout={TIME_LIMIT}", str(path)],
        env=_environment(directory, mark),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert done.returncode == 0, done.stderr
    wait_until_gone(processes(mark), mark)
    executed = json.loads(path.read_text())["cells"]
    return {name: _shown(cell["outputs"]) for name, cell in zip(cells, executed, strict=True)}


class Kernel:
    """A kernel with a gang of two ranks, which know the variable `known`."""

    def __init__(self, directory: Path) -> None:
        from jupyter_client.manager import KernelManager

        self.mark = uuid.uuid4().hex
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(env=_environment(directory, self.mark), cwd=str(directory))
        self._client = self._manager.client()
        self._client.start_channels()

    def start_gang(self) -> None:
        self._client.wait_for_ready(timeout=TIME_LIMIT)
        started = self.run("%load_ext jaxrun\n%gang -n 2\ngang['known'] = True")
        assert not started.error, started

    def run(self, source: str, on_asleep: Callable[[], None] | None = None, asleep: str = "asleep") -> Shown:
        """Execute a cell; `on_asleep` is called once when it has shown this text."""
        outputs: list[dict[str, Any]] = []
        waiting = [] if on_asleep is None else [on_asleep]

        def take(message: Mapping[str, Any]) -> None:
            outputs.append({"output_type": message["msg_type"], **message["content"]})
            if waiting and asleep in _shown(outputs).text:
                waiting.pop()()

        self._client.execute_interactive(source, output_hook=take, timeout=TIME_LIMIT, stop_on_error=False)
        return _shown(outputs)

    def complete(self, code: str) -> list[str]:
        """What the end of the code may become, as the Tab key shows it."""
        reply = self._client.complete(code, len(code), reply=True, timeout=TIME_LIMIT)
        return list(reply["content"]["matches"])

    def interrupt(self) -> None:
        """As the stop button does."""
        self._manager.interrupt_kernel()

    def restart(self) -> None:
        self._manager.restart_kernel()

    def kill(self) -> None:
        self._manager.signal_kernel(9)

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        wait_until_gone(processes(self.mark), self.mark)


def processes(mark: str) -> set[int]:
    """All that were started for it."""
    return set(find_marked(f"{_MARK}={mark}"))


def wait_until_gone(pids: Collection[int], mark: str) -> None:
    """Until none of these is left of those that have the mark."""
    wait_until(lambda: not processes(mark) & set(pids), "end of all")


def _environment(directory: Path, mark: str) -> dict[str, str]:
    return {**os.environ, **{name: str(directory / name.lower()) for name in _OWN}, _MARK: mark}


def _shown(outputs: list[dict[str, Any]]) -> Shown:
    texts, html, errors, results = [], [], [], []
    images = 0
    for output in outputs:
        match output["output_type"]:
            case "stream":
                texts.append(_joined(output["text"]))
            case "error":
                errors.append(output["ename"])
                texts.append("\n".join(output["traceback"]))
            case "display_data" | "update_display_data" | "execute_result" as kind:
                texts.append(_joined(output["data"]["text/plain"]))
                html.append(_joined(output["data"].get("text/html", "")))
                images += "image/png" in output["data"]
                results += texts[-1:] if kind == "execute_result" else []
    return Shown(_COLOURS.sub("", "\n".join(texts)), "\n".join(html), "".join(errors), "".join(results), images)


def _joined(text: str | list[str]) -> str:
    return "".join(text)  # a notebook file has lists of lines
