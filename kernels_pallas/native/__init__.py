"""Kernels in C++ for CPUs, which the machine's own compiler builds.

`library` compiles and loads them; what they share are the headers. The kernels
are the files `native.cc` in the packages of `registry`.
"""
