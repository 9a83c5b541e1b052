"""Links between peers: identities, encrypted links with calls and streams, ways to peers behind NATs.

This package does not import torch. README.md in this folder describes the protocol.
"""
