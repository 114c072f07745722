"""A discrete-event simulator of asynchronous RL post-training: what a staleness rule costs, before GPUs are rented.

Owns: costs, workload, engines, the event loop, the rules to compare, and the experiments with them.
Never touches: Temporal, S3, vLLM; it imports the ledger and nothing else of ours.
Invariant: simulated time only; the same seed gives the same run.
"""
