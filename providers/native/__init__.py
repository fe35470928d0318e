"""Carryall's own CPU kernels: C++ sources, how they are built, and the library of a machine."""
