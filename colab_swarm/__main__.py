"""``python -m colab_swarm`` runs the command line where the program ``colab-swarm`` is not on the path."""

from colab_swarm.cli.__main__ import main

if __name__ == "__main__":
    main()
