"""Patterns that are compiled at their first use behave like compiled ones."""

import re

import pytest

from jaxrun import lazy_pattern as tested
from jaxrun.lazy_pattern import lazy_pattern


def test_a_pattern_is_compiled_once_and_not_before_it_is_used(monkeypatch):
    compiled, compile_now = [], re.compile
    monkeypatch.setattr(tested.re, "compile", lambda *of: compiled.append(of) or compile_now(*of))
    pattern = lazy_pattern(r"^b(\d)", re.MULTILINE)
    assert compiled == []
    assert [pattern.search("a\nb7")[1], pattern.search("b8")[1]] == ["7", "8"]
    assert compiled == [(r"^b(\d)", re.MULTILINE)]


def test_bytes_have_patterns_of_bytes_and_an_invalid_pattern_is_an_error_where_it_is_used():
    assert lazy_pattern(rb"\d+").sub(b"n", b"a12") == b"an"
    with pytest.raises(re.error):
        lazy_pattern("(").search("")
