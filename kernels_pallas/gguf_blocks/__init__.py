"""Products with weights in the blocks of GGUF files, on one CPU.

No other code multiplies such weights. So there is nothing to choose, and this
is no kernel of `registry`.
"""
