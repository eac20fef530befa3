"""Groups of workers that share a replica."""
