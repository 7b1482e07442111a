"""Castling-ViT (CVPR 2023): its figures, and the rows that QT-ViT and Mobile-Attention print of it."""

from linvit.measurement.published.table import Printed, Table, section

BOTH = ("params", "macs")
FIGURE = "Parameters unverified; MACs and top-1 read off a figure (±0.01 G, ±0.02 %)."
TWO_SOURCES = "By the paper's figure and by QT-ViT's table 1."
BY_QT = "As QT-ViT's table 1 prints it."
BY_MOBILE = "As Mobile-Attention prints it."
DISTILLED = "With DeiT's distillation token, as the figure's baselines suggest (inferred). 5.9 is unverified."
BASELINE = "The figure's DeiT are the distilled ones."
UP = "MViTv2-B has 51.47 M, which does not round to 52."
DETECTOR = "PicoDet with a Castling backbone, read off a figure; the detector is not built here."
SEGMENTER = "Backbone only, without Mask2Former; the size of 640×640 is inferred from ViT-B's MACs."
VIT_SIZE = {"img_size": 640, "num_classes": 0}
PICTURE = (3, 640, 640)

TABLE = Table(
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
            *tuple(
                Printed(label, name, "", macs, f"{miou} mIoU", SEGMENTER, ("macs",), options=VIT_SIZE, size=PICTURE)
                for label, name, macs, miou in (
                    ("ViT-B", "deit_base_patch16_224", "182", "34.54"),
                    ("ViT-B, MAE", "deit_base_patch16_224", "182", "47.92"),
                    ("Castling-ViT-B", "castling_deit_base", "147", "34.67"),
                    ("Castling-ViT-B, MAE", "castling_deit_base", "147", "48.44"),
                )
            ),
        ),
        section(
            "COCO, PicoDet",
            *tuple(
                Printed("Castling", "", "", macs, f"{ap} AP", DETECTOR)
                for macs, ap in (("0.62", 28.1), ("1.06", 31.3), ("2.00", 34.0), ("3.03", 35.0), ("5.30", 37.3))
            ),
        ),
    ),
)
