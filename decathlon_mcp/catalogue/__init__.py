"""The catalogue of tasks: filters, draws, pass rates, requirements."""
