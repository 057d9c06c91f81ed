"""Stacks and kernel states of ranks that wait, as they were seen; shortened."""

from jaxrun.analysis.diagnosis.rank_state import Activity

STOPPED = "T"  # ProcessState.STOPPED
FUTEX = "futex_do_wait"
_SHORT = {"PY": "/usr/lib/python3", "SITE": "/v/lib/python3.13/site-packages", "JOB": "/job"}


def dump(text, *threads):
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


ENTRY = "SITE/jaxrun_runtime/run_program.py 46 run"
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

# What a rank does: its name, the kernel's word, the activity and the call, and below it the frames of its main thread.
_SAMPLES = f"""
-- a compiled call | FUTEX | CALL |
JOB/train.py 23 step
-- the first call of a program | FUTEX | CALL |
{SLOW_PATH}
JOB/train.py 24 step
-- process_allgather | FUTEX | CALL | process_allgather
{ALLGATHER}
JOB/train.py 32 step
-- block_until_ready | FUTEX | CALL | block_until_ready
SITE/jax/_src/api.py 2791 try_to_block
SITE/jax/_src/api.py 2808 block_until_ready
JOB/train.py 28 step
-- block_until_ready that polls a GPU | 0 | CALL | block_until_ready
SITE/jax/_src/api.py 2791 try_to_block
SITE/jax/_src/api.py 2808 block_until_ready
JOB/train.py 28 step
-- the agreement of strict mode | unix_stream_read_generic | CALL |
SITE/jaxrun_runtime/agent_channel.py 120 _read
SITE/jaxrun_runtime/agent_channel.py 99 _wait_for
SITE/jaxrun_runtime/agent_channel.py 77 receive_answer
SITE/jaxrun_runtime/lockstep/call_recorder.py 148 _announce
SITE/jaxrun_runtime/lockstep/call_hooks.py 177 call
{SLOW_PATH}
JOB/train.py 24 step
-- np.asarray of JAX 0.8 | FUTEX | CALL |
SITE/jax/_src/array.py 635 _value
SITE/jax/_src/array.py 435 __array__
JOB/train.py 29 step
-- sync_global_devices | FUTEX | BARRIER | sync_global_devices
{SYNC}
JOB/train.py 30 step
-- an orbax save | FUTEX | BARRIER | sync_global_devices
{SYNC}
SITE/orbax/checkpoint/_src/multihost/multihost.py 407 sync_global_processes
SITE/orbax/checkpoint/_src/checkpointers/async_checkpointer.py 618 save
JOB/train.py 38 step
-- a barrier of a library | FUTEX | BARRIER | orbax.wait_at_barrier
SITE/orbax/checkpoint/_src/multihost/multihost.py 300 wait_at_barrier
JOB/train.py 38 step
-- pdb of 3.13 | anon_pipe_read | PROMPT | pdb
PY/cmd.py 134 cmdloop
PY/pdb.py 614 interaction
PY/bdb.py 110 trace_dispatch
JOB/train.py 46 step
-- ipdb | wait_woken | PROMPT | ipdb
PY/cmd.py 134 cmdloop
SITE/IPython/core/debugger.py 557 _cmdloop
PY/pdb.py 614 interaction
PY/bdb.py 110 trace_dispatch
JOB/train.py 47 step
-- IPython.embed | wait_woken | PROMPT | IPython
SITE/IPython/terminal/interactiveshell.py 815 prompt
SITE/IPython/terminal/embed.py 483 embed
JOB/train.py 48 step
-- jax.debug.breakpoint of JAX 0.8 | anon_pipe_read | PROMPT | jax.debug.breakpoint
PY/cmd.py 126 cmdloop
SITE/jax/_src/debugger/cli_debugger.py 160 run
SITE/jax/_src/debugging.py 98 debug_callback_impl

{SLOW_PATH}
JOB/train.py 53 step
-- input() from a terminal | wait_woken | INPUT |
JOB/train.py 43 step
-- input() from a terminal of an old kernel | n_tty_read | INPUT |
JOB/train.py 43 step
-- input() from a pipe | anon_pipe_read | INPUT |
JOB/train.py 43 step
-- input() from a pipe of an old kernel | pipe_read | INPUT |
JOB/train.py 43 step
-- input() from a socket | unix_stream_read_generic | INPUT |
JOB/train.py 43 step
-- compiling | 0 | COMPILING |
SITE/jax/_src/compiler.py 402 backend_compile_and_load
SITE/jax/_src/compiler.py 516 compile_or_get_cached
SITE/jax/_src/pjit.py 272 cache_miss
JOB/train.py 129 step
-- tracing | 0 | ELSEWHERE | op
SITE/jax/_src/core.py 732 bind
SITE/jax/_src/numpy/array_methods.py 1528 op
JOB/train.py 132 loss
SITE/jax/_src/pjit.py 272 cache_miss
JOB/train.py 134 step
-- grain | FUTEX | DATA | grain
PY/threading.py 359 wait
PY/concurrent/futures/_base.py 451 result
SITE/grain/_src/python/dataset/transformations/prefetch.py 264 __next__
SITE/grain/_src/core/traceback_util.py 363 reraise_with_filtered_traceback
SITE/grain/_src/python/data_loader.py 550 __next__
JOB/train.py 141 step
-- torch | poll_schedule_timeout.constprop.0 | DATA | torch
PY/selectors.py 398 select
PY/multiprocessing/connection.py 1148 wait
PY/multiprocessing/queues.py 113 get
SITE/torch/utils/data/dataloader.py 1243 _try_get_data
SITE/torch/utils/data/dataloader.py 708 __next__
JOB/train.py 141 step
-- a queue | FUTEX | DATA | queue.get
PY/threading.py 359 wait
PY/queue.py 202 get
JOB/train.py 54 step
-- a pool | FUTEX | DATA | multiprocessing.map
PY/threading.py 659 wait
PY/multiprocessing/pool.py 367 map
JOB/train.py 86 step
-- an event | FUTEX | THREAD | threading.wait
PY/threading.py 359 wait
PY/threading.py 659 wait
JOB/train.py 70 step
-- a thread | FUTEX | THREAD | threading.join
PY/threading.py 1092 join
JOB/train.py 73 step
-- a file lock | hrtimer_nanosleep | FILE_LOCK | filelock.acquire
SITE/filelock/_api.py 1177 _poll_until_acquired
SITE/filelock/_api.py 1037 acquire
JOB/train.py 119 step
-- fcntl.flock | locks_lock_inode_wait | FILE_LOCK |
JOB/train.py 116 step
-- subprocess.run | do_wait | PROCESS | subprocess.run
PY/subprocess.py 2018 _try_wait
PY/subprocess.py 1211 communicate
PY/subprocess.py 556 run
JOB/train.py 91 step
-- os.system | do_wait | PROCESS |
JOB/train.py 94 step
-- a multiprocessing child | do_wait | PROCESS | multiprocessing.join
PY/multiprocessing/popen_fork.py 27 poll
PY/multiprocessing/process.py 149 join
JOB/train.py 90 step
-- urllib | wait_woken | NETWORK | urllib.urlopen
PY/socket.py 719 readinto
PY/http/client.py 331 begin
PY/urllib/request.py 1323 do_open
PY/urllib/request.py 189 urlopen
JOB/train.py 105 step
-- requests | wait_woken | NETWORK | requests.get
PY/socket.py 719 readinto
SITE/urllib3/connectionpool.py 540 _make_request
SITE/requests/api.py 87 get
JOB/train.py 108 step
-- time.sleep | hrtimer_nanosleep | SLEEP |
JOB/train.py 78 step
-- a host callback | hrtimer_nanosleep | SLEEP |
JOB/train.py 149 cb
{SLOW_PATH}
JOB/train.py 150 step
-- a loop | 0 | ELSEWHERE |
JOB/train.py 124 step
"""


def _parse(text):
    """By name the frames, the kernel's word, the activity and the call."""
    samples = {}
    for part in text.split("\n-- ")[1:]:
        title, _, frames = part.partition("\n")
        name, wait, activity, call = (word.strip() for word in title.split("|"))
        samples[name] = (frames, FUTEX if wait == "FUTEX" else wait, Activity[activity], call)
    return samples


SAMPLES = _parse(_SAMPLES)


def sample(name):
    """(dump, wait)"""
    if name == "stopped":
        return "", STOPPED
    if name == "its end":
        ending = "PY/threading.py 1540 _shutdown\nSITE/jaxrun_runtime/shutdown.py 66 _join_threads"
        return dump(ending, "JOB/data.py 75 loader\nPY/threading.py 992 run\nPY/threading.py 1012 _bootstrap"), FUTEX
    if name == "silence":
        return "", FUTEX
    frames, wait, _, _ = SAMPLES[name]
    return dump(f"{frames}{RUN_ALL}", *([POOL_THREAD] if name == "grain" else [])), wait
