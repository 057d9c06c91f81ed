"""Everything that launcher and workers agree on: environment variables, messages and the handshake.

Both sides import this package, and apart from it only jaxrun.files, stack_frames, errors and text. No other code spells
a `JAXRUN_…` name. Import only the module you need: the command line reads variables only, and importing the messages
would add 7 ms to its start.

| processes               | messages                               | bytes                       |
|-------------------------|----------------------------------------|-----------------------------|
| worker and agent        | worker_messages                        | codec                       |
| agent and head          | agent_messages (after auth)            | codec                       |
| gang's rank and parent  | gang_messages (after auth)             | gang_connection, payload    |
| - in a map              | map_messages                           | pickled within gang_messages |
| - in a pytest session   | pytest_messages                        | pickled within gang_messages |
"""
