"""Which tests pytest-xdist keeps together with `--dist loadgroup`: those that share a fixture of their module.

Otherwise each of its processes would run the job that they all look at.
"""

from __future__ import annotations

from pathlib import Path

import pytest

UNIT = Path(__file__).parent / "unit"  # where a test takes less time than its way to another process


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(UNIT) or _shares_a_module_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.path.name))


def _shares_a_module_fixture(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return any(definition.scope == "module" for found in definitions for definition in found)
