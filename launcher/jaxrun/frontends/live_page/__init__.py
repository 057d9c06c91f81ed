"""`jaxrun top --web`: serves a page of a running job at 127.0.0.1, to whoever has its address with the token."""
