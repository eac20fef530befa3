"""The parameter server as Dask actors."""
