"""carryall's own kernels for CUDA devices, compiled from source by NVRTC for the device at hand."""
