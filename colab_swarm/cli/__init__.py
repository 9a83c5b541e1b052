"""Command line: ``colab-swarm demo | backbone | relay | peer | experts | coordinate | volunteer | doctor | bench``."""
