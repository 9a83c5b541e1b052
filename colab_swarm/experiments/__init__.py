"""The papers' experiments, measured again: the notebooks in ``notebooks/reproduce`` run and draw them.

| module | experiments |
|---|---|
| `dedloc` | DeDLOC: Figure 3 (`swav`), Table 1 (`strategy`), Figures 4 and 5 (`albert`), Appendix C (`groups`) |
| `learning_at_home` | Learning@home: Figure 4, throughput under delays and learning from stale gradients |
| `vc_asgd` | VC-ASGD: Figures 4 to 6, the effect of alpha; jobs on preemptible instances (section IV-E) |
| `elastic_consistency` | Elastic Consistency: Figure 1 and the bounds of Table 1 |
| `loss_per_byte` | DiLoCo, SparseLoCo and MuLoCo: loss by the bytes that a peer sends |
| `chaos` | not from a paper: training under faults, for tutorial 11 |

Each except `chaos` has functions ``run…(quick=…)`` that return a `Report` of figures, and ``plot…`` that draw it:

    from colab_swarm.experiments import claims, dedloc

    report = dedloc.run_strategy(quick=True)
    print(report.figures["speedup_c"])
    dedloc.plot_strategy(report, "table1.png")
    print(claims.compare(report))

`claims.compare` compares each claim of the paper with the run. It shows a verdict for this run, and the verdict for the
last run of the full preset. The network and the time are simulated, except the delays of `learning_at_home`. In a copy
of the repository, `python -m tests.benchmarks` runs the same experiments, and measures the package's speed and memory.

.. include:: DIFFERENCES.md
"""
