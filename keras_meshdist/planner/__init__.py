"""Plans: the real step compiled for chips that aren't there, and ranked."""

from keras_meshdist.planner.plan import plan
from keras_meshdist.planner.remat import remat_blocks
from keras_meshdist.planner.report import MeshPlan, PlanReport

__all__ = ["MeshPlan", "PlanReport", "plan", "remat_blocks"]
