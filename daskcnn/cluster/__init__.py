"""The cluster layer: the only Dask code. Connect, look at the workers, and drive the two strategies."""
