"""One latent for the keys and values of a group of heads: keys are made anew whenever they are read."""
