"""The network lab: hosts behind links of a given speed, real ones in network namespaces and simulated ones."""
