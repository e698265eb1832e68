"""The heart: plans, styles, layouts, and the one function that applies them."""

from .apply import parallelize
from .cross_entropy import IGNORED, cross_entropy, linear_cross_entropy
from .init import Constant, Init, Normal, Uniform
from .layout import Block, MeshSizes, ParamLayout
from .materialise import allocate, initialise
from .plan import ParallelPlan, load_plan
from .resolve import Resolved, resolve
from .state import ParallelState, state_of
from .styles import (
    Style,
    column,
    embedding,
    head,
    heads,
    packed_column,
    packed_row,
    replicate,
    row,
    scatter,
    sequence,
)

__all__ = [
    "IGNORED", "Block", "Constant", "Init", "MeshSizes", "Normal", "ParallelPlan", "ParallelState", "ParamLayout", "Resolved",
    "Style", "Uniform", "allocate", "column", "cross_entropy", "embedding", "head", "heads", "initialise",
    "linear_cross_entropy", "load_plan", "packed_column", "packed_row", "parallelize", "replicate", "resolve", "row",
    "scatter", "sequence", "state_of",
]  # fmt: skip
