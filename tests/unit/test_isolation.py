"""Environments that hold jaxrun alone: uv's, pipx's; their files as uv 0.13 and pipx 1.18 make them."""

import pytest
from msgspec.structs import replace
from outcomes import failed

from jaxrun.node.other_pythons import OtherPython, describe_other_python, missing_module
from jaxrun.protocol.error_chain import ChainedError
from jaxrun.spec.job.isolation import describe_isolation

MADE = {
    "uv tool": ("tools/jaxrun", "uv-receipt.toml", "uv tool install jaxrun --with"),
    "pipx": ("pipx/venvs/jaxrun", "pipx_metadata.json", "pipx inject jaxrun"),
    "uvx": ("cache/archive-v0/NCCOKYzfJTJx7g8I", "pyvenv.cfg", "uvx --with"),
}


@pytest.mark.parametrize("tool", MADE)
def test_an_environment_of_one_command_is_named_with_what_to_type(tool, tmp_path):
    folder, file, command = MADE[tool]
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / file).touch()
    said = describe_isolation(str(tmp_path / folder))
    assert said.startswith(f"{tool} runs jaxrun in an environment of its own") and command in said


@pytest.mark.parametrize("folder", ["project/.venv", "usr", "cache/builds-v0/.tmpX1kfKf"])  # the last: uv run --with
def test_every_other_environment_is_the_programs(folder, tmp_path):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "pyvenv.cfg").write_text("uv = 0.13.9\n")
    assert describe_isolation(str(tmp_path / folder)) == ""


NO_PANDAS = ChainedError("ModuleNotFoundError", "No module named 'pandas.core'; 'pandas' is not a package")
MISSING = {
    "itself": ("ModuleNotFoundError", "No module named 'sklearn'", (), "sklearn"),
    "what led to it": (
        "ImportError",
        "please install pandas",
        (NO_PANDAS, ChainedError("ImportError", "")),
        "pandas.core",
    ),
    "a text of the program's own": ("ModuleNotFoundError", "no backend", (), ""),
    "another error": ("ImportError", "cannot import name 'x' from 'y'", (), ""),
    "an error while it was handled": ("ValueError", "bad record", (NO_PANDAS, ChainedError("ValueError", "")), ""),
}


@pytest.mark.parametrize(("error", "message", "chain", "module"), MISSING.values(), ids=MISSING)
def test_the_module_that_is_missing_is_read_from_the_failure(error, message, chain, module):
    assert missing_module(replace(failed(0, message, error=error), chain=chain)) == module


def test_a_python_that_has_the_module_is_named_with_what_to_type():
    means, advice = describe_other_python("sklearn", OtherPython("python", "/home/u/venv/bin/python", has_jaxrun=True))
    assert means.startswith("sklearn is not installed for ") and means.endswith(", but for /home/u/venv/bin/python.")
    assert advice == "start the job with that Python: python -m jaxrun …"
    other = OtherPython("/opt/conda/bin/python", "/opt/conda/bin/python", has_jaxrun=False)
    assert "/opt/conda/bin/python -m pip install jaxrun; /opt" in describe_other_python("sklearn", other)[1]
