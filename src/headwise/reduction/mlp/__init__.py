"""Fewer channels in the MLP of a block, or no MLP."""
