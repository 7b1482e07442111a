"""The training loop and its parts: the step, compilation, CUDA graphs, determinism, meters, diagnosis."""
