"""Command line: ``colab-swarm demo | create | runs | status | train-albert | experts | volunteer …``."""
