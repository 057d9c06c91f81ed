"""Runs jaxrun as if this machine had another name, where `unshare --uts` is not allowed: `as_host.py NAME WORDS...`."""

import os
import sys

name, machine = sys.argv[1], os.uname()
named = os.uname_result((machine.sysname, name, *machine[2:]))
os.uname = lambda: named
sys.argv[:2] = ["jaxrun"]

from jaxrun.__main__ import entry  # noqa: E402 - reads the host's name

entry()
