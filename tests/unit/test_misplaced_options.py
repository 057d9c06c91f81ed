"""Options of jaxrun after the program: a line asks whether they were meant for jaxrun, where nothing speaks against."""

import pytest

from jaxrun.cli.main import main


@pytest.fixture
def ask(tmp_path, monkeypatch, capsys):
    """ask(TEXT, WORDS…) → what is printed before the job of train.py, whose text is TEXT, is run with these words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr("jaxrun.supervisor.run.run", lambda plan, environ, early_server: 42)

    def run(text, *words):
        (tmp_path / "train.py").write_text(text)
        assert main(words) == 42
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("train.py", "-n", "4"), "-n 4 goes to train.py; did you mean jaxrun -n 4 train.py?"),
        (("-d", "2", "train.py", "-np=4", "x"), "-np=4 goes to train.py; did you mean jaxrun -np=4 -d 2 train.py x?"),
        (
            ("train.py", "a b", "--processes", "4", "--dry-run"),
            "--processes 4 --dry-run go to train.py; did you mean jaxrun --processes 4 --dry-run train.py 'a b'?",
        ),
        (("-m", "train", "--backend=slurm"), "did you mean jaxrun --backend=slurm -m train?"),
    ],
)
def test_it_asks(ask, words, line):
    assert line in ask("print(1)\n", *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print(1)", ("-n", "2", "train.py", "-n", "4")),  # known to the user
        ("print(1)", ("--", "train.py", "-n", "4")),  # said to be the program's
        ("print(1)", ("train.py", "--", "-n", "4")),
        ("print(1)", ("train.py", "-n", "many")),  # would be none of ours
        ("print(1)", ("train.py", "-n")),
        ("print(1)", ("train.py", "-m", "--run-dir", "x", "-x")),  # common in programs
        ("parser.add_argument('-n', type=int)", ("train.py", "-n", "4")),
        ("flags.DEFINE_integer('processes', 1, '')", ("train.py", "--processes", "4")),
        ("class Config:\n    devices_per_process: int", ("train.py", "--devices-per-process", "4")),
    ],
)
def test_it_does_not_ask(ask, text, words):
    assert ask(text, *words) == ""
