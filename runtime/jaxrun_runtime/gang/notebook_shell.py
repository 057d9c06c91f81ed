"""IPython's shell on a rank, for what cells have beside Python: magics, !commands, displays and figures.

It is made when a cell first uses it, as importing IPython takes 0.3 s.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from types import ModuleType
from typing import Any

_shell: Any = None
_displays: list[dict[str, str]] = []  # of the running cell


def get_shell(main: ModuleType) -> Any:
    """Return the shell, whose namespace is that of `main`. Raises ImportError where there is no IPython."""
    global _shell
    if _shell is None:
        _shell = _make_shell(main)
    return _shell


def pop_displays() -> tuple[dict[str, str], ...]:
    """Return what the cell that has ended has displayed, its open figures included."""
    if _shell is not None:
        _shell.events.trigger("post_execute")  # for which %matplotlib inline waits to show figures
    displays = tuple(_displays)
    _displays.clear()
    return displays


def format_value(value: Any) -> dict[str, str] | None:
    """Return the display of a value with the formatters of the shell; None if there is no shell yet."""
    return None if _shell is None else to_text(_shell.display_formatter.format(value)[0])


def to_text(display: Mapping[str, Any]) -> dict[str, str]:
    """The display's content as texts: images in base64, without what is neither text nor bytes, such as JSON."""
    texts = {}
    for mime_type, content in display.items():
        if isinstance(content, bytes):
            texts[mime_type] = base64.b64encode(content).decode()
        elif isinstance(content, str):
            texts[mime_type] = content
    return texts


def _make_shell(main: ModuleType) -> Any:
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Publisher(DisplayPublisher):
        def publish(self, data: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
            _displays.append(to_text(data))

    class RankShell(InteractiveShell):
        def enable_gui(self, gui: str | None = None) -> None:
            """A rank has no event loop of a window system."""

    config = Config({"HistoryManager": {"enabled": False}})  # whose thread and database would be shared by all ranks
    return RankShell.instance(
        config=config, display_pub_class=Publisher, user_module=main, user_ns=vars(main), colors="NoColor"
    )
