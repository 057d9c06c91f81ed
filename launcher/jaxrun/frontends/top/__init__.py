"""`jaxrun top`: a running job on one screen. `samples` and `rows` decide what is shown, `screen` how it looks."""
