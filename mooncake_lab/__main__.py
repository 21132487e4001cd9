"""`python -m mooncake_lab` is `mooncake-lab`."""

from mooncake_lab.cli import main

main()
