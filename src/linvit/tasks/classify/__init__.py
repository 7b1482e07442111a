"""Classification: data by name, loaders, augmentation, metrics."""

from linvit.tasks.classify.batches import Batches
from linvit.tasks.classify.classes import match_classes
from linvit.tasks.classify.data import Images, Stream, check_outputs, open_data, open_images, open_split
from linvit.tasks.classify.metrics import Evaluation, evaluate
from linvit.tasks.classify.pairing import PairedDifference, paired_difference
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing
from linvit.tasks.classify.resident import Held, Pixels, Resident, decode
from linvit.tasks.classify.streaming import Streamed

__all__ = [
    "Augmentation",
    "Batches",
    "Evaluation",
    "Held",
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
    "match_classes",
    "open_data",
    "open_images",
    "open_split",
    "paired_difference",
]
