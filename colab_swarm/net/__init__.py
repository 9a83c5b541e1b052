"""Bytes between peers: identity, encrypted links, calls and streams. Knows no torch."""
