"""The pieces of the search, each on its own: steady state, points, choice, Pareto front, PD ratio, output."""
