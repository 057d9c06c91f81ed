"""Stacks and kernel states of ranks that wait, as they were seen; shortened."""

from __future__ import annotations

from jaxrun.diagnosis.rank_state import Activity

STOPPED = "stopped by a signal (SIGCONT lets it go on)"
FUTEX = "futex_do_wait"
_SHORT = {"PY": "/usr/lib/python3", "SITE": "/v/lib/python3.13/site-packages", "JOB": "/job"}


def dump(text: str, *threads: str) -> str:
    """A dump of Python's fault handler from lines `PLACE/file line function`; the other threads come first."""
    blocks = []
    for block in (*threads, text):
        lines = []
        for line in filter(str.strip, block.splitlines()):
            file, number, function = line.strip().rsplit(" ", 2)
            start, _, rest = file.partition("/")
            lines.append(f'  File "{_SHORT[start]}/{rest}", line {number} in {function}')
        blocks.append("\n".join(["Thread 0x00007f08b529db80 (most recent call first):", *lines, ""]))
    return "\n".join(blocks).replace("python3/", "python3.13/")


ENTRY = "SITE/jaxrun_runtime/program.py 46 run"
RUN_ALL = f"""
    JOB/train.py 154 main
    JOB/train.py 157 <module>
    {ENTRY}"""
SLOW_PATH = """
    SITE/jax/_src/interpreters/pxla.py 420 __call__
    SITE/jax/_src/profiler.py 588 wrapper
    SITE/jax/_src/pjit.py 1172 _pjit_call_impl_python
    SITE/jax/_src/pjit.py 272 cache_miss
    SITE/jax/_src/traceback_util.py 194 reraise_with_filtered_traceback"""
ALLGATHER = f"""{SLOW_PATH}
    SITE/jax/experimental/multihost_utils.py 134 _handle_array_process_allgather
    SITE/jax/_src/tree_util.py 422 tree_map
    SITE/jax/experimental/multihost_utils.py 159 process_allgather"""
SYNC = f"""{ALLGATHER}
    SITE/jax/experimental/multihost_utils.py 179 assert_equal
    SITE/jax/experimental/multihost_utils.py 165 sync_global_devices"""
POOL_THREAD = """
    JOB/data.py 139 __getitem__
    SITE/grain/_src/python/data_loader.py 160 __getitem__
    PY/concurrent/futures/thread.py 58 run
    PY/threading.py 1012 _bootstrap"""

