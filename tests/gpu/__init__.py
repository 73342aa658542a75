"""What only a CUDA device can show; skipped, and saying so, without one."""
