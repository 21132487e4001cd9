"""How worker processes are started: `local` on this machine."""
