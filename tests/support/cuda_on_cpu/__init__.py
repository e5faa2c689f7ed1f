"""The CUDA kernels of plugins/csrc, compiled for the CPU (`cuda_on_cpu.h`)."""
