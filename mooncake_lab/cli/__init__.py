"""The command line: `mooncake-lab`."""
