"""Tensors on the wire and on disk: codecs, error feedback, flat vectors, states as files. See README.md here."""
