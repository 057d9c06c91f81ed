"""Puts this directory on the path, for `agreeing`; here, and in the ranks that run these tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
