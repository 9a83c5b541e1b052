"""Virtual time, a simulated network and scripted faults: learn and test without a swarm."""
