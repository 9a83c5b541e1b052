"""Every performance claim can be run again: ``python -m colab_swarm.bench NAME``."""
