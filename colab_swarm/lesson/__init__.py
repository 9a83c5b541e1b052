"""A simulated swarm that is played before your eyes; see `colab_swarm.simulation.Simulation.play`."""
