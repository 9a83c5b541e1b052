"""Links between peers: identities, encrypted links with calls and streams, ways to peers behind NATs.

Does not import torch. README.md here has the protocol.
"""
