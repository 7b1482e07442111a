"""Detection and segmentation: data in the usual formats, transforms that keep boxes and masks in step, loading."""
