"""Running models: block by block, watched, differentiated, scored, timed."""
