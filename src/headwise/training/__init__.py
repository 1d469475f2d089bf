"""Training on Accelerate: one process or many, checkpoints that survive a kill. Knows nothing of attention."""
