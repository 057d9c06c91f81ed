"""What a notebook is told while a gang works, and when."""

from types import SimpleNamespace

import pytest

from jaxrun.gang.call import Printed
from jaxrun.notebook import display as screen_module
from jaxrun.notebook.display import NotebookDisplay
from jaxrun.notebook.transcript import PAGE_LINES


class _Notebook:
    """Its outputs, as plain text, in their order."""

    def __init__(self):
        self._outputs = {}
        self.display_pub = self

    def publish(self, data, metadata, *, transient, update):
        name = transient.get("display_id", object())
        assert update is (name in self._outputs)
        self._outputs[name] = data["text/plain"]

    @property
    def outputs(self):
        return list(self._outputs.values())


class _Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


class _Talk:
    def __init__(self, size):
        self.outcomes = {}
        self.missing = tuple(range(size))

    def returns(self, rank):
        self.outcomes[rank] = None
        self.missing = tuple(r for r in self.missing if r != rank)


@pytest.fixture
def stage(monkeypatch):
    clock, notebook = _Clock(), _Notebook()
    monkeypatch.setattr(screen_module, "time", clock)
    screen = NotebookDisplay(notebook)
    clock.now += 100  # between the start and the first call

    def wait(seconds=0.0):
        clock.now += seconds
        return screen.refresh(talk)

    talk = _Talk(2)
    return SimpleNamespace(notebook=notebook, screen=screen, talk=talk, wait=wait)


def _print(stage, rank, text):
    stage.screen.show(Printed(rank, "out", text.encode()))


def _over(stage, error=None, healthy=True):
    stage.screen.over(stage.talk, error, healthy=healthy)


def test_a_short_call_shows_what_was_printed_and_nothing_else(stage):
    stage.wait()
    _print(stage, 0, "hello\n")
    _print(stage, 1, "hello\n")
    stage.wait(1)
    _over(stage)
    assert stage.notebook.outputs == ["[0-1] hello"]


def test_a_call_that_shows_nothing_leaves_nothing(stage):
    stage.wait(1.9)
    _over(stage)
    assert stage.notebook.outputs == []


def test_output_is_shown_while_the_call_runs_but_not_at_every_line(stage):
    stage.wait()
    _print(stage, 0, "one\n")
    pause = stage.wait()
    assert stage.notebook.outputs == []
    stage.wait(pause)
    assert stage.notebook.outputs == ["[0] one"]


def test_a_long_call_says_who_is_running(stage):
    stage.wait()
    assert stage.wait(1.99) == pytest.approx(0.01)
    assert stage.notebook.outputs == []
    stage.wait(0.51)
    assert stage.notebook.outputs == ["2 ranks running, 2 s"]
    stage.talk.returns(0)
    _print(stage, 1, "late\n")
    stage.wait(2)
    assert stage.notebook.outputs == ["rank 1 printed 1 line:\n[1] late\nrank 0 done, rank 1 running, 4 s"]
    stage.talk.returns(1)
    _over(stage)
    assert stage.notebook.outputs == ["rank 1 printed 1 line:\n[1] late"]


def test_a_long_call_without_output_says_how_long_it_took(stage):
    stage.wait()
    stage.wait(3)
    stage.talk.returns(0)
    stage.talk.returns(1)
    _over(stage)
    assert stage.notebook.outputs == ["2 ranks done in 3.0 s"]


def test_who_is_running_stands_below_the_last_page_only(stage):
    stage.wait()
    _print(stage, 0, "x\n" * (PAGE_LINES - 1))
    stage.wait(3)
    _print(stage, 0, "x\n")
    stage.wait(1)
    _print(stage, 0, "x\n")
    stage.wait(1)
    first, second = stage.notebook.outputs
    assert "running" not in first
    assert second == "[0] x\n2 ranks running, 5 s"


def test_each_call_has_outputs_and_a_time_of_its_own(stage):
    stage.wait()
    _print(stage, 0, "one\n")
    _over(stage)
    stage.wait(100)
    _print(stage, 0, "two\n")
    stage.wait(1)
    _over(stage)
    assert stage.notebook.outputs == ["[0] one", "[0] two"]


@pytest.mark.parametrize(
    ("healthy", "stuck", "said"),
    [
        (True, False, "the gang goes on"),
        (False, False, "started anew when it is used next"),
        (False, True, "ranks 0-1 could not be interrupted"),
    ],
)
def test_an_interrupt_says_what_became_of_the_gang(stage, healthy, stuck, said):
    stage.wait()
    if not stuck:
        stage.talk.returns(0)
        stage.talk.returns(1)
    _over(stage, KeyboardInterrupt(), healthy)
    (shown,) = stage.notebook.outputs
    assert said in shown


def test_outside_of_a_notebook_there_is_no_shell(monkeypatch):
    monkeypatch.delitem(screen_module.sys.modules, "IPython", raising=False)
    assert screen_module.find_kernel_shell() is None
    terminal = SimpleNamespace(get_ipython=lambda: SimpleNamespace())
    monkeypatch.setitem(screen_module.sys.modules, "IPython", terminal)
    assert screen_module.find_kernel_shell() is None
