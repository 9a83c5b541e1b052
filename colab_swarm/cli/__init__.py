"""Command line: ``colab-swarm demo | create | join | doctor | relay | experts | coordinate | volunteer …``."""
