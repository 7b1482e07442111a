"""Classification: data by name, loaders, augmentation, metrics."""
