"""Tests for several processes that pytest_runs.py runs with a pytest of its own; most of them fail."""
