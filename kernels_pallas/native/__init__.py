"""Kernels in C++ for CPUs, which the machine's own compiler builds.

`library` compiles and loads them. What several of them share are the headers.
"""
