"""Kernels in C++ for CPUs, which the machine's own compiler builds.

`library` compiles and loads them, `vectors.h` and `parallel.h` are what they
share. The kernels are the files `native.cc` in the packages of `registry`.
"""
