"""Jobs that are killed at random moments must resume from their last checkpoint."""
