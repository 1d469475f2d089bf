"""Steps one after the other or side by side: the whole line, comparisons, Ray."""
