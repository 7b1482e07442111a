"""Conversion: plan, hosts (one file per kind of attention), convert, save and load."""

from linvit.conversion.convert import convert, droppable, find_hosts
from linvit.conversion.hub.card import model_card
from linvit.conversion.hub.pushing import push_to_hub
from linvit.conversion.opening import load_weights, open_model, open_original, register_auto_classes
from linvit.conversion.plan import Choice, Pick, Plan, Rule, as_plan, list_plans, parse_plan
from linvit.conversion.report import Conversion, Layer, Report, Source
from linvit.conversion.resampling import resample, resample_patches, resample_windows
from linvit.conversion.saving import load, save
from linvit.conversion.sensitivity import Sensitivity, measure_sensitivity, output_similarity
from linvit.conversion.surveying import survey

__all__ = [
    "Choice",
    "Conversion",
    "Layer",
    "Pick",
    "Plan",
    "Report",
    "Rule",
    "Sensitivity",
    "Source",
    "as_plan",
    "convert",
    "droppable",
    "find_hosts",
    "list_plans",
    "load",
    "load_weights",
    "measure_sensitivity",
    "model_card",
    "open_model",
    "open_original",
    "output_similarity",
    "parse_plan",
    "push_to_hub",
    "register_auto_classes",
    "resample",
    "resample_patches",
    "resample_windows",
    "save",
    "survey",
]
