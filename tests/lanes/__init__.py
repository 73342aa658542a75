"""A happens-before checker: proves executed programs free of races between lanes, without a GPU."""
