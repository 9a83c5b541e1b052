"""Where to find things: Kademlia with expiring, signed subkey records. Knows no torch."""
