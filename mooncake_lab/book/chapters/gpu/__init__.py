"""What chapters 03, 04, 05 and 08 show of a GPU, where one was measured."""
