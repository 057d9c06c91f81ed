"""docs/api.md says what the docstrings say."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_script_makes_of_the_docstrings():
    page = runpy.run_path(str(ROOT / "scripts" / "api.d" / "page.py"))
    assert (ROOT / "docs" / "api.md").read_text() == page["make_page"](), "run scripts/api"


def test_it_has_all_that_is_public():
    text = (ROOT / "docs" / "api.md").read_text()
    for name in (
        "jaxrun.launch(",
        "jaxrun.Gang(",
        "jaxrun.pool(",
        "jaxrun_runtime.should_stop(",
        "pytest.mark.processes(",
    ):
        assert f"### `{name}" in text or f"### `@{name}" in text, name
