"""`jaxrun top`: a running job on one screen.

`feed` queries the job; `samples` says what each rank does; `rows` groups ranks; `view` lays them out on the screen,
`view_document` writes them as JSON; `watch` shows them.
"""
