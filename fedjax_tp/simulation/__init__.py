"""Runs an algorithm over cohorts of clients; the only room that knows devices."""

from fedjax_tp.simulation import cohort, evaluation, plan, rounds

__all__ = ["cohort", "evaluation", "plan", "rounds"]
