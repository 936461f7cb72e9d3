"""Measures how good samples are: FID, KID, precision, recall, density, coverage, silo shares, nearest copies."""

from ddm.evaluation.measuring import Evaluation, Yardstick, evaluate
from ddm.evaluation.origins import SampleOrigins
from ddm.evaluation.reference import Reference

__all__ = ["Evaluation", "Reference", "SampleOrigins", "Yardstick", "evaluate"]
