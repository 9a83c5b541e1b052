"""Collaborative training: progress, optimizer, state sharing, checkpoints, LAMB. See README.md in this folder."""
