"""A headless Chromium for the tests of pages, which scripts/browser installs, and pictures of pages."""

from __future__ import annotations

import http.server
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-color-profile=srgb")
TIME_LIMIT = 120

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here; scripts/browser installs one")


def with_probe(page: str, probe: str) -> str:
    """Add scripts to a page of jaxrun, whose own policy would not let them run."""
    return re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace("</body>", f"{probe}</body>")


def run_page(page: str, files: Mapping[str, Path | bytes]) -> Any:
    """What the page POSTs to /result, as JSON; `files` are what the browser finds at this host, by path."""
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, files, results)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with tempfile.TemporaryDirectory() as profile:
                return _result_of(f"http://127.0.0.1:{server.server_port}/{page}", profile, results)
        finally:
            server.shutdown()
            thread.join()


def screenshot(page: Path, image: Path, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
    """Write a picture of the page."""
    look = ["--blink-settings=preferredColorScheme=0"] if dark else []
    size = f"--window-size={width},{height}"
    with tempfile.TemporaryDirectory() as profile:
        files = [f"--user-data-dir={profile}", f"--screenshot={image.absolute()}", page.absolute().as_uri()]
        command = [BROWSER, *FLAGS, *look, size, *files]
        subprocess.run(command, check=True, capture_output=True, timeout=TIME_LIMIT)


def _result_of(url: str, profile: str, results: queue.SimpleQueue[Any]) -> Any:
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", url]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # Debian's command is a script that starts the browser, so the whole session is ended; by `timeout`, if not by us.
    limited = ["timeout", "--signal=KILL", str(2 * TIME_LIMIT), *command]
    browser = subprocess.Popen(limited, start_new_session=True, **quiet)
    try:
        return results.get(timeout=TIME_LIMIT)
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()


class _Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, files: Mapping[str, Path | bytes], results: queue.SimpleQueue[Any], *args: Any) -> None:
        self._files = files
        self._results = results
        super().__init__(*args)

    def do_GET(self) -> None:
        path = self.path.lstrip("/").partition("?")[0]
        content = self._files.get(path)
        self.send_response(200 if content is not None else 404)
        kinds = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".wasm": "application/wasm"}
        self.send_header("Content-Type", kinds.get(Path(path).suffix, "application/octet-stream"))
        self.end_headers()
        if content is not None:
            self.wfile.write(content.read_bytes() if isinstance(content, Path) else content)

    def do_POST(self) -> None:
        self._results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass
