"""Measure every published figure again: ``python -m tests.benchmarks NAME``.

`all` (or `make bench`) runs every benchmark, and the experiments of `colab_swarm.experiments`. `--quick` takes under a
minute each and is rougher, `--json FILE` writes the figures, `--plot PNG` draws those that the papers draw, and
`averaging --vs hivemind --python PATH` compares with hivemind in an environment of its own. The packages' pages have
the figures.
"""
