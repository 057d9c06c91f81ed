"""Where a job writes how it ended, for Kubernetes."""

from __future__ import annotations

import os

from jaxrun.records import termination_log
from jaxrun.records.termination_log import write_termination_log

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def test_a_sentence_is_written_and_cut_at_a_whole_character(tmp_path):
    path = tmp_path / "log"
    write_termination_log(path, "rank 1 failed", {})
    assert path.read_text() == "rank 1 failed"
    write_termination_log(path, "x" + "é" * 4000, {})
    assert path.read_text() == "x" + "é" * 2047
    write_termination_log(path, "", {})
    assert path.stat().st_size == 4095, "a job that has not failed leaves the file alone"


def test_in_a_pod_the_usual_file_is_written_if_it_is_there(tmp_path, monkeypatch, capsys):
    path = tmp_path / "termination-log"
    monkeypatch.setattr(termination_log, "DEFAULT_PATH", path)
    write_termination_log(None, "failed", POD)
    assert not path.exists()
    path.touch()
    write_termination_log(None, "failed", {})
    assert path.read_text() == ""
    write_termination_log(None, "failed", POD)
    assert path.read_text() == "failed"
    assert capsys.readouterr().err == ""


def test_a_file_that_was_given_and_cannot_be_written_is_named(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for name in ("none/log", "pipe", "."):
        write_termination_log(tmp_path / name, "failed", POD)
        assert f"--termination-log {tmp_path / name} could not be written: " in capsys.readouterr().err
