"""SteLLA, stable lightweight linear attention (MixA).

    out = relu(q) · (relu(k)ᵀ · v) / (N·√d)

A constant takes the place of the row sum, so there is nothing to divide by and nothing to blow up: by theorems 5.2 and
5.3 the products grow with √d and their sum over tokens with N. The formula is inferred from those theorems; the paper's
text does not print it.
"""

from linvit.attention import Constant, LinearAttention, ReLU, register


@register("stella", paper="MixA")
class Stella(LinearAttention):
    feature = ReLU()
    normaliser = Constant(lambda keys, head_dim: 1 / (keys * head_dim**0.5))
