"""map over a gang, and jaxrun.pool(), which has the gangs that it needs.

| module   | what it knows                                                                    |
|----------|----------------------------------------------------------------------------------|
| mapping  | map and imap: which way a call takes                                             |
| stream   | chunks for the devices of all ranks: one conversation with jaxrun_runtime.map |
| errands  | items for Python functions: the same without JAX                                 |
| tasks    | errands that are given one by one                                                |
| deal     | which rank gets the next chunk                                                   |
| memory   | the slots that both sides see, on one machine                                    |
| items    | inputs, cut into chunks                                                          |
| trees    | containers of arrays, without JAX                                                |
| account  | what was chosen, in words                                                        |
| pool     | Pool, as multiprocessing has it                                                  |
| ways     | how a pool's call is done: on devices, or by processes                           |
| choice   | which of the two a function asks for                                             |
| crew     | the thread that gives a pool's gang its work                                     |
| results  | AsyncResult and its kin                                                          |
"""
