"""Benchmarks: measurements, each with the command that makes it. RESULTS.md holds what they gave."""
