"""Training in simulated time: the server, rules and partitioners of a run, on clusters that need not exist.

`simulation` drives a run as `cluster.shell` does. Workers (`replica`) only note when they will be done, or compute as
well (`learners`). Links, merges and evaluations take the seconds of a cluster file (`cluster`) or of an earlier run's
log (`measured`). The result is the log of a run. `sharded_step` times a step of sharded layers. `papers_costs` has the
papers' own formulas: for that step, and for parallel SGD, ADMM and Downpour.
"""
