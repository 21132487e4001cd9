"""One module a topic: a frozen description of what to run, and the function that runs it."""
