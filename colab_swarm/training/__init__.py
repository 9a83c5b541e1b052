"""Collaborative training: progress, optimizer, state sharing, checkpoints, LAMB."""
