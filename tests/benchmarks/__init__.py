"""Measure every published figure again: ``python -m tests.benchmarks NAME``.

`all` (or `make bench`) runs every benchmark, and the experiments of `colab_swarm.experiments`. `--quick` takes under a
minute each and is rougher. `--store` keeps the verdicts of a paper's experiment, whole, in the package:
`timeout 30m python -m tests.benchmarks groups --store`. `--json FILE` writes the figures, `--plot PNG` draws those that
the papers draw, and `averaging --vs hivemind --python PATH` compares with hivemind in an environment of its own. The
packages' pages have the figures.
"""
