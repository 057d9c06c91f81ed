"""map over a gang, and jaxrun.pool(), which starts the processes that it needs.

| module         | what it is for                                                              |
|----------------|-----------------------------------------------------------------------------|
| pool           | Pool, as multiprocessing has it                                             |
| results        | AsyncResult                                                                 |
| dispatch       | how a pool runs a function: on devices, or as plain Python                  |
| jax_detection  | whether a function uses JAX                                                 |
| gang_map       | map and imap over a gang                                                    |
| session        | chunks for the devices of all ranks: one call of jaxrun_runtime.map         |
| scheduler      | which rank gets the next chunk                                              |
| shared_slots   | the memory that both sides see, on one machine                              |
| items, pytree  | inputs as arrays; containers of arrays, without JAX                         |
| python_map     | plain Python: batches of items, for any executor                            |
| local_executor | runs batches in processes of this machine                                   |
| gang_executor  | runs batches on the ranks of a gang                                         |
| gang_calls     | what session and gang_executor do with a call of a gang                     |
| stats          | what was chosen, and how fast it was                                        |
"""
