"""What the papers printed, each cell as it stands there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

BOTH = ("params", "macs")


@dataclass(frozen=True)
class Printed:
    """One line of a paper's table. Cells are the printed text, empty where the paper prints none.

    A printed cell must agree with our count unless `differs` names it; `note` says why, and anything else to know.
    """

    label: str
    model: str = ""  # what timm.create_model builds; empty for what is not built here
    params: str = ""  # in millions
    macs: str = ""  # in billions
    accuracy: str = ""  # top-1 in percent, or another metric by its name
    note: str = ""
    differs: tuple[str, ...] = ()  # of params and macs
    left_out: str = ""  # the paper counts parameters without these: mechanisms or batch_norm
    options: Mapping[str, Any] = field(default_factory=dict)  # for timm.create_model
    size: tuple[int, int, int] = (3, 224, 224)  # channels, height, width


@dataclass(frozen=True)
class Section:
    title: str
    rows: tuple[Printed, ...]


def section(title: str, *rows: Printed) -> Section:
    return Section(title, rows)


@dataclass(frozen=True)
class Table:
    title: str
    remark: str  # what holds for every row
    sections: tuple[Section, ...]
    convention: str = "macs"
    tolerance: float = 0.01  # of MACs, relative; a count that rounds to the printed digits agrees as well

    @property
    def rows(self) -> list[Printed]:
        return [row for section in self.sections for row in section.rows]


# A Fair Comparison between Efficient Attentions (Hong et al., 2022): the poster's table.
NO_SCORES = "The cell leaves out the score vectors w_q and w_k."
FROZEN = "The random projections are frozen and count neither here nor there."
LOCAL = "Plain local windows as in the released code; the poster says shifted."
PLAIN_XCA = "Without norm and temperature as in the released code; the poster prints both."
COLUMN_16 = "The cell is COL-16's; smaller patches make a smaller embedding."
PYRAMIDS = (  # parameters, FLOPs and top-1 with patches of 4 and of 7 pixels
    ("SA", "sa", "", ("28.27", "8.821", "81.80"), ("28.28", "1.915", "78.97")),
    ("LA", "la", "", ("30.91", "5.496", "79.04"), ("28.56", "1.561", "77.47")),
    ("EA", "ea", "", ("28.27", "4.480", "79.87"), ("28.28", "1.473", "77.91")),
    ("PA", "pa", FROZEN, ("28.27", "4.481", "78.73"), ("28.28", "1.473", "77.87")),
    ("AA", "aa", NO_SCORES, ("28.27", "4.394", "77.60"), ("28.28", "1.445", "76.02")),
    ("XCA", "xca", PLAIN_XCA, ("28.27", "4.480", "78.67"), ("28.28", "1.473", "77.62")),
    ("Swin", "window", LOCAL, ("28.27", "4.528", "80.08"), ("28.28", "1.500", "78.72")),
    ("LPI", "lpi", "", ("28.38", "4.520", "81.54"), ("28.39", "1.486", "79.70")),
)


def pyramids(patch: int, place: int) -> Section:
    rows = []
    for label, name, note, *cells in PYRAMIDS:
        model, left_out = f"fair_pyramid_p{patch}_{name}", "mechanisms" if note == NO_SCORES else ""
        rows.append(Printed(f"{label}-{patch}", model, *cells[place], note, left_out=left_out))
    return section(f"Patches of {patch} pixels", *rows)


FAIR = Table(
    "Fair Comparison between Efficient Attentions",
    "FLOPs as fvcore counts them: MACs, and 5 for every normalised element.",
    (
        pyramids(4, 0),
        pyramids(7, 1),
        section(
            "Column",
            Printed("COL-14", "fair_column_p14", "22.00", "6.117", "81.30", COLUMN_16, ("params",)),
            Printed("COL-16", "fair_column_p16", "22.00", "4.589", "80.97"),
        ),
    ),
    convention="fvcore",
    tolerance=0.0005,
)

# QT-ViT (NeurIPS 2024): table 1, the Kronecker ablation and the detection table.
CASCADE = (
    "The paper says Mask R-CNN, which would have 24.7, 35.1 and 59.2 M on EfficientViT. The cells are Cascade Mask "
    "R-CNN's for 80 classes: three stages, each with a mask head and one box for all classes."
)
OTHER_REDUCTION = "A reduction the paper rejects; not built here."
EXACT = "The formula has (d + 1)² + 1 = 290 features where heads have 16 channels; 0.65 fits 260 to 279."

QTVIT = Table(
    "QT-ViT",
    "QT-ViT-1 … 6 are EfficientViT B1, B2, B3, L1, L2 and L3. EfficientViT's cells are its authors' own.",
    (
        section(
            "ImageNet",
            Printed("QT-ViT-1", "qtvit_1", "9.4", "0.52", "79.6"),
            Printed("QT-ViT-2", "qtvit_2", "24.9", "1.60", "82.5"),
            Printed("QT-ViT-3", "qtvit_3", "49.7", "3.97", "83.9"),
            Printed("QT-ViT-4", "qtvit_4", "53.0", "5.26", "84.7"),
            Printed("QT-ViT-5", "qtvit_5", "64.1", "6.96", "85.2"),
            Printed("QT-ViT-6", "qtvit_6", "246.8", "27.60", "86.0"),
            Printed("EfficientViT-B1", "efficientvit_b1", "9.1", "0.52", "79.39"),
            Printed("EfficientViT-B2", "efficientvit_b2", "24", "1.6", "82.10"),
            Printed("EfficientViT-B3", "efficientvit_b3", "49", "4.0", "83.47"),
            Printed("EfficientViT-L1", "efficientvit_l1", "53", "5.3", "84.48"),
            Printed("EfficientViT-L2", "efficientvit_l2", "64", "6.9", "85.05"),
            Printed("EfficientViT-L3", "efficientvit_l3", "246", "28", "85.81"),
        ),
        section(
            "QT-ViT-1, Kronecker",
            Printed("Full", "qtvit_1", "", "0.65", "79.7", EXACT, ("macs",), options={"variant": "exact"}),
            Printed("Squares only", "qtvit_1", "", "0.52", "79.6"),
            Printed("Pooled by 2", "", "", "0.55", "79.3", OTHER_REDUCTION),
            Printed("Pooled by 4", "", "", "0.52", "79.1", OTHER_REDUCTION),
            Printed("In 2 chunks", "", "", "0.58", "79.4", OTHER_REDUCTION),
            Printed("In 4 chunks", "", "", "0.55", "79.3", OTHER_REDUCTION),
            Printed("In 8 chunks", "", "", "0.53", "79.1", OTHER_REDUCTION),
            Printed("Random d of d²", "", "", "0.52", "61.8", OTHER_REDUCTION),
        ),
        section(
            "Others, from timm",
            *(Printed(f"DeiT-{size[0].upper()}", f"deit_{size}_patch16_224") for size in ("tiny", "small", "base")),
            *(
                Printed(f"Swin-{size[0].upper()}", f"swin_{size}_patch4_window7_224")
                for size in ("tiny", "small", "base")
            ),
            *(Printed(f"PVTv2-{size}", f"pvt_v2_{size}") for size in ("b0", "b2", "b3")),
            Printed("MobileNetV2", "mobilenetv2_100"),
            Printed("MobileViT-XS", "mobilevit_xs", note="At 256×256, as published.", size=(3, 256, 256)),
            Printed("EfficientNet-B0", "efficientnet_b0"),
            Printed("ConvNeXt-T", "convnext_tiny"),
        ),
        section(
            "COCO, Mask R-CNN",
            *(
                Printed(label, "cascade_mask_rcnn", params, "", f"{ap} AP", CASCADE, options={"backbone": backbone})
                for label, backbone, params, ap in (
                    ("QT-ViT-1", "qtvit_1", "57.9", 39.3),
                    ("QT-ViT-2", "qtvit_2", "68.5", 41.1),
                    ("QT-ViT-3", "qtvit_3", "93.1", 42.6),
                    ("EfficientViT-B1", "efficientvit_b1", "57.6", 39.1),
                    ("EfficientViT-B2", "efficientvit_b2", "68.0", 40.8),
                    ("EfficientViT-B3", "efficientvit_b3", "92.1", 42.3),
                )
            ),
        ),
    ),
)

# Mobile-Attention (ICML 2024): the poster's two tables.
CUT = "DeiT-S has 22.05 M: the cell is cut, not rounded."
FLOOR = "Less than DeiT-S without any attention, 4.24 G: the column contradicts itself. 22.05 M is cut."
BELOW_FLOOR = "Less than DeiT-S without any attention, 4.24 G: the column contradicts itself."
COPIED_PAIR = "1.25 → 1.22 are also EfficientFormerV2-S2's cells: probably copied."
DEIT_B = "DeiT-B for 224×224 and 1000 classes has 86.57 M. The top-1 is the distilled DeiT-B's."
DEIT_B_HEADS = "17.03 itself needs heads of 48 channels. DeiT-B for 224×224 and 1000 classes has 86.57 M."
ONE_DIGIT = "0.6 with a digit added, it seems: PVTv2-b0 counts 0.57 G."
NO_POOLING = "b2's parameters demand that the pooling goes, and it goes here; this cell does not fit that."
FULL_KEYS = "Keys at full resolution, as the parameters demand, cost 4.04 G; 3.80 is less than that."
FOLDED = "The cell counts with BatchNorm folded into the convolutions."
FOLDED_CUT = "BatchNorm folded into the convolutions leaves 3.55 M, cut to 3.5."
FOLDED_CORE = "BatchNorm folded. Less than S0 without any attention, 0.376 G; our down-sampler keeps softmax."
AS_RELEASED = "The block as released; Castling's published models contain more."
GATE = "The gate's place and size are inferred from its name."
folded = partial(Printed, left_out="batch_norm")

MOBILE = Table(
    "Mobile-Attention",
    "Head size (2 channels here) and placement are not published; ours are inferred, so MACs may differ.",
    (
        section(
            "ImageNet",
            Printed("DeiT-T", "deit_tiny_patch16_224", "5.7", "1.25", "72.2"),
            Printed("Mobi-DeiT-T", "mobile_deit_tiny", "5.7", "1.22", "73.3", COPIED_PAIR, ("macs",)),
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
            Printed("Castling", "castling_deit_small", "", "4.52", "79.8", AS_RELEASED, ("macs",)),
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

# Castling-ViT (CVPR 2023): its figures, and the rows that QT-ViT and Mobile-Attention print of it.
FIGURE = "Parameters unverified; MACs and top-1 read off a figure (±0.01 G, ±0.02 %)."
TWO_SOURCES = "By the paper's figure and by QT-ViT's table 1."
BY_QT = "As QT-ViT's table 1 prints it."
BY_MOBILE = "As Mobile-Attention prints it."
DISTILLED = "With DeiT's distillation token, as the figure's baselines suggest (inferred). 5.9 is unverified."
BASELINE = "The figure's DeiT are the distilled ones."
UP = "MViTv2-B has 51.47 M, which does not round to 52."
DETECTOR = "PicoDet with a Castling backbone, read off a figure; which backbone is not published."
SEGMENTER = "Backbone only, without Mask2Former; the size of 640×640 is inferred from ViT-B's MACs."
ADAPTER = (
    "How ViT-B gets its pyramid is not published. 118 M fit a ViT-Adapter without its MLPs (inferred): 85.8 of ViT-B, "
    "11.9 of the adapter, 20.3 of Mask2Former. With the simple pyramid it is 111.2. MACs are those of 640×640, as the "
    "backbones' are; the 47 G that the paper adds to these fit Mask2Former's decoders at 512×512, which have 51 there."
)
VIT_SIZE = {"img_size": 640, "num_classes": 0}
segmenter = partial(Printed, note=SEGMENTER, differs=("macs",), options=VIT_SIZE, size=(3, 640, 640))
WITHOUT_MLPS = {"num_classes": 150, "pyramid": "adapter", "pyramid_args": {"mlp_ratio": 0}}

CASTLING = Table(
    "Castling-ViT",
    "The release is one block, a miniature; the published models contain more, so their counts differ.",
    (
        section(
            "ImageNet",
            Printed("LeViT-128", "levit_128", "9.2", "0.406", "78.6"),
            Printed("Castling-LeViT-128", "castling_levit_128", "10.5", "0.49", "79.6", FIGURE, BOTH),
            Printed("LeViT-192", "levit_192", "11", "0.658", "80.0"),
            Printed("Castling-LeViT-192", "castling_levit_192", "12.7", "0.82", "81.3", FIGURE, BOTH),
            Printed("LeViT-256", "levit_256", "19", "1.120", "81.6"),
            Printed("Castling-LeViT-256", "castling_levit_256", "22.0", "1.41", "82.6", FIGURE, BOTH),
            Printed("LeViT-384", "levit_384", "39", "2.353", "82.6"),
            Printed("Castling-LeViT-384", "castling_levit_384", "45.8", "2.90", "83.7", FIGURE, BOTH),
            Printed("MViTv2-T", "mvitv2_tiny", "24", "4.7", "82.3"),
            Printed("Castling-MViTv2-T", "castling_mvitv2_tiny", "24.1", "4.51", "84.07", FIGURE, ("macs",)),
            Printed("MViTv2-S", "mvitv2_small", "35", "7.0", "83.6"),
            Printed("Castling-MViTv2-S", "castling_mvitv2_small", "34.7", "6.94", "84.6", FIGURE, BOTH),
            Printed("MViTv2-B", "mvitv2_base", "52", "10.2", "84.4", UP, ("params",)),
            Printed("Castling-MViTv2-B", "castling_mvitv2_base", "51.9", "9.82", "85.0", TWO_SOURCES, BOTH),
            Printed("DeiT-T distilled", "deit_tiny_distilled_patch16_224", "", "", "74.5", BASELINE),
            Printed("Castling-DeiT-T", "castling_deit_tiny", "5.6", "1.18", "76.0", BY_QT, BOTH),
            Printed("  distilled", "castling_deit_tiny_distilled", "5.9", "", "", DISTILLED),
            Printed("DeiT-S distilled", "deit_small_distilled_patch16_224", "", "", "81.2", BASELINE),
            Printed("Castling-DeiT-S", "castling_deit_small", "", "4.52", "79.8", BY_MOBILE, ("macs",)),
            Printed("  distilled", "castling_deit_small_distilled"),
            Printed("DeiT-B distilled", "deit_base_distilled_patch16_224", "", "", "83.4", BASELINE),
            Printed("Castling-DeiT-B", "castling_deit_base", "87.2", "17.28", "84.2", BY_QT, BOTH),
            Printed("  distilled", "castling_deit_base_distilled"),
        ),
        section(
            "ADE20K, Mask2Former",
            segmenter("ViT-B", "deit_base_patch16_224", "", "182", "34.54 mIoU"),
            segmenter("ViT-B, MAE", "deit_base_patch16_224", "", "182", "47.92 mIoU"),
            segmenter("Castling-ViT-B", "castling_deit_base", "", "147", "34.67 mIoU"),
            segmenter("Castling-ViT-B, MAE", "castling_deit_base", "", "147", "48.44 mIoU"),
            *(
                Printed(
                    label,
                    "mask2former",
                    "118",
                    macs,
                    "",
                    ADAPTER,
                    ("macs",),
                    options=WITHOUT_MLPS | {"backbone": name},
                    size=(3, 640, 640),
                )
                for label, name, macs in (
                    ("ViT-B, whole", "deit_base_patch16_224", "229"),
                    ("Castling-ViT-B, whole", "castling_deit_base", "195"),
                )
            ),
        ),
        section(
            "COCO, PicoDet",
            *(
                Printed("Castling", "", "", macs, f"{ap} AP", DETECTOR)
                for macs, ap in (("0.62", 28.1), ("1.06", 31.3), ("2.00", 34.0), ("3.03", 35.0), ("5.30", 37.3))
            ),
        ),
    ),
)

TABLES = {"fair": FAIR, "qtvit": QTVIT, "mobile": MOBILE, "castling": CASTLING}
