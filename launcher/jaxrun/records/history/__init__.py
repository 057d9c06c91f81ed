"""One timeline of a job: collected from its run directory, and written for Perfetto or as a page."""
