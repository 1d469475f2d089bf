"""Fewer heads and narrower ones."""
