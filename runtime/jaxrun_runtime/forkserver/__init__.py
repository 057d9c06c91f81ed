"""The fork server: a process that imports jax once and then forks, so that N workers pay for one import.

A job has one on each host. Its launcher (or agent) starts it before anything else, and closes its channel once all
workers exist; the server then ends, and the launcher, a subreaper, becomes the parent of the workers. Where the job may
be started again, a copy of the server forks the workers of each attempt and ends, and the server stays:

    launcher ─ fork server (jax) ─ workers
    launcher ─ fork server (jax) ─ copy for one attempt ─ workers

Before it forks, it imports what the program imports first, as far as that is safe (preload). A module that is not safe,
or fails, makes it start again by exec, as the same process, without that module (again).

A Python process that uses gangs has one which forks launchers. Each launcher forks its own fork server, with jax in
it, and then sheds jax itself by exec; one launcher is kept ready for the next gang:

    Python process ─ fork server (jax) ─ launcher (fork + exec: no jax) ─ fork server (fork: jax) ─ workers

| module                      | what it does                                                              |
|-----------------------------|---------------------------------------------------------------------------|
| workers, launchers          | the two roles: forks workers, forks launchers                             |
| preload                     | imports modules in the program's stead, and decides which are left to it  |
| preload_scene, fork_state   | what a module sees meanwhile; what it has left behind                     |
| known_unsafe                | what earlier jobs have found out                                          |
| again                       | begins anew by exec                                                       |

`python …/jaxrun_runtime/forkserver FD ROLE [MODULE...]`: FD is the channel, a Unix socket of packets; ROLE is
`workers`, `launchers`, or `launchers-without-jax` where the workers cannot be forked; MODULEs are imported besides jax.
A server answers requests until its channel is closed, so it can be asked to fork again at any time.
"""
