"""Whether this machine is ready, and what each task lacks here: `doctor`, `tasks`, the checks of `serve`."""
