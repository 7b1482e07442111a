"""What a model costs: parameters and multiply-accumulates, beside what the papers printed."""

from linvit.measurement.macs import CONVENTIONS, Macs, count_macs, count_parameters, measure_macs

__all__ = ["CONVENTIONS", "Macs", "count_macs", "count_parameters", "measure_macs"]
