"""Train one large model together: any notebook becomes a peer in one cell."""
