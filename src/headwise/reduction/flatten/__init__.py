"""Neighbouring blocks made one: all heads and all MLP channels side by side, on one residual stream."""
