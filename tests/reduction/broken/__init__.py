"""A package without a change."""
