"""Training without Dask: a replica, a worker's side of an exchange, and the driver's decisions."""
