"""Jobs that wait for their turn on one cluster: the spool that keeps them, and the service that starts them."""
