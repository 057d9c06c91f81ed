"""All that launcher and workers agree on: environment variables, messages, files, and the handshake.

This package is the only code that both sides import; nothing else spells a `JAXRUN_…` name. Each module is imported by
its name: the command line needs the variables only, and the messages would cost its start 7 ms.

| processes               | messages                               | bytes                       |
|-------------------------|----------------------------------------|-----------------------------|
| worker and agent        | worker_messages                        | codec                       |
| agent and head          | agent_messages (after auth)            | codec                       |
| gang's rank and parent  | gang_messages (after auth)             | gang_connection, payload    |
| - in a map              | map_messages                           | pickled within gang_messages |
| - in a pytest session   | pytest_messages                        | pickled within gang_messages |
"""
