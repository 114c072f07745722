"""A multi-turn task: a tiny model learns to find a number by its opponent's hints, in minutes, on one CPU."""
