"""Which modules --preload auto may import before the ranks are forked."""

import re
from pathlib import Path

import pytest

from jaxrun.spec.job import preload_table
from jaxrun.spec.job.preload_table import PRELOADABLE, Entry, preloadable

_TABLE = {
    "whole": Entry(safe=True),
    "unsafe": Entry(safe=False, reason="it starts a thread"),
    "part": Entry(safe=True, modules=("part", "part.pure")),
    "shared.one": Entry(safe=True),
}


@pytest.mark.parametrize(
    ("module", "may"),
    [
        ("whole", True),
        ("whole.below.it", True),
        ("wholesome", False),
        ("unsafe", False),
        ("unsafe.below", False),
        ("part", True),
        ("part.pure", True),
        ("part.pure.below", False),
        ("part.other", False),
        ("shared", False),
        ("shared.one", True),
        ("shared.one.below", True),
        ("shared.two", False),
        ("unknown", False),
    ],
)
def test_a_module_may_be_imported_if_the_nearest_entry_says_so(monkeypatch, module, may):
    monkeypatch.setattr(preload_table, "PRELOADABLE", _TABLE)
    assert preloadable(module) is may


def test_an_entry_says_why_it_is_not_safe_and_names_only_its_own_modules():
    for name, entry in PRELOADABLE.items():
        assert entry.safe != bool(entry.reason), name
        assert all(module == name or module.startswith(f"{name}.") for module in entry.modules), name


def test_the_page_has_the_table_of_the_code():
    page = (Path(__file__).parents[2] / "docs" / "startup.md").read_text()
    rows = re.findall(r"^\| `(.*?)` \| \d[\w.]* \| (.*?) \|$", page, re.MULTILINE)
    assert rows == [(name, _on_the_page(entry)) for name, entry in sorted(PRELOADABLE.items())]


def _on_the_page(entry):
    if not entry.safe:
        return f"no: {entry.reason}"
    return f"only {', '.join(f'`{module}`' for module in entry.modules)}" if entry.modules else "yes"
