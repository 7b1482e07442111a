"""What stages minimise: losses on labels, distillation, alignment, and what is solved before a stage begins."""
