"""Files: strict JSON in, whole files out, locks, hashes. Standard library only."""
