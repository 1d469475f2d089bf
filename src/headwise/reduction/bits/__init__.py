"""Fewer bits for each coordinate of the KV cache, by what the loss feels of it."""
