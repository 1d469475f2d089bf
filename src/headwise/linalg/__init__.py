"""Tensors in, tensors out: factorisations, spectra, ranks, Fisher information, refits. torch only.

Shape letters, one legend for all of headwise; tensors carry them as suffix (``q_BHTK``, ``w_q_HKD``):
B batch, T tokens (S where keys have a number of their own), D width, H query heads, G key/value heads, K qk_dim,
V v_dim, R rank or latent, M MLP channels; N any leading or token dimension, P RoPE pairs, U units, C classes.
"""
