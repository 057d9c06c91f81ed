"""The flight recorder of a rank: a file that the worker writes, and that its agent reads while the worker hangs or
after it has died.

    HEADER_WORDS words      the words below
    RING_RECORDS records    a ring of RECORD_WORDS words each; record n, counted from 0, is at n % RING_RECORDS
    from TEXT_OFFSET on     lines of JSON; TEXT_SIZE_WORD counts their bytes

All words are unsigned 64-bit integers in the machine's byte order. Header and ring are mapped into the worker's
memory; the text is appended by ordinary writes, so that a full disk is an error and not a signal.

A record is made when a cross-process call has been dispatched (on CPU, small programs have then run to their end):
its five words are the time (nanoseconds since the epoch), the chain, program | site << 32, number | group << 48, and
when the call was entered, 0 if unknown. The chain summarizes the calls of the group up to this one: equal
chains at equal numbers mean an equal history. RECORD_COUNT_WORD is increased after the record is complete.

Lines of text, in any order, but each before the first record that needs it:

    {"group": 1, "ranks": "0-3"}                  with "before": 217 in a rank that came back (--keep-survivors)
    {"site": 7, "stack": ["/home/me/train.py:88 train_step", "/home/me/train.py:120 main"]}   (innermost first)
    {"program": 3, "group": 1, "key": …, "code": …, "name": "jit(step)", "source": "step at /home/me/model.py:40",
     "arguments": [["batch.x", "float32[32,128]", "P('data',)"], …], "results": [["", "float32[]", "P()"], …],
     "mesh": "data=4: 0,1,2,3", "text": …}
    {"compiling": "jit(step)", "ranks": "0-3"}                (the program of COMPILING_SINCE_WORD)
    {"stage": "compile", "name": "jit(step)", "since": …, "until": …}   (nanoseconds since the epoch)
    {"trouble": "…"}                                          (why less is recorded than possible)

`key` and `code` are hashes of 16 hex digits: `key` of everything that must be the same for the processes to meet in the
call (name, shapes, dtypes, shardings, mesh), `code` of the lowered program; empty if unknown. `text` is the lowered
program, compressed with zlib, in base64; empty if unknown or too long. A program that is compiled for a call has one
such line before the compilation, without `key`, and another one after it, without `text`; if both have a value, the
later one counts. `ranks` of a compilation are the ranks whose devices its program uses; absent if there is only one,
or if unknown. `stage` is one of STAGES or of STATE_STAGES, and took at least MIN_STAGE_S.

Joint functions are functions of jaxrun that all ranks of the job must call, because ranks wait for each other there.
From JOINT_WORD on, the header has JOINT_FUNCTION_WORDS words for each of JOINT_FUNCTIONS: how often this rank has
called it; the call that this rank waits for all ranks to make, 0 while it does not wait; since when (nanoseconds since
the epoch); and the site. They have no records: such a call has no place among the cross-process calls of JAX.
"""

from __future__ import annotations

MAGIC = 0x4A52464C49474854
FORMAT = 2
WORD_BYTES = 8
HEADER_WORDS = 512
RECORD_WORDS = 5
RING_RECORDS = 4096
TEXT_OFFSET = (HEADER_WORDS + RING_RECORDS * RECORD_WORDS) * WORD_BYTES
MAX_TEXT_BYTES = 16 * 2**20  # further text is left out

# Indexes of the header's words.
MAGIC_WORD = 0
FORMAT_WORD = 1
PID_WORD = 2
RANK_WORD = 3
LEVEL_WORD = 4  # one of LEVELS
STRICT_WORD = 5  # 1 if every call is first agreed on
ORDERS_WORD = 6  # set to 1 by the agent while its worker must carry out an order that was sent to it
RECORD_COUNT_WORD = 8  # records made so far
TEXT_SIZE_WORD = 9
COMPILING_SINCE_WORD = 10  # since when (nanoseconds since the epoch) a program is being compiled; 0 if none is
COMPILED_COUNT_WORD = 11  # programs compiled so far
# The call that was entered and whose record is still to come: known for the first call of a program and, in strict
# mode, for every call. The tag is number | group << 48, and 0 if there is none. PENDING_COMPILES_WORD is 1 while its
# program is still being compiled for it.
PENDING_TAG_WORD = 16
PENDING_SITE_WORD = 17  # program | site << 32
PENDING_SINCE_WORD = 18  # nanoseconds since the epoch
# When a call was last entered (nanoseconds since the epoch): if no later record was made, some thread is in it.
ENTERED_WORD = 19
PENDING_COMPILES_WORD = 20
# The call site at which the main thread was inside JAX's C++ dispatch when its stacks were last written, and when that
# was (nanoseconds since the epoch); the site is 0 if it was not.
STANDING_SITE_WORD = 21
STANDING_AT_WORD = 22
# When JAX began to run a program again, operation by operation, to find a NaN (jax_debug_nans), and when the last call
# of this search ended (nanoseconds since the epoch; NAN_SEARCH_GOES_ON within a call): calls in between belong to it.
NAN_SEARCH_SINCE_WORD = 23
NAN_SEARCH_UNTIL_WORD = 24
NAN_SEARCH_GOES_ON = 2**64 - 1  # later than any call

# What the program says of its steps: the step that it has finished last, plus 1 (0 if it has said none), how many there
# will be (0 if unknown), when it said so, and the same for the first step (nanoseconds since the epoch).
STEP_WORD = 25
STEP_TOTAL_WORD = 26
STEP_AT_WORD = 27
FIRST_STEP_WORD = 28
FIRST_STEP_AT_WORD = 29

# The functions of jaxrun that all ranks must call. A rank that has finished is not needed for should_stop.
JOINT_FUNCTIONS = SNAPSHOT, RESTORE, SHOULD_STOP, GANG_BARRIER, GANG_ALLGATHER, GANG_BROADCAST = (
    "jaxrun_runtime.snapshot",
    "jaxrun_runtime.restore",
    "jaxrun_runtime.should_stop",
    "gang.barrier",
    "gang.allgather",
    "gang.broadcast",
)
JOINT_WORD = 32
JOINT_FUNCTION_WORDS = 4
JOINT_CALLED, JOINT_AWAITED, JOINT_SINCE, JOINT_SITE = range(JOINT_FUNCTION_WORDS)  # the words of each

# The level of recording: nothing, compilations, the first call of each program, every call.
LEVELS = NOTHING, COMPILATIONS, FIRST_CALLS, EVERY_CALL = range(4)

# The stages of a compilation, recorded when they have ended; one may be inside another.
STAGES = TRACE, LOWER, COMPILE = "trace", "lower", "compile"
# Stages in which the program waits until its state is saved or restored.
STATE_STAGES = SAVE, RESTORE_STATE = "save", "restore"
MIN_STAGE_S = 0.001

DIVERGENCE_ERROR = "DivergenceError"  # raised by a worker that may not make a call
LOCKSTEP_MODES = LOCKSTEP_OFF, LOCKSTEP_RECORD, LOCKSTEP_CHECK, LOCKSTEP_FAIL, LOCKSTEP_STRICT = (
    *("off", "record", "check", "fail", "strict"),
)


def flight_file_name(rank: int) -> str:
    return f"rank-{rank:04d}.flight"
