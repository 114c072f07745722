"""The engines that generate: server launcher, client, weight watcher.

Owns: the processes and protocols between a published version and tokens stamped with it.
Never touches: training, workflows.
Invariant: no token without the version that sampled it.
A crash leaves: nothing that an attach or a reload does not cure.
"""
