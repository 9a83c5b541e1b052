"""What this machine can do for a swarm, what stands in the way, and how to mend it."""
