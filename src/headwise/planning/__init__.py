"""From a profile and a budget to a plan. Standard library only."""
