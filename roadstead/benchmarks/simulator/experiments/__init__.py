"""The experiments whose figures are in RESULTS.md and docs/simulator.md, one module with a command each."""
