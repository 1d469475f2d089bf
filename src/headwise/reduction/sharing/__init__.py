"""Neighbouring key/value heads merged into one cached head, whose coordinates all their query heads read."""
