"""A job as one page: `jaxrun top --web` serves it while the job runs and after, `jaxrun explain --html` writes a file.

`document` makes the value that the page shows, `timeline` its chart and `ended_ranks` its ranks once the job is over;
`page` puts it into one file with style and script; `server` serves that at 127.0.0.1.
"""
