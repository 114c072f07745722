"""Trackers people already have: step metrics to Weights & Biases, MLflow and TensorBoard, by their own libraries.

Owns: what a tracker is, and how the run's records become its points. Never touches: the run. It reads S3, from beside.
Invariant: a point is sent once. What was sent is asked of the tracker itself, never of a memory of ours, so that
neither a crash between two points nor a resume of the run loses or doubles one.
A crash leaves: whole points; the next follower goes on behind them.
"""
