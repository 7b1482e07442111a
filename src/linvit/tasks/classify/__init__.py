"""Classification: data by name, loaders, augmentation, metrics."""

from linvit.tasks.classify.data import Images, Stream, check_outputs, open_data, open_images
from linvit.tasks.classify.metrics import Evaluation, evaluate
from linvit.tasks.classify.pairing import PairedDifference, paired_difference
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing
from linvit.tasks.classify.resident import Pixels, Resident, decode
from linvit.tasks.classify.streaming import Streamed

__all__ = [
    "Augmentation",
    "Evaluation",
    "Images",
    "PairedDifference",
    "Pixels",
    "Preprocessing",
    "Resident",
    "Stream",
    "Streamed",
    "check_outputs",
    "decode",
    "evaluate",
    "open_data",
    "open_images",
    "paired_difference",
]
