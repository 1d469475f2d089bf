"""A kind of reduction that headwise does not know: fewer query heads for each key/value head."""
