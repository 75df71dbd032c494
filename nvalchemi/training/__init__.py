"""Training: losses, optimizers, the strategy and its hooks."""
