"""Load generation, timing, tuning, soak."""
