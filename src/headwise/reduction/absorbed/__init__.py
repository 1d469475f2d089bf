"""Key/value heads of a block behind one latent without positions and a few RoPE pairs, read without rebuilding."""
