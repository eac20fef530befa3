"""The driver's side of a run: context, workers, results, the shell of the coordinator."""
