"""The fork server: a process that imports jax once and then forks, so that N workers pay for one import.

A job has one. Its launcher starts it before anything else and closes its channel once all workers exist; the server
then ends, and the launcher (a subreaper) becomes the parent of the workers:

    launcher ─ fork server (jax) ─ workers

Where the job may be started again, the server first forks a successor, which waits with jax in it for the next attempt.

A Python process that uses gangs has one which forks launchers. Each launcher forks its own fork server, with jax in
it, and then sheds jax itself by exec; one launcher is kept ready for the next gang:

    Python process ─ fork server (jax) ─ launcher (fork + exec: no jax) ─ fork server (fork: jax) ─ workers

`python …/jaxrun_runtime/forkserver FD ROLE [MODULE...]`: FD is the channel, a Unix socket of packets; ROLE is
`workers`, `launchers`, or `launchers-without-jax` where the workers cannot be forked; MODULEs are imported besides jax.
A server answers requests until its channel is closed, so it can be asked to fork again at any time.
"""
