"""Runs tests in a rank of a gang: the rank's pytest session, the fixture `gang`, and debuggers."""
