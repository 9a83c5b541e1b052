"""Tensors on the wire: codecs, flat vectors, chunks."""
