"""`daskcnn predict --out`: a whole data set or folder, over a cluster, into a table."""
