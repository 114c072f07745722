"""The demo's task: a tiny model learns to add, in minutes, on one CPU."""
