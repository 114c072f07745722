"""Training: the resident trainer group that turns a committed batch into the next weights.

Importing this package, `advantages`, `protocol`, `client` or `launcher` does not import torch: the workers that only
talk to the trainer stay small.
"""
