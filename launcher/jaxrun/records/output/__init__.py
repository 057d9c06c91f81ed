"""Where a rank's output goes; nothing else prints while a job runs.

    worker's pipes ── agent ──▶ Output ──▶ RankLogs                        rank-0003.out, rank-0003.err, end of stderr
                                   └─────▶ RankStream ─▶ Screen ─▶ Spool   "[3] ..." on stdout or stderr

An agent on another host has a Relay in the place of Output, which sends to the launcher what the screen is to show.
"""
