"""Mobile-Attention (ICML 2024): the poster's two tables."""

from functools import partial

from linvit.measurement.published.table import Printed, Table, section

BOTH = ("params", "macs")
CUT = "DeiT-S has 22.05 M: the cell is cut, not rounded."
FLOOR = "Less than DeiT-S without any attention, 4.24 G: the column contradicts itself. 22.05 M is cut."
BELOW_FLOOR = "Less than DeiT-S without any attention, 4.24 G: the column contradicts itself."
COPIED = "1.25 → 1.22 are also EfficientFormerV2-S2's cells: probably copied."
DEIT_B = "DeiT-B for 224×224 and 1000 classes has 86.57 M. The top-1 is the distilled DeiT-B's."
DEIT_B_HEADS = "17.03 itself needs heads of 48 channels. DeiT-B for 224×224 and 1000 classes has 86.57 M."
ONE_DIGIT = "0.6 with a digit added, it seems: PVTv2-b0 counts 0.57 G."
NO_POOLING = "b2's parameters demand that the pooling goes, and it goes here; this cell does not fit that."
FULL_KEYS = "Keys at full resolution, as the parameters demand, cost 4.04 G; 3.80 is less than that."
FOLDED = "The cell counts with BatchNorm folded into the convolutions."
FOLDED_CUT = "BatchNorm folded into the convolutions leaves 3.55 M, cut to 3.5."
FOLDED_CORE = "BatchNorm folded. Less than S0 without any attention, 0.376 G; our down-sampler keeps softmax."
CASTLING = "The block as released; Castling's published models contain more."
GATE = "The gate's place and size are inferred from its name."
folded = partial(Printed, left_out="batch_norm")

TABLE = Table(
    "Mobile-Attention",
    "Head size (2 channels here) and placement are not published; ours are inferred, so MACs may differ.",
    (
        section(
            "ImageNet",
            Printed("DeiT-T", "deit_tiny_patch16_224", "5.7", "1.25", "72.2"),
            Printed("Mobi-DeiT-T", "mobile_deit_tiny", "5.7", "1.22", "73.3", COPIED, ("macs",)),
            Printed("DeiT-S", "deit_small_patch16_224", "22.0", "4.60", "79.8", CUT, ("params",)),
            Printed("Mobi-DeiT-S", "mobile_deit_small", "22.0", "4.20", "80.0", FLOOR, BOTH),
            Printed("DeiT-B", "deit_base_patch16_224", "86.3", "17.56", "83.4", DEIT_B, ("params",)),
            Printed("Mobi-DeiT-B", "mobile_deit_base", "86.3", "17.03", "84.2", DEIT_B_HEADS, ("params",)),
            Printed("PVTv2-b0", "pvt_v2_b0", "3.7", "0.60", "70.5", ONE_DIGIT, ("macs",)),
            Printed("Mobi-PVTv2-b0", "mobile_pvt_v2_b0", "3.5", "0.56", "71.5", NO_POOLING, BOTH),
            Printed("PVTv2-b2", "pvt_v2_b2", "25.4", "4.00", "82.1"),
            Printed("Mobi-PVTv2-b2", "mobile_pvt_v2_b2", "21.1", "3.80", "82.6", FULL_KEYS, ("macs",)),
            Printed("PVTv2-b3", "pvt_v2_b3", "45.2", "", "83.3"),
            Printed("Mobi-PVTv2-b3", "mobile_pvt_v2_b3", "39.0", "", "84.0", NO_POOLING, ("params",)),
            folded("EfficientFormerV2-S0", "efficientformerv2_s0", "3.5", "0.40", "75.7", FOLDED_CUT, ("params",)),
            folded("Mobi-EFv2-S0", "mobile_efficientformerv2_s0", "3.5", "0.37", "76.0", FOLDED_CORE, ("macs",)),
            folded("EfficientFormerV2-S2", "efficientformerv2_s2", "12.6", "1.25", "81.6", FOLDED),
            folded("Mobi-EFv2-S2", "mobile_efficientformerv2_s2", "12.6", "1.22", "82.1", FOLDED),
            folded("EfficientFormerV2-L", "efficientformerv2_l", "26.1", "2.56", "83.3", FOLDED),
            folded("Mobi-EFv2-L", "mobile_efficientformerv2_l", "26.1", "2.50", "83.7", FOLDED),
        ),
        section(
            "Ablation on DeiT-S",
            Printed("Hydra", "hydra_deit_small", "", "4.10", "73.5", BELOW_FLOOR, ("macs",)),
            Printed("Castling", "castling_deit_small", "", "4.52", "79.8", CASTLING, ("macs",)),
            Printed("DeiT-S", "deit_small_patch16_224", "", "4.60", "79.8"),
            Printed("Vanilla heads", "mobile_deit_small_vanilla", "", "", "79.0"),
            Printed("With SE", "mobile_deit_small_se", "", "", "78.3", GATE),
            Printed("With GLU", "mobile_deit_small_glu", "", "", "77.5", GATE),
            Printed(
                "Without head competing", "mobile_deit_small_nocompete", "", "4.18", "76.4", BELOW_FLOOR, ("macs",)
            ),
            Printed("Mobile-Attention", "mobile_deit_small", "", "4.20", "80.0", BELOW_FLOOR, ("macs",)),
        ),
    ),
)
