"""Peers behind real NATs, in network namespaces of the kernel."""
