"""Data sets that jobs are given: from folders, from arrays, in place, and what is in them."""
