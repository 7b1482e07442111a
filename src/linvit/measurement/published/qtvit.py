"""QT-ViT (NeurIPS 2024): table 1, the Kronecker ablation and the detection table."""

from linvit.measurement.published.table import Printed, Table, section

MASK_RCNN = "The cell counts a whole Mask R-CNN, which is not counted here."
OTHER_REDUCTION = "A reduction the paper rejects; not built here."
EXACT = "The formula has (d + 1)² + 1 = 290 features where heads have 16 channels; 0.65 fits 260 to 279."

TABLE = Table(
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
            Printed("DeiT-T", "deit_tiny_patch16_224"),
            Printed("DeiT-S", "deit_small_patch16_224"),
            Printed("DeiT-B", "deit_base_patch16_224"),
            Printed("Swin-T", "swin_tiny_patch4_window7_224"),
            Printed("Swin-S", "swin_small_patch4_window7_224"),
            Printed("Swin-B", "swin_base_patch4_window7_224"),
            Printed("PVTv2-b0", "pvt_v2_b0"),
            Printed("PVTv2-b2", "pvt_v2_b2"),
            Printed("PVTv2-b3", "pvt_v2_b3"),
            Printed("MobileNetV2", "mobilenetv2_100"),
            Printed("MobileViT-XS", "mobilevit_xs", note="At 256×256, as published.", size=(3, 256, 256)),
            Printed("EfficientNet-B0", "efficientnet_b0"),
            Printed("ConvNeXt-T", "convnext_tiny"),
        ),
        section(
            "COCO, Mask R-CNN",
            Printed("QT-ViT-1", "", "57.9", "", "39.3 AP", MASK_RCNN),
            Printed("QT-ViT-2", "", "68.5", "", "41.1 AP", MASK_RCNN),
            Printed("QT-ViT-3", "", "93.1", "", "42.6 AP", MASK_RCNN),
            Printed("EfficientViT-B1", "", "57.6", "", "39.1 AP", MASK_RCNN),
            Printed("EfficientViT-B2", "", "68.0", "", "40.8 AP", MASK_RCNN),
            Printed("EfficientViT-B3", "", "92.1", "", "42.3 AP", MASK_RCNN),
        ),
    ),
)
