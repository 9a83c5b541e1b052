"""The command line: ``colab-swarm demo | peer | backbone | experts | coordinate | volunteer | doctor | relay``."""
