"""Handles the ranks' output; nothing else prints while a job runs.

    worker's pipes ── agent ──▶ Output ──▶ RankLogs                        rank-0003.out, rank-0003.err, end of stderr
                                   └─────▶ RankStream ─▶ Screen ─▶ Spool   "[3] ..." on stdout or stderr

An agent on another host has a Relay instead of an Output, which sends the text for the screen to the launcher.
"""
