"""Coverage of what a rank runs, as the parent measures it; written before the rank says that its session is over."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def measure_coverage(config: str, environ: Mapping[str, str]) -> Iterator[None]:
    """Measure by `config`, which CoverageConfig.serialize has made; empty: not at all.

    `environ`: variables by which processes that tests start are measured, too.
    """
    os.environ.update(environ)
    if not config:
        yield
        return
    import coverage

    measure = coverage.Coverage(config_file=f":data:{config}", data_suffix=True)
    measure.start()
    try:
        yield
    finally:
        measure.stop()
        measure.save()
