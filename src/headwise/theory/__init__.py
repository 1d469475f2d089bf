"""The papers' formulas as functions, with their assumptions and known corrections. NumPy only."""
