"""A second opinion on the static problem: the same integers, solved by OR-Tools' CP-SAT."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import AtsplanError
from .knapsack import CPU, FREE

DEFAULT_LIMIT_SECONDS = 30.0


def check_placement(
    gains_ns: Sequence[int],
    sizes: Sequence[int],
    switch_ns: Sequence[int],
    capacity: int,
    objective_ns: int,
    forced: Sequence[int] | None = None,
    limit_seconds: float = DEFAULT_LIMIT_SECONDS,
) -> str:
    """Return CP-SAT's status, "optimal", or "feasible" if its time ran out before a proof.

    Raises AtsplanError if it finds a better objective than `objective_ns` or proves that one impossible,
    or if OR-Tools is not installed. The other arguments are those of `solve_placement`.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise AtsplanError("The check needs OR-Tools.", "Install it with: pip install ortools") from error

    model = cp_model.CpModel()
    on_gpu = [model.new_bool_var(f"x{i}") for i in range(len(gains_ns))]
    changes = []
    for i in range(1, len(on_gpu)):
        change = model.new_bool_var(f"d{i}")
        model.add(change >= on_gpu[i] - on_gpu[i - 1])
        model.add(change >= on_gpu[i - 1] - on_gpu[i])
        changes.append(change)
    model.add(cp_model.LinearExpr.weighted_sum(on_gpu, sizes) <= capacity)
    for i, place in enumerate(forced or ()):
        if place != FREE:
            model.add(on_gpu[i] == (0 if place == CPU else 1))
    model.maximize(
        cp_model.LinearExpr.weighted_sum(on_gpu, gains_ns) - cp_model.LinearExpr.weighted_sum(changes, switch_ns[1:])
    )
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_seconds
    solver.parameters.num_workers = 8  # different strategies; two of them alone often miss the optimum
    solver.parameters.linearization_level = 2
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    if status == cp_model.OPTIMAL:
        found = round(solver.objective_value)
        if found != objective_ns:
            raise AtsplanError(f"The two solvers disagree: {objective_ns} ns and {found} ns. This is a bug in atsplan.")
        return "optimal"
    if status == cp_model.FEASIBLE:
        found, bound = round(solver.objective_value), solver.best_objective_bound
        if not found <= objective_ns <= bound:
            raise AtsplanError(
                f"The two solvers disagree: {objective_ns} ns lies outside {found} to {bound:.0f} ns. "
                "This is a bug in atsplan."
            )
        return "feasible"
    raise AtsplanError(
        f"CP-SAT found no placement in {limit_seconds:g} s: {solver.status_name(status).lower()}.",
        "Solve without --check.",
    )
