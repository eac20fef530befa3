"""Training in simulated time: the very server, rules and partitioners, on clusters that need not be there.

A run (`simulation`) is driven as `cluster.shell` drives one. Workers (`replica`) note when they will be done in
place of computing, or compute as well (`learners`); links, merges and judging take the seconds that a cluster file
(`cluster`) or an earlier run's log (`measured`) gives. What comes out is the log of a run. Beside it stand the papers'
own formulas: a step of sharded layers (`layers`), and what parallel SGD, ADMM and Downpour cost (`costs`).
"""
