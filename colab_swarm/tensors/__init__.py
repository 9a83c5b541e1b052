"""Tensors on the wire and on disk: codecs, error feedback, flat vectors, state files. See README.md in this folder."""
