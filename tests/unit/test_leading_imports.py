"""What a program imports before all else, read from its files: nothing of it is imported here."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from jaxrun.frontends.gang.main_imports import imports_of_main
from jaxrun.protocol.forkserver_messages import ImportedName, Preload
from jaxrun.spec.job import leading_imports
from jaxrun.spec.job.leading_imports import find_leading_imports, imports_of_file, preload_order

_TABLE = ("flax", "optax", "orbax.checkpoint")


def _wanted(module):
    return any(module == known or module.startswith(f"{known}.") for known in _TABLE)


@pytest.fixture
def write(tmp_path):
    """write(NAME=TEXT, …) makes files of Python, and returns their directory; names may be paths."""

    def write_all(texts=None, **more):
        for name, text in {**(texts or {}), **more}.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write_all


def _names(folder, *program):
    return [line.name for line in find_leading_imports(program, str(folder), _wanted).imports]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('"""Text."""\n# more\nfrom __future__ import annotations\nimport os, optax\nimport flax\n', ["optax", "flax"]),
        ("import flax.linen as nn, optax as o", ["flax.linen", "optax"]),
        ("from flax import nnx, linen as nn", ["flax:nnx,linen"]),
        ("from flax.nnx import Module", ["flax.nnx:Module"]),
        ("from flax import *", ["flax:*"]),
        ("import orbax.checkpoint as ocp", ["orbax.checkpoint"]),
        ("from orbax import checkpoint, export", ["orbax.checkpoint"]),
        ("import orbax", []),
        ("import optax\nimport optax\nimport flax", ["optax", "flax"]),
        ("import flax\nx = 1\nimport optax", ["flax"]),
        ("import os\nos.environ['A'] = '1'\nimport flax", []),
        ("try:\n    import flax\nexcept ImportError:\n    pass\n", []),
        ("if True:\n    import flax\n", []),
        ("1\nimport flax", ["flax"]),
        ("import flax\n1\nimport optax", ["flax"]),
        ("import numpy, unknown, flax", ["flax"]),
        ("import flax\ndef f(:", []),
        ("import flax\n\0", []),
        ("import flax\n'\\d'", ["flax"]),  # without the warning that Python prints
        ("from . import x\nimport flax", []),
        ("# -*- coding: latin-1 -*-\nimport flax # \xe9", ["flax"]),
        ("", []),
    ],
)
def test_the_leading_block_of_a_script_ends_at_the_first_other_statement(tmp_path, text, names):
    (tmp_path / "train.py").write_bytes(text.encode("latin-1"))
    assert _names(tmp_path, "train.py", "--flag") == names


def test_each_name_goes_with_the_line_that_imports_it(write):
    folder = write(train="import optax\nimport model\n", model="\n\nfrom flax import nnx\n")
    assert find_leading_imports(["./train.py"], str(folder), _wanted) == Preload(
        (
            ImportedName("optax", f"{folder}/./train.py", 1, "__main__", in_table=True),
            ImportedName("flax:nnx", f"{folder}/model.py", 3, "model", in_table=True),
        ),
        f"{folder}/./train.py",
        str(folder),
    )


def test_modules_of_the_program_are_followed_where_python_would_execute_them(write):
    folder = write(
        {
            "train": "import data\nfrom pkg.model import Net\nfrom pkg import extra\nimport pkg.deep.er\nimport optax",
            "data": "import flax.serialization\nrows = list(range(3))\n",
            "pkg/__init__": "from . import first\n",
            "pkg/first": "import flax.core\n",
            "pkg/model": "from .layers import x\n",
            "pkg/layers": "import flax.linen\n",
            "pkg/extra": "import flax.traverse_util\n",
            "pkg/deep/__init__": "",
            "pkg/deep/er": "from ..first import a\nfrom flax import nnx\n",
        }
    )
    assert _names(folder, "train.py") == [
        "flax.serialization",
        "flax.core",
        "flax.linen",
        "flax.traverse_util",
        "flax:nnx",
        "optax",
    ]


@pytest.mark.parametrize("program", [("-m", "pkg.train"), ("-m", "pkg"), ("pkg",), ("other/../pkg/__main__.py",)])
def test_a_module_a_package_and_a_directory_are_programs_too(write, program):
    folder = write({"pkg/__init__": "import flax.core\n", "other/x": ""})
    text = "import optax\n" if program[0] != "-m" else "from . import near\nimport optax\n"
    write({"pkg/train": text, "pkg/__main__": text, "pkg/near": "import flax.linen\n"})
    of_package = ["flax.core", "flax.linen"] if program[0] == "-m" else []
    assert _names(folder, *program) == [*of_package, "optax"]
    assert sys.modules.keys().isdisjoint({"pkg", "near"})


def test_of_an_installed_module_only_its_own_package_is_read(write, tmp_path, monkeypatch):
    write(
        {
            "site/app/__init__": "",
            "site/app/main": "import optax\nimport other\nfrom . import near",
            "site/app/near": "import flax",
            "site/optax": "import flax.core",
            "site/other": "import flax.linen",
        }
    )
    (tmp_path / "here").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert _names(tmp_path / "here", "-m", "app.main") == ["optax", "flax"]


@pytest.mark.parametrize(
    ("body", "is_seen"),
    [
        ("x = 1", True),
        ("class Net:\n    pass\n\ndef f():\n    print()\n\nasync def g(): ...", True),
        ("a, b = f()", True),
        ("x: int = 3", True),
        ("import late\n'text'", True),
        ("if TYPE_CHECKING:\n    import x\nelse:\n    y = 1", True),
        ("try:\n    import x\nexcept ImportError:\n    x = None", True),
        ("print()", False),
        ("os.environ['X'] = '1'", False),
        ("x = os.environ.setdefault('X', '1')", False),
        ("def f():\n    os.environ['X'] = '1'\nx = f()", False),
        ("jax.config.x64 = True", False),
        ("settings['a'] = 1", False),
        ("if x:\n    print()", False),
        ("for x in y:\n    pass", False),
        ("with x:\n    pass", False),
        ("del x", False),
    ],
)
def test_the_search_ends_behind_a_module_that_may_do_more_than_define(write, body, is_seen):
    folder = write(train="import own\nimport optax\n", own=f"import flax\n{body}\n")
    assert _names(folder, "train.py") == (["flax", "optax"] if is_seen else ["flax"])


def test_a_module_beside_the_program_goes_before_a_package_of_its_name(write):
    folder = write(
        train="import optax\nimport flax\nimport random\n",
        optax="import flax.linen\n",
        random="import orbax.checkpoint",
    )
    (folder / "flax").mkdir()  # without an __init__.py it gives way to the package
    assert _names(folder, "train.py") == ["flax.linen", "flax"]


def test_a_circle_a_broken_module_and_too_much_code_end_it(write, monkeypatch):
    folder = write(train="import a\nimport optax", a="import b", b="import flax\nimport a")
    assert _names(folder, "train.py") == ["flax", "optax"]
    write(b="import flax\n(")
    assert _names(folder, "train.py") == []
    (folder / "b.py").unlink()
    (folder / "b.py").symlink_to("/dev/zero")
    assert _names(folder, "train.py") == ["optax"]  # no file, so that Python does not find it there either
    write(a=f"import flax\n#{'x' * 300_000}\n")
    assert _names(folder, "train.py") == []
    write(a="import flax\n")
    monkeypatch.setattr(leading_imports, "_MAX_FILES", 1)
    assert _names(folder, "train.py") == []
    monkeypatch.undo()
    monkeypatch.setattr(leading_imports, "_MAX_DEPTH", 0)
    assert _names(folder, "train.py") == []


@pytest.mark.parametrize("program", [("gone.py",), ("-m", "no_such_module"), ("-m",), ("zipped",), ("/dev/null",)])
def test_nothing_is_anticipated_of_a_program_that_cannot_be_read(tmp_path, program):
    (tmp_path / "zipped").write_bytes(b"PK\x03\x04")
    assert find_leading_imports(program, str(tmp_path), _wanted) == Preload(())


def test_a_file_that_is_not_a_program_also_has_leading_imports(write):
    folder = write({"tests/test_x": "import helpers\nimport optax\n", "tests/helpers": "import flax"})
    lines = imports_of_file(Path(folder, "tests/test_x.py"), [str(folder / "tests")], _wanted)
    assert [(line.name, line.within) for line in lines] == [("flax", "helpers"), ("optax", "test_x")]


def test_what_the_option_means(write):
    folder = write(train="import optax\n")
    order = preload_order("auto", ["train.py"], str(folder), ["RANK"])
    assert order is not None and [line.name for line in order.imports] == ["optax"] and order.by_rank == ("RANK",)
    assert preload_order("none", ["train.py"], str(folder), []) is None
    named = preload_order("own.x,flax", ["train.py"], str(folder), [])
    assert named == Preload(
        (ImportedName("own.x"), ImportedName("flax", in_table=True)), f"{folder}/train.py", str(folder)
    )
    write(train="print()")
    assert preload_order("auto", ["train.py"], str(folder), []) is None


def test_the_ranks_of_a_notebook_need_what_its_cells_have_imported_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = ModuleType("__main__")  # without a file
    vars(notebook)["In"] = ["", "import orbax.checkpoint, sys", "import flax.nnx as nnx\nimport optax.contrib", "x = 1"]
    vars(notebook).update({"orbax": ModuleType("orbax"), "einops": ModuleType("einops"), "mine": ModuleType("mine")})
    for module in ("orbax", "orbax.checkpoint", "flax.nnx"):  # the import of optax has failed
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.delitem(sys.modules, "optax.contrib", raising=False)
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    assert [line.name for line in imports_of_main()] == ["einops", "orbax.checkpoint", "flax.nnx"]
