"""Conversion: plan, hosts (one file per family), convert, save and load."""

from linvit.conversion.convert import Report, convert, find_hosts
from linvit.conversion.plan import Choice, Plan, Rule, as_plan, list_plans
from linvit.conversion.resampling import resample_patches, resample_windows
from linvit.conversion.saving import load, save
from linvit.conversion.weights import load_weights

__all__ = [
    "Choice",
    "Plan",
    "Report",
    "Rule",
    "as_plan",
    "convert",
    "find_hosts",
    "list_plans",
    "load",
    "load_weights",
    "resample_patches",
    "resample_windows",
    "save",
]
