"""Conversion: plan, hosts (one file per family), convert."""

from linvit.conversion.convert import Report, convert, find_hosts
from linvit.conversion.plan import Choice, Plan, Rule, as_plan, list_plans

__all__ = ["Choice", "Plan", "Report", "Rule", "as_plan", "convert", "find_hosts", "list_plans"]
