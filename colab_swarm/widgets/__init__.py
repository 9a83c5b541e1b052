"""What a person sees in a notebook or a terminal."""
