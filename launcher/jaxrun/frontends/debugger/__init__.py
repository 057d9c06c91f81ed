"""`jaxrun debug`: an editor's debugger in a rank that runs."""
