"""BSP without a server: replicas exchange weights peer to peer."""
