"""A package that has been imported is hidden until it is imported again, as one that was never imported would be."""

import importlib.util
import sys

import pytest

from jaxrun_runtime.import_watch import ImportWatch


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package `watched` with two modules; one of them has been imported."""
    (tmp_path / "watched").mkdir()
    for name in ("__init__", "inner", "later"):
        (tmp_path / "watched" / f"{name}.py").write_text(f"name = {name!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    import watched.inner

    yield watched
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def watch(package):
    told = []
    made = ImportWatch("watched", lambda: told.append(sys.modules["watched"]))
    made.told = told
    made.start()
    yield made
    made.stop()
    assert made not in sys.meta_path


@pytest.mark.parametrize(
    "statement",
    ["import watched", "import watched.inner", "from watched.inner import name", "from watched import inner"],
)
def test_the_first_import_is_told_once_and_finds_the_same_modules(package, watch, statement):
    inner, spec = package.inner, package.__spec__
    assert "watched" not in sys.modules and "watched.inner" not in sys.modules
    exec(statement, {})
    exec(statement, {})
    assert watch.told == [package]
    assert sys.modules["watched"] is package and sys.modules["watched.inner"] is inner
    assert package.__spec__ is spec and importlib.util.find_spec("watched") is spec


def test_a_module_that_was_not_imported_yet_is_imported_as_ever(package, watch):
    import watched.later

    assert watch.told == [package] and watched.later.name == "later"


def test_to_look_for_the_package_is_not_to_import_it(package, watch):
    spec = importlib.util.find_spec("watched")
    assert spec.origin == package.__file__ and spec.has_location
    assert list(spec.submodule_search_locations) == list(package.__path__)
    assert watch.told == [] and "watched" not in sys.modules


def test_a_package_that_is_never_imported_is_put_back(package, watch):
    watch.stop()
    assert watch.told == [] and sys.modules["watched"] is package and sys.modules["watched.inner"] is package.inner


def test_a_package_that_the_program_has_put_there_itself_stays(package, watch):
    sys.modules["watched"] = sys
    watch.stop()
    assert sys.modules["watched"] is sys
