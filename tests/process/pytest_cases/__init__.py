"""Tests for several processes, which test_pytest_plugin.py has run by a pytest of their own; most of them fail."""
