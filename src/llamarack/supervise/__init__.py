"""Owns engine processes: keeper, state machine, warm-up, watch, recovery, journal. Carries no user traffic."""
