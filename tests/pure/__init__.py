"""No process group, done in seconds."""
