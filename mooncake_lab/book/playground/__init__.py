"""The playground: the simulator in a reader's browser, and the files that its page loads."""
