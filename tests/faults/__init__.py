"""Training that is killed at random moments, again and again, and goes on from what it saved."""
