"""A function mapped over a cluster's workers."""
