"""Command line: ``colab-swarm demo | chaos | backbone | relay | peer | experts | coordinate | volunteer …``."""
