"""Whose a frame is, by the name of its file."""

import pytest

from jaxrun import stack_frames

LIB = "/usr/lib/python3.13"
SITE = "/venv/lib/python3.13/site-packages"


@pytest.mark.parametrize(
    "file",
    [
        "/job/train.py",
        "train.py",
        "<stdin>",
        "<string>",
        "<cell 7>",
        "/tmp/ipykernel_7/1234.py",
        "/job/train.pyz/__main__.py",
        f"{SITE}/jaxrun_runtime/programs/regression.py",
    ],
)
def test_these_are_the_programs(file):
    assert stack_frames.is_programs(file) and not stack_frames.is_library(file.replace(SITE, ""))
    assert stack_frames.find_package("/job/train.py") == ""


@pytest.mark.parametrize(
    ("file", "package"),
    [
        (f"{SITE}/flax/nnx/transforms/compilation.py", f"{SITE}/flax/"),
        ("/usr/lib/python3/dist-packages/optax/_src/base.py", "/usr/lib/python3/dist-packages/optax/"),
        (f"{SITE}/six.py", f"{SITE}/six.py"),
        ("/job/deps.zip/wrapper/__init__.py", "/job/deps.zip/"),
        (f"{SITE}/old-1.0-py3.13.egg/old/main.py", f"{SITE}/old-1.0-py3.13.egg/"),
        (f"{LIB}/contextlib.py", ""),
        ("/opt/lib/python3.13t/functools.py", ""),
        ("/opt/python313.zip/queue.py", "/opt/python313.zip/"),
        ("<@beartype(train.step) at 0x7f21>", ""),
        ("<decorator-gen-12>", ""),
        ("<frozen importlib._bootstrap>", ""),
        (f"{SITE}/jax/_src/pjit.py", ""),
        (f"{SITE}/jaxrun_runtime/worker.py", ""),
    ],
)
def test_these_are_a_librarys_and_this_is_its_package(file, package):
    assert not stack_frames.is_programs(file)
    assert stack_frames.is_library(file)
    assert (stack_frames.find_package(file), stack_frames.is_packages(file)) == (package, bool(package))


@pytest.mark.parametrize(
    ("files", "own"),
    [
        ((f"{SITE}/flax/a.py", "/job/b.py", f"{SITE}/absl/app.py", "/job/main.py"), [1, 3]),
        ((f"{SITE}/flax/a.py", f"{SITE}/trainer/b.py", f"{SITE}/absl/app.py", f"{SITE}/trainer/__main__.py"), [1, 3]),
        ((f"{SITE}/jax/_src/pjit.py", f"{LIB}/threading.py"), []),
        ((f"{LIB}/queue.py", f"{SITE}/orbax/b.py", f"{LIB}/concurrent/futures/thread.py"), [1]),
        ((f"{SITE}/flax/a.py", "/job/app.zip/steps.py", "/job/app.zip/__main__.py"), [1, 2]),
        ((), []),
    ],
    ids=["the user's", "an installed program", "none", "a thread of a library", "a zipped program", "no frames"],
)
def test_the_frames_of_the_program_are(files, own):
    assert stack_frames.find_program_frames(files) == own
