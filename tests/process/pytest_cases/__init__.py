"""Tests for several processes that test_pytest_plugin.py runs with a pytest of its own; most of them fail."""