# What a rank does: its main thread's frames, the kernel's word, the meaning.
SAMPLES = {
    "a compiled call": ("JOB/train.py 23 step", FUTEX, Activity.CALL, ""),
    "the first call of a program": (f"{SLOW_PATH}\nJOB/train.py 24 step", FUTEX, Activity.CALL, ""),
    "process_allgather": (f"{ALLGATHER}\nJOB/train.py 32 step", FUTEX, Activity.CALL, "process_allgather"),
    "block_until_ready": (
        "SITE/jax/_src/api.py 2791 try_to_block\nSITE/jax/_src/api.py 2808 block_until_ready\nJOB/train.py 28 step",
        FUTEX,
        Activity.CALL,
        "block_until_ready",
    ),
    "block_until_ready that polls a GPU": (
        "SITE/jax/_src/api.py 2791 try_to_block\nSITE/jax/_src/api.py 2808 block_until_ready\nJOB/train.py 28 step",
        "0",
        Activity.CALL,
        "block_until_ready",
    ),
    "the agreement of strict mode": (
        f"""SITE/jaxrun_runtime/agent_channel.py 120 _read
        SITE/jaxrun_runtime/agent_channel.py 99 _wait_for
        SITE/jaxrun_runtime/agent_channel.py 77 receive_answer
        SITE/jaxrun_runtime/lockstep/call_recorder.py 148 _announce
        SITE/jaxrun_runtime/lockstep/jax_hooks.py 177 call{SLOW_PATH}
        JOB/train.py 24 step""",
        "unix_stream_read_generic",
        Activity.CALL,
        "",
    ),
    "np.asarray of JAX 0.8": (
        "SITE/jax/_src/array.py 635 _value\nSITE/jax/_src/array.py 435 __array__\nJOB/train.py 29 step",
        FUTEX,
        Activity.CALL,
        "",
    ),
    "sync_global_devices": (f"{SYNC}\nJOB/train.py 30 step", FUTEX, Activity.BARRIER, "sync_global_devices"),
    "an orbax save": (
        f"""{SYNC}
        SITE/orbax/checkpoint/_src/multihost/multihost.py 407 sync_global_processes
        SITE/orbax/checkpoint/_src/checkpointers/async_checkpointer.py 618 save
        JOB/train.py 38 step""",
        FUTEX,
        Activity.BARRIER,
        "sync_global_devices",
    ),
    "a barrier of a library": (
        "SITE/orbax/checkpoint/_src/multihost/multihost.py 300 wait_at_barrier\nJOB/train.py 38 step",
        FUTEX,
        Activity.BARRIER,
        "orbax.wait_at_barrier",
    ),
    "pdb of 3.13": (
        """PY/cmd.py 134 cmdloop
        PY/pdb.py 614 interaction
        PY/bdb.py 110 trace_dispatch
        JOB/train.py 46 step""",
        "anon_pipe_read",
        Activity.PROMPT,
        "pdb",
    ),
    "ipdb": (
        """PY/cmd.py 134 cmdloop
        SITE/IPython/core/debugger.py 557 _cmdloop
        PY/pdb.py 614 interaction
        PY/bdb.py 110 trace_dispatch
        JOB/train.py 47 step""",
        "wait_woken",
        Activity.PROMPT,
        "ipdb",
    ),
    "IPython.embed": (
        """SITE/IPython/terminal/interactiveshell.py 815 prompt
        SITE/IPython/terminal/embed.py 483 embed
        JOB/train.py 48 step""",
        "wait_woken",
        Activity.PROMPT,
        "IPython",
    ),
    "jax.debug.breakpoint of JAX 0.8": (
        f"""PY/cmd.py 126 cmdloop
        SITE/jax/_src/debugger/cli_debugger.py 160 run
        SITE/jax/_src/debugging.py 98 debug_callback_impl
        {SLOW_PATH}
        JOB/train.py 53 step""",
        "anon_pipe_read",
        Activity.PROMPT,
        "jax.debug.breakpoint",
    ),
    "input() from a terminal": ("JOB/train.py 43 step", "wait_woken", Activity.INPUT, ""),
    "input() from a terminal of an old kernel": ("JOB/train.py 43 step", "n_tty_read", Activity.INPUT, ""),
    "input() from a pipe": ("JOB/train.py 43 step", "anon_pipe_read", Activity.INPUT, ""),
    "input() from a pipe of an old kernel": ("JOB/train.py 43 step", "pipe_read", Activity.INPUT, ""),
    "input() from a socket": ("JOB/train.py 43 step", "unix_stream_read_generic", Activity.INPUT, ""),
    "compiling": (
        """SITE/jax/_src/compiler.py 402 backend_compile_and_load
        SITE/jax/_src/compiler.py 516 compile_or_get_cached
        SITE/jax/_src/pjit.py 272 cache_miss
        JOB/train.py 129 step""",
        "0",
        Activity.COMPILING,
        "",
    ),
    "tracing": (
        """SITE/jax/_src/core.py 732 bind
        SITE/jax/_src/numpy/array_methods.py 1528 op
        JOB/train.py 132 loss
        SITE/jax/_src/pjit.py 272 cache_miss
        JOB/train.py 134 step""",
        "0",
        Activity.ELSEWHERE,
        "op",
    ),
    "grain": (
        """PY/threading.py 359 wait
        PY/concurrent/futures/_base.py 451 result
        SITE/grain/_src/python/dataset/transformations/prefetch.py 264 __next__
        SITE/grain/_src/core/traceback_util.py 363 reraise_with_filtered_traceback
        SITE/grain/_src/python/data_loader.py 550 __next__
        JOB/train.py 141 step""",
        FUTEX,
        Activity.DATA,
        "grain",
    ),
    "torch": (
        """PY/selectors.py 398 select
        PY/multiprocessing/connection.py 1148 wait
        PY/multiprocessing/queues.py 113 get
        SITE/torch/utils/data/dataloader.py 1243 _try_get_data
        SITE/torch/utils/data/dataloader.py 708 __next__
        JOB/train.py 141 step""",
        "poll_schedule_timeout.constprop.0",
        Activity.DATA,
        "torch",
    ),
    "a queue": (
        "PY/threading.py 359 wait\nPY/queue.py 202 get\nJOB/train.py 54 step",
        FUTEX,
        Activity.DATA,
        "queue.get",
    ),
    "a pool": (
        "PY/threading.py 659 wait\nPY/multiprocessing/pool.py 367 map\nJOB/train.py 86 step",
        FUTEX,
        Activity.DATA,
        "multiprocessing.map",
    ),
    "an event": (
        "PY/threading.py 359 wait\nPY/threading.py 659 wait\nJOB/train.py 70 step",
        FUTEX,
        Activity.THREAD,
        "threading.wait",
    ),
    "a thread": ("PY/threading.py 1092 join\nJOB/train.py 73 step", FUTEX, Activity.THREAD, "threading.join"),
    "a file lock": (
        "SITE/filelock/_api.py 1177 _poll_until_acquired\nSITE/filelock/_api.py 1037 acquire\nJOB/train.py 119 step",
        "hrtimer_nanosleep",
        Activity.FILE_LOCK,
        "filelock.acquire",
    ),
    "fcntl.flock": ("JOB/train.py 116 step", "locks_lock_inode_wait", Activity.FILE_LOCK, ""),
    "subprocess.run": (
        """PY/subprocess.py 2018 _try_wait
        PY/subprocess.py 1211 communicate
        PY/subprocess.py 556 run
        JOB/train.py 91 step""",
        "do_wait",
        Activity.PROCESS,
        "subprocess.run",
    ),
    "os.system": ("JOB/train.py 94 step", "do_wait", Activity.PROCESS, ""),
    "a multiprocessing child": (
        """PY/multiprocessing/popen_fork.py 27 poll
        PY/multiprocessing/process.py 149 join
        JOB/train.py 90 step""",
        "do_wait",
        Activity.PROCESS,
        "multiprocessing.join",
    ),
    "urllib": (
        """PY/socket.py 719 readinto
        PY/http/client.py 331 begin
        PY/urllib/request.py 1323 do_open
        PY/urllib/request.py 189 urlopen
        JOB/train.py 105 step""",
        "wait_woken",
        Activity.NETWORK,
        "urllib.urlopen",
    ),
    "requests": (
        """PY/socket.py 719 readinto
        SITE/urllib3/connectionpool.py 540 _make_request
        SITE/requests/api.py 87 get
        JOB/train.py 108 step""",
        "wait_woken",
        Activity.NETWORK,
        "requests.get",
    ),
    "time.sleep": ("JOB/train.py 78 step", "hrtimer_nanosleep", Activity.SLEEP, ""),
    "a host callback": (
        f"JOB/train.py 149 cb{SLOW_PATH}\nJOB/train.py 150 step",
        "hrtimer_nanosleep",
        Activity.SLEEP,
        "",
    ),
    "a loop": ("JOB/train.py 124 step", "0", Activity.ELSEWHERE, ""),
}


def sample(name: str) -> tuple[str, str]:
    """(dump, wait)"""
    if name == "stopped":
        return "", STOPPED
    if name == "its end":
        ending = "PY/threading.py 1540 _shutdown\nSITE/jaxrun_runtime/finish.py 66 _join_threads"
        return dump(ending, "JOB/data.py 75 loader\nPY/threading.py 992 run\nPY/threading.py 1012 _bootstrap"), FUTEX
    if name == "silence":
        return "", FUTEX
    frames, wait, _, _ = SAMPLES[name]
    return dump(f"{frames}{RUN_ALL}", *([POOL_THREAD] if name == "grain" else [])), wait
