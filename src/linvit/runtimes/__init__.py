"""Runtimes: a model as a file for ONNX Runtime, OpenVINO, Core ML or ExecuTorch, and the proof that it is the model."""

from linvit.runtimes.exporting import PRECISIONS, TARGETS, Exported, export
from linvit.runtimes.verifying import Check

__all__ = ["PRECISIONS", "TARGETS", "Check", "Exported", "export"]
