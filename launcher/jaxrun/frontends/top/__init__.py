"""`jaxrun top`: a running job on one screen.

`feed` asks the job; `samples` says what each rank does; `rows` groups ranks; `screen` lays them out; `run` shows them.
"""
