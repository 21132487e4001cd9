"""Moving bytes between two processes of this machine in the ways FAST'25 Fig. 12 compares, and timing them."""
