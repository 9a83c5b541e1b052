"""Work units: VC-ASGD, training by volunteers who can only make plain HTTPS requests."""
