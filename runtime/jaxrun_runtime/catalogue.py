"""The cross-process programs that this rank knows: from lowering over compilation to the first call.

Executables are held weakly, or as the numbers that are their ids.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from . import jaxhooks
from .recorder import Program, Recorder

if TYPE_CHECKING:
    from .description import Lowered, Note, Texts


class Catalogue:
    """Tells the recorder of each program that is new. Whatever is wrong with a program is raised."""

    # description.py and jaxfacts.py are imported when they are needed: they would take 2 ms of a job's start.

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._since = time.monotonic()
        self._texts: Texts | None = None
        self._notes: WeakKeyDictionary[Any, Note] = WeakKeyDictionary()
        self._programs: WeakKeyDictionary[Any, Program | None] = WeakKeyDictionary()
        self._loaded: dict[int, Program] = {}
        self._alike: dict[tuple[str, str, str], Program] = {}
        self._naming = threading.RLock()

    def lowering(self, module: Any, devices: Any) -> Lowered | None:
        """A program is about to be compiled; returns what `lowered` wants to know, None if it is of one process."""
        if len({device.process_index for device in devices}) < 2:
            return None
        from . import description

        self._texts = self._texts or description.Texts(self._since)
        return description.lowered(module, devices, self._texts)

    def lowered(self, compiled: Any, lowered: Lowered) -> None:
        """It has been compiled."""
        from . import jaxfacts

        note = (lowered, jaxfacts.signature(compiled))
        jaxhooks.when_loaded(compiled, lambda executed: self._notes.__setitem__(executed, note))

    def called(self, executed: Any, args: Sequence[Any]) -> tuple[Program | None, bool]:
        """The program that Python is about to dispatch, None if it is of one process; and whether it is new."""
        with contextlib.suppress(KeyError):
            return self._programs[executed], False
        with self._naming:
            before = len(self._alike)
            program = self._programs[executed] = self._describe(executed, args)
            loaded = id(jaxhooks.loaded(executed))
            if program is None:
                self._loaded.pop(loaded, None)
            else:
                self._loaded[loaded] = program
            return program, len(self._alike) > before

    def known(self, loaded: Any) -> Program | None:
        """The program that a loaded executable is, which Python has just dispatched: its id is not an older one's."""
        return self._loaded.get(id(loaded))

    def _describe(self, executed: Any, args: Sequence[Any]) -> Program | None:
        note = self._notes.get(executed)
        if note is None and len(jaxhooks.ranks(executed)) < 2:
            return None
        from . import description

        ranks, fields = description.about(executed, args, note)
        alike = (fields["key"], fields["code"], fields["source"])  # as of one that was compiled again
        if alike not in self._alike:
            group = self._recorder.group(description.compact(ranks))
            self._alike[alike] = self._recorder.program(group, fields)
        self._notes.pop(executed, None)
        return self._alike[alike]
