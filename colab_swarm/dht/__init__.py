"""Where to find things: Kademlia with expiring, signed records. No torch here. README.md has the protocol."""
