"""Compile the native kernels. Placeholder until the kernels room is built."""
