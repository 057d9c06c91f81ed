"""docs/api.md says what the docstrings say."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_script_makes_of_the_docstrings():
    page = runpy.run_path(str(ROOT / "scripts" / "api.d" / "page.py"))
    assert (ROOT / "docs" / "api.md").read_text() == page["make_page"](), "run scripts/api"
