"""Linear attention with a row sum, by the two classic feature maps.

    out = phi(q) · (phi(k)ᵀ · v) / (phi(q) · Σ phi(k) + eps)

`relu_linear` is EfficientViT's LiteMLA core and what the papers call cosFormer without re-weighting; `elu_linear` is
Katharopoulos et al. EfficientViT's code has eps = 1e-15 and timm's 1e-5; the default here is 1e-6, in float32.
"""

from linvit.attention import EluPlusOne, Feature, LinearAttention, ReLU, RowSum, Shape, register
from linvit.attention.options import Eps


@register("relu_linear", paper="EfficientViT")
class ReluLinear(LinearAttention):
    feature: Feature = ReLU()

    def __init__(self, shape: Shape, *, eps: Eps = 1e-6) -> None:
        super().__init__(shape)
        self.normaliser = RowSum(eps)


@register("elu_linear", paper="Transformers are RNNs")
class EluLinear(ReluLinear):
    feature = EluPlusOne()
