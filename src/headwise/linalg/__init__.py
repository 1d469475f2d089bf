"""Tensors in, tensors out: joint factorisation of attention products. torch only."""
