"""Optimizer and schedule, checkpoints, metrics, run directories."""
