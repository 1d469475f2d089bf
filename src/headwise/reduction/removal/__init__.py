"""Attention, or the whole block around it, taken away."""
