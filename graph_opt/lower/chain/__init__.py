"""Consecutive operators of carryall's CPU kernels as one operator."""
